"""`penstock sweeper`, `penstock sources`, `penstock autoscaler`: the processes beside gateways and workers.

The sweeper repairs, runs batches and compacts. Sources make tasks and batches of what comes from elsewhere. The
autoscaler decides how many workers each pool has, and starts and ends them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.commands import Commands
from workers.cli.exits import PROCESS_STATUS, Exit, Failure, needs, refusing
from workers.cli.options import (
    MODEL,
    BackupKey,
    Broker,
    DataDir,
    FilesDir,
    HealthPort,
    LogLevel,
    Store,
    UniqueName,
    checked_location,
    complete_model,
    finite,
)
from workers.cli.servers import addresses, files_of, look_at_files, look_at_servers, set_up_logging, use_secrets_key
from workers.cli.terminal import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from producers.client.aio import AsyncClient
    from producers.gateway.batch_endpoints import LineEndpoints
    from producers.sources.source import SourceSettings
    from producers.sweeper.gen_ai import MetricsExporter
    from producers.sweeper.sweeper import SweeperSettings
    from producers.tracing.export import Tracer
    from workers.autoscaler.autoscaler import AutoscalerSettings
    from workers.autoscaler.pools import PoolSettings, Scaled
    from workers.runtime.health import Health


app = Commands("Processes", PROCESS_STATUS)


@app.shown("penstock sweeper --broker redis://10.0.0.5:6379/0")
def sweeper(
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
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
            callback=checked_location,
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
    from producers.sweeper.gen_ai import metrics_exporter
    from producers.sweeper.retention import Ages
    from producers.sweeper.sweeper import SweeperSettings
    from producers.tracing.export import tracer
    from workers.runtime.health import Health

    set_up_logging(log_level)
    with refusing(PenstockError):
        ring = read_keys(backup_key)
    broker, store = addresses(broker, store, data_dir)
    settings = SweeperSettings(
        broker,
        store,
        lease=lease,
        reader_lease=reader_lease,
        compact_after=compact_after,
        letters_kept=dead_letter_days * 24 * 3600,
        usage=Ages(kept=usage_days * 24 * 3600),
        files_dir=files_of(files_dir, data_dir),
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
        look_at_servers(broker, store, "sweeper")
        look_at_files(settings.files_dir)
        if journal is not None:
            look_at_files(journal)
        asyncio.run(sweep(settings, health, tracer("sweeper"), metrics_exporter()))


async def sweep(
    settings: SweeperSettings,
    health: Health | None = None,
    tracer: Tracer | None = None,
    exporter: MetricsExporter | None = None,
) -> None:
    """Run a sweeper, as leader or in reserve, until SIGTERM or SIGINT. `tracer`, `exporter`: see `sweeper.lead`."""
    import asyncio
    from contextlib import suppress

    from producers.client.aio import AsyncClient
    from producers.sweeper.sweeper import Condition, lead
    from workers.runtime.signals import on_stop_signal

    async with AsyncClient(settings.broker, settings.store) as client:
        endpoints = _endpoints(client)
        condition = Condition()
        if health is not None:
            health.serve(condition, asyncio.get_running_loop())
        task = asyncio.create_task(lead(client, settings, endpoints, condition, tracer, exporter))
        on_stop_signal(task.cancel)
        with suppress(asyncio.CancelledError):
            await task
        if endpoints is not None:
            endpoints.close()


def _endpoints(client: AsyncClient) -> LineEndpoints | None:
    """The endpoints that batches are for; None where the gateway is not installed."""
    import logging

    try:
        from producers.gateway.batch_endpoints import LineEndpoints
    except ModuleNotFoundError as error:
        log = logging.getLogger(__name__)
        log.warning("batches are left to another sweeper: they need %s (pip install 'penstock[gateway]')", error.name)
        return None
    return LineEndpoints(client)


@app.shown("penstock sources --broker redis://10.0.0.5:6379/0 --config sources.toml")
def sources(
    config: Annotated[
        Path | None, typer.Option(help="The TOML file with a table for each source (docs/use/sources.md).")
    ] = None,
    watch_folder: Annotated[
        list[Path] | None,
        typer.Option(help="A folder whose inbox/ gets files of requests; results go to its outbox/. May be repeated."),
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    files_dir: FilesDir = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds for giving back what was taken, after SIGTERM.")
    ] = 25.0,
    health_port: HealthPort = None,
    log_level: LogLevel = "info",
) -> None:
    """Make tasks and batches of messages, files, bucket events and schedules, until SIGTERM. Any number may run."""
    import asyncio

    from producers.sources.settings import BadSources, parse, read
    from workers.runtime.health import Health

    set_up_logging(log_level)
    use_secrets_key(None)
    folders = {f"folder{number}": str(path) for number, path in enumerate(watch_folder or (), 1)}
    if config is None and not folders:
        raise Failure("there is no source: name a file with --config, or a folder with --watch-folder")
    with refusing(BadSources):
        configured = read(config) if config is not None else {}
        configured |= {name: parse(name, {"type": "folder", "folder": path}) for name, path in folders.items()}
    broker, store = addresses(broker, store, data_dir)
    health = Health(health_port)
    with refusing(ValueError):
        look_at_servers(broker, store, "sources")
        files = files_of(files_dir, data_dir)
        look_at_files(files)
        asyncio.run(_run_sources(configured, broker, store, files, drain_timeout, health))


async def _run_sources(
    configured: Mapping[str, SourceSettings], broker: str, store: str, files_dir: str, drain_s: float, health: Health
) -> None:
    """Run the sources until SIGTERM or SIGINT. Ends the process if they do not end in time."""
    import asyncio
    import logging
    import os
    import secrets
    import socket

    from producers.client.aio import AsyncClient
    from producers.sources.source import Context, Sources
    from producers.store import epoch
    from workers.runtime.signals import on_stop_signal

    log = logging.getLogger(__name__)
    async with AsyncClient(broker, store) as client:
        context = Context(client, store, f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(3)}", files_dir)
        sources = Sources([settings.source(name, context) for name, settings in configured.items()])
        health.serve(sources, asyncio.get_running_loop())
        stop = asyncio.Event()
        on_stop_signal(stop.set)
        log.info("sources: %s", ", ".join(f"{name} ({settings.type})" for name, settings in configured.items()))
        watching = asyncio.create_task(epoch.watch(client.store, stop.set))
        running = asyncio.create_task(sources.run())
        counting = asyncio.create_task(context.outcomes.run(client.store, context.process))
        await stop.wait()
        watching.cancel()
        running.cancel()
        await asyncio.wait((running,), timeout=drain_s)
        if not running.done():  # a thread may wait for a server that never answers: no other end is sure
            log.error("stopped at once: the drain took more than %g s", drain_s)
            os._exit(Exit.TASK_FAILED)
        counting.cancel()
        await asyncio.wait((counting,))


@app.shown(
    "penstock autoscaler --broker redis://10.0.0.5:6379/0 --model tiny --max 4 --actuator kubernetes://default/worker-tiny"
)
def autoscaler(
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    model: Annotated[str | None, typer.Option(help=MODEL, autocompletion=complete_model)] = None,
    model_version: Annotated[
        str | None, typer.Option(help="Scale workers of this version only. Unset: all versions together.")
    ] = None,
    min_workers: Annotated[
        int | None, typer.Option("--min", min=0, help="Workers that run at any time. Unset: 0.")
    ] = None,
    max_workers: Annotated[int | None, typer.Option("--max", min=1, help="Workers that run at most. Unset: 1.")] = None,
    cool_down: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            callback=finite,
            help="Seconds for which fewer workers must have been enough before one ends. Unset: 300.",
        ),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=finite,
            help="Share of its target wait (flex 300 s, batch 3600 s) after which a flex or batch task starts a "
            "worker. Unset: 0.5, but two cold starts where one takes less than 10 s, or workers are local.",
        ),
    ] = None,
    worth: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            callback=finite,
            help="Work queued in flex and batch, in cold starts of a worker, from which on it starts one at once. "
            "Unset: 2.",
        ),
    ] = None,
    actuator: Annotated[
        str | None,
        typer.Option(
            help="What starts and ends workers: local, kubernetes://NAMESPACE/DEPLOYMENT, ecs://CLUSTER/SERVICE, "
            "ec2://GROUP. Unset: export, nothing; another program follows penstock_desired_workers."
        ),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Set another constant of the policy (docs/run/scaling.md). May be repeated."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with several pools (docs/run/scaling.md), instead of --model.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print decisions. Lead nothing, write nothing, start and end nothing.")
    ] = False,
    name: UniqueName = None,
    lease: Annotated[
        float,
        typer.Option(min=1, callback=finite, help="Seconds without a heartbeat after which another autoscaler leads."),
    ] = 5.0,
    interval: Annotated[
        float, typer.Option(min=0.05, max=10, callback=finite, help="Seconds between two decisions.")
    ] = 1.0,
    health_port: HealthPort = None,
    log_level: LogLevel = "info",
) -> None:
    """Decide how many workers each pool has, and start and end them, until SIGTERM. Any number may run: one leads."""
    import asyncio

    from workers.autoscaler.autoscaler import AutoscalerSettings
    from workers.autoscaler.pools import BadScaling, opened
    from workers.runtime.health import Health

    set_up_logging(log_level)
    options = {
        "model": model,
        "version": model_version,
        "min": min_workers,
        "max": max_workers,
        "cool_down": cool_down,
        "patience": patience,
        "worth": worth,
        "actuator": actuator,
    }
    settings = AutoscalerSettings(lease=lease, every=interval)
    if name is not None:
        settings = replace(settings, name=name)
    broker, store = addresses(broker, store, data_dir)
    with refusing(BadScaling):
        pool_settings = _checked_interval(_pools(options, rule or [], config), interval)
        with needs(*_extras(pool_settings)):
            pools = opened(pool_settings, broker, store)
    health = Health(health_port)
    with refusing(ValueError):
        look_at_servers(broker, store, "autoscaler")
        asyncio.run(_run_autoscaler(broker, store, pools, settings, dry_run, health))


async def _run_autoscaler(
    broker: str, store: str, pools: Sequence[Scaled], settings: AutoscalerSettings, dry_run: bool, health: Health
) -> None:
    """Scale until SIGTERM or SIGINT; then let another lead at once. Workers of local actuators drain before the end."""
    import asyncio
    import logging
    from contextlib import suppress

    from producers.client.aio import AsyncClient
    from workers.autoscaler.autoscaler import Autoscaler
    from workers.autoscaler.pools import fixed
    from workers.runtime.signals import on_stop_signal

    log = logging.getLogger("workers.autoscaler")
    async with AsyncClient(broker, store) as client:
        autoscaler = Autoscaler(client, fixed(pools), settings, dry_run=dry_run, show=_printer(dry_run))
        health.serve(autoscaler, asyncio.get_running_loop())
        task = asyncio.create_task(autoscaler.run(), name="autoscaler")
        on_stop_signal(task.cancel)
        log.info("pools: %s", ", ".join(f"{pool.settings.name} ({pool.settings.actuator})" for pool in pools))
        try:
            with suppress(asyncio.CancelledError):
                await task
        finally:
            await asyncio.gather(*(pool.actuator.aclose() for pool in pools if pool.actuator is not None))


def _pools(options: dict[str, Any], rules: list[str], config: Path | None) -> list[PoolSettings]:
    """The pools of the file or of the command line. Raises BadScaling, and Failure for neither or both."""
    from workers.autoscaler.pools import one_pool, read

    table = {name: value for name, value in options.items() if value is not None}
    if config is not None:
        if table or rules:
            raise Failure(f"options of one pool do not go with --config: write them into {config}")
        return read(config)
    if "model" not in table:
        raise Failure("there is no pool: name a model with --model, or a file with --config")
    return [one_pool(table, rules)]


def _extras(pools: list[PoolSettings]) -> list[str]:
    from workers.autoscaler.actuators import EXTRAS

    schemes = {pool.actuator.partition(":")[0] for pool in pools}
    return sorted({extra for scheme, extra in EXTRAS.items() if scheme in schemes})


def _checked_interval(pools: list[PoolSettings], interval: float) -> list[PoolSettings]:
    """The same pools. Raises Failure where each look would count as blind: such a pool would never scale in."""
    for pool in pools:
        if pool.rules.blind <= interval:
            raise Failure(
                f"blind of {pool.name} is {pool.rules.blind:g} s; it must be above --interval, {interval:g} s"
            )
    return pools


def _printer(dry_run: bool) -> Any:
    """Prints each decision of a dry run that changes something."""

    def show(pool: str, state: dict[str, Any], changed: bool) -> None:
        if dry_run and changed:
            trouble = f"; {state['trouble']}" if state["trouble"] else ""
            say(f"{pool}  {state['wanted']}  {state['reason']}{trouble}")

    return show
