"""`penstock ranks`: this machine's part of a model that a worker on another machine serves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import Exit, Failure, check_signing, needs
from workers.cli.options import ENGINE, LogLevel, ModelOption, RequireSignature, find_models
from workers.cli.servers import checked_level
from workers.cli.terminal import say

STATUS: Final = "Exit status: 0 the worker has ended the group, 1 a part of it was lost, 2 refused, 130 interrupted."

app = Commands("Processes", STATUS)


@contextmanager
def _naming_options() -> Iterator[None]:
    """Refuses the command for an EngineError, whose fields are named as this command's options."""
    from engine.errors import EngineError, message_of, renamed

    try:
        yield
    except EngineError as error:
        options = {field: f"--{field.replace('_', '-')}" for field in ("lead", "ranks_address", "ranks_secret")}
        raise Failure(renamed(message_of(error), options)) from error


@app.shown("penstock ranks --model llama-70b --lead 10.0.0.5 --node 1 --ranks-secret /etc/penstock/ranks.secret")
def ranks(
    model: ModelOption,
    *,
    lead: Annotated[
        str,
        typer.Option(
            envvar=["PENSTOCK_RANKS_LEAD", "LWS_LEADER_ADDRESS", "MASTER_ADDR"],
            metavar="HOST",
            help="The machine with the worker (--nodes).",
        ),
    ],
    node: Annotated[
        int,
        typer.Option(
            envvar=["PENSTOCK_RANKS_NODE", "LWS_WORKER_INDEX", "RANK"],
            min=1,
            max=15,
            help="Which of the machines this is; the worker's is 0.",
        ),
    ],
    port: Annotated[
        int,
        typer.Option(
            envvar=["PENSTOCK_RANKS_PORT", "MASTER_PORT"],
            min=1,
            max=65535,
            help="The worker's port for ranks (--ranks-address).",
        ),
    ] = 29500,
    ranks_secret: Annotated[Path, typer.Option(help="File with the secret that the worker has.")],
    ranks_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where this machine waits for the next one, with three machines or more. Unset: it is the last.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=4096, help=str(ENGINE["threads"].option and ENGINE["threads"].option.help))
    ] = None,
    require_signature: RequireSignature = None,
    log_level: LogLevel = "info",
) -> None:
    """Compute stages of a model on this machine for a worker on another one, until it ends or a part of it is lost.

    It has no lease and takes no tasks. All settings but these are the worker's.
    """
    with needs("worker"):
        from engine.execution.ranks.meeting import parse_address, read_secret
        from engine.execution.ranks.nodes import Node
        from workers.library import verify
        from workers.library.signatures import check_signature
    if require_signature:
        check_signing()
    logging.basicConfig(level=checked_level(log_level), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with _naming_options():
        # Before the model, which may have to be downloaded.
        address = parse_address(f"{lead}:{port}", "lead")
        if ranks_address:
            parse_address(ranks_address)
        secret = read_secret(str(ranks_secret))
        (resolved,) = find_models([model])
        if require_signature:
            check_signature(resolved.folder, require_signature)
        verify(resolved.folder, say=say)
        part = Node(
            resolved.folder,
            address,
            node,
            secret,
            listen=ranks_address or "",
            threads=threads,
        )
        closed = part.run()
    if not closed:
        say("the group is lost: the worker, or a rank, has ended")
    raise typer.Exit(Exit.OK if closed else Exit.TASK_FAILED)
