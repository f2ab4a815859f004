"""`penstock worker`, `gateway` and `sweeper`: one process each, as the Procfile starts them."""

from __future__ import annotations

from collections.abc import Callable

import typer

from workers.cli.exits import PROCESS_STATUS
from workers.cli.processes import gateway, sweeper, worker


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    examples: dict[Callable[..., None], str] = {
        worker.worker: "penstock worker --broker redis://10.0.0.5:6379/0 --model tiny --max-num-seqs 32",
        gateway.gateway: "penstock gateway --broker redis://10.0.0.5:6379/0 --host 0.0.0.0 --port 8000",
        sweeper.sweeper: "penstock sweeper --broker redis://10.0.0.5:6379/0",
    }
    for command, example in examples.items():
        epilog = f"Example: {example}\n\n{PROCESS_STATUS}"
        app.command(epilog=epilog, rich_help_panel="Processes")(command)
