"""`penstock sweeper`: one process that repairs, runs batches and compacts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from producers.connection.local import FILES_DIR
from workers.cli.commands import Commands
from workers.cli.exits import PROCESS_STATUS, refusing
from workers.cli.options import BackupKey, Broker, FilesDir, HealthPort, LogLevel, Store, UniqueName, finite, place
from workers.cli.starting import look_at_files, look_at_servers, set_up_logging, store_of

if TYPE_CHECKING:
    from producers.client.aio import AsyncClient
    from producers.gateway.batches.endpoints import LineEndpoints
    from producers.sweeper.sweeper import SweeperSettings
    from workers.runtime.health import Health


app = Commands("Processes", PROCESS_STATUS)


@app.shown("penstock sweeper --broker redis://10.0.0.5:6379/0")
def sweeper(
    broker: Broker,
    store: Store = None,
    name: UniqueName = None,
    lease: Annotated[
        float,
        typer.Option(min=1, callback=finite, help="Seconds without a heartbeat after which another sweeper leads."),
    ] = 5.0,
    compact_after: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="Seconds between a task's settlement and its stream's compaction."),
    ] = 60.0,
    dead_letter_days: Annotated[
        float, typer.Option(min=0, callback=finite, help="Days that dead letters are kept.")
    ] = 14.0,
    usage_days: Annotated[
        float, typer.Option(min=1, callback=finite, help="Days that `penstock usage` looks back.")
    ] = 400.0,
    reader_lease: Annotated[
        float, typer.Option(min=1, callback=finite, help="The same as the gateways' --reader-lease.")
    ] = 15.0,
    files_dir: FilesDir = None,
    results_to_files: Annotated[
        int | None,
        typer.Option(
            min=1, help="Move results that take so many bytes, compacted, from the store to --files-dir. Unset: none."
        ),
    ] = None,
    max_batch_lines: Annotated[
        int, typer.Option(min=1, help="Lines of one batch that are queued, or wait to be written, at a time.")
    ] = 20_000,
    max_lines_per_tenant: Annotated[
        int,
        typer.Option(
            min=1,
            help="The same of all batches of a tenant; `penstock tenants limit --max-lines` goes before it.",
        ),
    ] = 100_000,
    unserved_after: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Seconds after which a task ends that needs a later release than that of all workers that are up.",
        ),
    ] = 600.0,
    journal: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            envvar="PENSTOCK_JOURNAL",
            callback=place,
            help="Keep a journal there of what must not come back with a backup: a folder, or s3://BUCKET/PREFIX, of "
            "its own. Unset: none is kept.",
        ),
    ] = None,
    backup_key: BackupKey = None,
    health_port: HealthPort = None,
    log_level: LogLevel = "info",
) -> None:
    """Repair what dead processes left: unsent tasks, unsettled results, lost readers. Run batches. Compact streams.

    Any number may run: one leads, and another takes over within seconds when it dies.
    """
    import asyncio

    from producers.backup.sealed import read_keys
    from producers.errors import PenstockError
    from producers.sweeper.sweeper import SweeperSettings
    from producers.sweeper.usage import Ages
    from workers.runtime.health import Health

    set_up_logging(log_level)
    with refusing(PenstockError):
        ring = read_keys(backup_key)
    settings = SweeperSettings(
        broker,
        store_of(broker, store),
        lease=lease,
        reader_lease=reader_lease,
        compact_after=compact_after,
        letters_kept=dead_letter_days * 24 * 3600,
        usage=Ages(kept=usage_days * 24 * 3600),
        files_dir=str(files_dir or FILES_DIR),
        results_to_files=results_to_files,
        batch_lines=max_batch_lines,
        tenant_lines=max_lines_per_tenant,
        unserved_after=unserved_after,
        journal=journal,
        journal_keys=ring,
    )
    if name is not None:
        settings = replace(settings, name=name)
    health = Health(health_port)
    with refusing(ValueError, PenstockError):
        look_at_servers(broker, store)
        look_at_files(settings.files_dir)
        if journal is not None:
            look_at_files(journal)
        asyncio.run(sweep(settings, health))


async def sweep(settings: SweeperSettings, health: Health | None = None) -> None:
    """Run a sweeper, as leader or in reserve, until SIGTERM or SIGINT."""
    import asyncio
    from contextlib import suppress

    from producers.client.aio import AsyncClient
    from producers.sweeper.condition import Condition
    from producers.sweeper.sweeper import lead
    from workers.runtime.signals import when_told

    async with AsyncClient(settings.broker, settings.store) as client:
        endpoints = _endpoints(client)
        condition = Condition()
        if health is not None:
            health.serve(condition, asyncio.get_running_loop())
        task = asyncio.create_task(lead(client, settings, endpoints, condition))
        when_told(task.cancel)
        with suppress(asyncio.CancelledError):
            await task
        if endpoints is not None:
            endpoints.close()


def _endpoints(client: AsyncClient) -> LineEndpoints | None:
    """The endpoints that batches are for; None where the gateway is not installed."""
    import logging

    try:
        from producers.gateway.batches.endpoints import LineEndpoints
    except ModuleNotFoundError as error:
        log = logging.getLogger(__name__)
        log.warning("batches are left to another sweeper: they need %s (pip install 'penstock[gateway]')", error.name)
        return None
    return LineEndpoints(client)
