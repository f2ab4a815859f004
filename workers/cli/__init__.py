"""The `penstock` command.

    up, demo, chat               -> system -> supervisor -> children: valkey, gateway, workers
    run                          -> the engine, in this process
    models                       -> models on this machine and on a hub
    bench                        -> workers.bench: load on a gateway, over HTTP
    worker, gateway, sweeper     -> one such process by itself
    submit, tail, result, cancel, explain -> client -> a gateway, over HTTP

Modules import what they need when a command runs, so that `--help` is quick and a caller's machine needs no torch.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from workers.cli.exits import Exit
from workers.runtime.cold_start import COLD_START

if TYPE_CHECKING:
    from typer import Typer

__all__ = ["main"]

#: Commands whose start is waited for, and their modules: tasks wait while a worker starts.
ALONE: Final = {
    "worker": "processes",
    "gateway": "processes",
    "sweeper": "processes",
    "up": "local.up",
}


def main() -> None:
    """The entry point of `penstock`."""
    COLD_START.mark("process")
    # Ctrl-C during the imports ends the process at once: there is nothing to clean up yet. A process that ignores
    # SIGINT, such as a script's background job, goes on ignoring it.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, lambda *_: os._exit(Exit.INTERRUPTED))
    from workers.cli.root import main as run

    app = _app(sys.argv[1:2])
    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run(app)


def _app(command: list[str]) -> Typer:
    """The app with this command: of those that start as processes, without all others, which takes less time."""
    if command and command[0] in ALONE:
        from workers.cli.root import root

        app = root()
        import_module(f"workers.cli.{ALONE[command[0]]}").add_to(app)
        return app
    from workers.cli.app import app as all_of_them

    return all_of_them
