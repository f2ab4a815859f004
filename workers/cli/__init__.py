"""The `penstock` command.

    up, demo, chat               -> system -> supervisor -> children: valkey, gateway, workers
    run                          -> the engine, in this process
    models, prepare              -> models on this machine and on a hub
    trials: bench, chaos         -> workers.trials: load and faults for a running system
    worker, gateway, background  -> one such process by itself
    tasks, batch                 -> client -> a gateway, over HTTP
    all others                   -> servers: the broker and the store

Modules import what they need when a command runs, so that `--help` is quick and a caller's machine needs no torch.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Final

from workers.cli.exits import Exit
from workers.processes import ahead
from workers.runtime.cold_start import COLD_START

if TYPE_CHECKING:
    from typer import Typer

__all__ = ["app_of", "main"]

#: The modules with commands, in the order of --help, and the commands that each adds; `MODULE:NAME` names another
#: Typer of the module than its `app`. Several modules add theirs to one Typer.
MODULES: Final = {
    "up": "up url",
    "demo": "demo",
    "run": "run chat",
    "tasks": "submit embed classify rerank tail result cancel explain tasks",
    "batch": "batch",
    "models publication routing comparison": "models",
    "adapters": "adapters",
    "watermark": "watermark",
    "prepare": "quantize warm",
    "worker": "worker",
    "ranks": "ranks",
    "gateway": "gateway",
    "background": "sweeper sources autoscaler",
    "scale": "scale",
    "plan": "plan",
    "top": "top",
    "rollouts": "rollout",
    "worker:drain_app": "drain",
    "dlq": "dlq",
    "doctor": "doctor",
    "keys:tenant_commands": "tenants",
    "keys": "keys audit",
    "secrets": "secrets",
    "backup": "backup restore prune-journal",
    "keys:usage_app": "usage",
    "webhooks": "webhooks",
    "aws": "aws",
    "trials": "bench chaos",
    "commands": "completion",
}


def main() -> None:
    """The entry point of `penstock`."""
    COLD_START.mark("process")
    # Ctrl-C during the imports ends the process at once: there is nothing to clean up yet. A process that ignores
    # SIGINT, such as a script's background job, goes on ignoring it.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, lambda *_: os._exit(Exit.INTERRUPTED))
    if sys.argv[1:2] == ["up"] and "--help" not in sys.argv:
        with suppress(OSError, AttributeError):  # without a standard error nobody is told
            sys.stderr.write("up | loading the program\n")  # its imports take a second or more
            sys.stderr.flush()
        ahead.begin()
    try:
        from workers.cli.commands import main as run

        app = app_of(sys.argv[1] if len(sys.argv) > 1 else None)
        if listens:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run(app)
    finally:
        ahead.end()


def app_of(command: str | None) -> Typer:
    """The app with this command, without the others, which take most of the time; with all, for another word."""
    from workers.cli.commands import root

    app = root()
    alone = [name for name, commands in MODULES.items() if command in commands.split()]
    for name in alone or MODULES:
        modules, _, typer = name.partition(":")
        *_, last = [import_module(f"workers.cli.{module}") for module in modules.split()]
        app.add_typer(getattr(last, typer or "app"))
    return app
