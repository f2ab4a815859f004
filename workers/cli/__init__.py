"""The `penstock` command.

    up, demo, chat               -> system -> supervisor -> children: valkey, gateway, workers
    run                          -> the engine, in this process
    models                       -> the models on this machine, and a hub's
    bench                        -> workers.bench: load on a gateway, over HTTP
    worker, gateway, sweeper     -> one of those processes, by itself
    submit, tail, result, cancel -> client -> a gateway, over HTTP

Modules import what they need when a command runs, so that `--help` is quick and a caller's machine needs no torch.
"""

from __future__ import annotations

import os
import signal

from workers.cli.exits import Exit

__all__ = ["main"]


def main() -> None:
    """The entry point of `penstock`."""
    # Ctrl-C while the commands are imported: nothing has begun that would have to be put in order. Left alone where it
    # does nothing, as in a script's background job.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, lambda *_: os._exit(Exit.INTERRUPTED))
    from workers.cli import app

    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()
