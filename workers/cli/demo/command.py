"""`penstock demo`: starts the whole system, shows it at work, and removes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import PROCESS_STATUS, check_extras
from workers.cli.models.references import ModelOption, find_models

if TYPE_CHECKING:
    from workers.cli.local.system import System

#: Looks at the workers' leases, 0.1 s apart, until they report all tokens made.
LOOKS: Final = 100


app = Commands("Start here", PROCESS_STATUS)


@app.shown("penstock demo")
def demo(
    model: ModelOption = "tiny",
    tasks: Annotated[int, typer.Option(min=1, max=500, help="Number of tasks to submit.")] = 24,
) -> None:
    """Start everything in a temporary folder, run tasks of all tiers, show them, and stop everything."""
    from workers.cli.exits import Exit, Failure
    from workers.errors import Refused

    check_extras("gateway", "worker", "webhooks")
    from workers.cli.local.background import running

    models = find_models([model], typer.echo)
    # The batch holds a third of the load, so that tiers matter. A short lease keeps its figures fresh.
    options = ("--max-num-seqs", str(max(2, tasks // 3)), "--lease", "5")
    typer.echo("Starting an embedded Valkey server, a gateway, a worker and a sweeper ...")
    try:
        with running(models, drain=3.0, worker_options=options) as system:
            _use(system, tasks)
    except Refused as refused:
        raise Failure(f"the demo failed: {refused}", refused.status) from refused
    except (KeyboardInterrupt, SystemExit):
        raise Failure("interrupted; everything was stopped", Exit.INTERRUPTED) from None
    typer.echo("Everything was stopped. To keep it running for use: penstock up")


def _use(system: System, tasks: int) -> None:
    """Run the load and print the report."""
    import time

    from rich.console import Console

    from producers.admin.fleet import read_fleet
    from workers.cli.admin import servers
    from workers.cli.client import Gateway
    from workers.cli.demo.load import Load
    from workers.cli.demo.report import KvUse, report

    gateway, console, kv = Gateway(system.url), Console(), KvUse()
    (model,) = gateway.models()
    load = Load(gateway, model["id"], tasks, console)
    load.run()
    with servers.system(system.broker, system.store) as (client, loop):
        made = sum(task.result["usage"]["output_tokens"] for task in load.tasks)
        # A lease's figures are as old as its last renewal.
        for _ in range(LOOKS):
            if kv.note(loop.run(read_fleet(client.store, client.broker))) >= made:
                break
            time.sleep(0.1)
    report(console, load.tasks, kv)
