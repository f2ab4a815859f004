"""`penstock demo`: starts the whole system, shows it at work, and removes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from workers.cli.exits import PROCESS_STATUS, needs
from workers.cli.models.references import ModelOption, find_models

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from workers.cli.local.system import System

#: Looks at the workers' leases, 0.1 s apart, until they report all tokens made.
LOOKS: Final = 100


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(epilog=f"Example: penstock demo\n\n{PROCESS_STATUS}", rich_help_panel="Start here")(demo)


def demo(
    model: ModelOption = "tiny",
    tasks: Annotated[int, typer.Option(min=1, max=500, help="Number of tasks to submit.")] = 24,
) -> None:
    """Start everything in a temporary folder, run tasks of all tiers, show them, and stop everything."""
    import asyncio
    import tempfile
    from pathlib import Path

    from workers.cli.exits import Exit, Failure

    with needs("gateway", "worker", "webhooks"):
        from workers.cli.local.plan import Plan
        from workers.cli.local.system import System, conduct

    models = find_models([model], typer.echo)
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        # The batch holds a third of the load, so that tiers matter. A short lease keeps its figures fresh.
        options = ("--max-num-seqs", str(max(2, tasks // 3)), "--lease", "5")
        plan = Plan(models, Path(folder), port=0, drain=3.0, worker_options=options)
        system = System(plan, lambda name, line: said.append(f"{name} | {line}"))
        typer.echo("Starting an embedded Valkey server, a gateway, a worker and a sweeper ...")
        try:
            finished = asyncio.run(conduct(system, lambda system: _use(system, tasks)))
        except Failure as failure:
            last = "".join(f"\n  {line}" for line in said[-20:])
            raise Failure(f"the demo failed: {failure}{last}", failure.status) from failure
    if not finished:
        raise Failure("interrupted; everything was stopped", Exit.INTERRUPTED)
    typer.echo("Everything was stopped. To keep it running for use: penstock up")


async def _use(system: System, tasks: int) -> None:
    """Run the load on its own thread and print the report."""
    import asyncio

    from rich.console import Console

    from producers.admin.fleet import read_fleet
    from producers.client.aio import AsyncClient
    from workers.cli.client import Gateway
    from workers.cli.demo.load import Load
    from workers.cli.demo.report import KvUse, report

    gateway, console, kv = Gateway(system.url), Console(), KvUse()
    (model,) = await asyncio.to_thread(gateway.models)
    load = Load(gateway, model["id"], tasks, console)
    await asyncio.wrap_future(_beside(load.run))
    async with AsyncClient(system.broker, system.store) as client:
        made = sum(task.result["usage"]["output_tokens"] for task in load.tasks)
        # A lease's figures are as old as its last renewal.
        for _ in range(LOOKS):
            if kv.note(await read_fleet(client.store, client.broker)) >= made:
                break
            await asyncio.sleep(0.1)
    report(console, load.tasks, kv)


def _beside(work: Callable[[], None]) -> Future[None]:
    """Run it on a thread. A daemon: after an interrupt, it would wait for streams that end only with the gateway."""
    import threading
    from concurrent.futures import Future

    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - handed over to who waits
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="demo", daemon=True).start()
    return done
