"""`penstock worker`, `gateway` and `sweeper`: one process each, as the Procfile starts them."""

from __future__ import annotations

import typer

from workers.cli.exits import PROCESS_STATUS, Command, add_commands
from workers.cli.processes import gateway, sweeper, worker


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    server = "--broker redis://10.0.0.5:6379/0"
    commands: dict[str, Command] = {
        "worker": (worker.worker, f"penstock worker {server} --model tiny --max-num-seqs 32"),
        "gateway": (gateway.gateway, f"penstock gateway {server} --host 0.0.0.0 --port 8000"),
        "sweeper": (sweeper.sweeper, f"penstock sweeper {server}"),
    }
    add_commands(app, PROCESS_STATUS, commands, "Processes")
