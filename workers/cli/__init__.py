"""The `penstock` command.

    up, demo, chat               -> system -> supervisor -> children: valkey, gateway, workers
    run                          -> the engine, in this process
    models                       -> models on this machine and on a hub
    bench                        -> workers.bench: load on a gateway, over HTTP
    worker, gateway, sweeper     -> one such process by itself
    submit, tail, result, cancel -> client -> a gateway, over HTTP

Modules import what they need when a command runs, so that `--help` is quick and a caller's machine needs no torch.
"""

from __future__ import annotations

import os
import signal

from workers.cli.exits import Exit
from workers.runtime.cold_start import COLD_START

__all__ = ["main"]


def main() -> None:
    """The entry point of `penstock`."""
    COLD_START.mark("process")
    # Ctrl-C during the imports ends the process at once: there is nothing to clean up yet. A process that ignores
    # SIGINT, such as a script's background job, goes on ignoring it.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, lambda *_: os._exit(Exit.INTERRUPTED))
    from workers.cli import app

    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()
