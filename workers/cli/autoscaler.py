"""`penstock autoscaler`: the process that decides how many workers each pool has, and starts and ends them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.commands import Commands
from workers.cli.exits import PROCESS_STATUS, Failure, needs, refusing
from workers.cli.options import MODEL, Broker, HealthPort, LogLevel, Store, UniqueName, complete_model, finite
from workers.cli.starting import look_at_servers, set_up_logging, store_of
from workers.cli.terminal import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.autoscaler.autoscaler import AutoscalerSettings
    from workers.autoscaler.pools import PoolSettings, Scaled
    from workers.runtime.health import Health


app = Commands("Processes", PROCESS_STATUS)


@app.shown(
    "penstock autoscaler --broker redis://10.0.0.5:6379/0 --model tiny --max 4 --actuator kubernetes://default/worker-tiny"
)
def autoscaler(
    broker: Broker,
    store: Store = None,
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
    said = {
        "model": model,
        "version": model_version,
        "min": min_workers,
        "max": max_workers,
        "cool_down": cool_down,
        "actuator": actuator,
    }
    settings = AutoscalerSettings(lease=lease, every=interval)
    if name is not None:
        settings = replace(settings, name=name)
    store = store_of(broker, store)
    with refusing(BadScaling):
        asked = _looked_at(_pools(said, rule or [], config), interval)
        with needs(*_extras(asked)):
            pools = opened(asked, broker, store)
    health = Health(health_port)
    with refusing(ValueError):
        look_at_servers(broker, store)
        asyncio.run(_run(broker, store, pools, settings, dry_run, health))


async def _run(
    broker: str, store: str, pools: Sequence[Scaled], settings: AutoscalerSettings, dry_run: bool, health: Health
) -> None:
    """Scale until SIGTERM or SIGINT; then let another lead at once. Workers of local actuators drain before the end."""
    import asyncio
    import logging
    from contextlib import suppress

    from producers.client.aio import AsyncClient
    from workers.autoscaler.autoscaler import Autoscaler
    from workers.autoscaler.pools import fixed
    from workers.runtime.signals import when_told

    log = logging.getLogger("workers.autoscaler")
    async with AsyncClient(broker, store) as client:
        autoscaler = Autoscaler(client, fixed(pools), settings, dry_run=dry_run, show=_shown(dry_run))
        health.serve(autoscaler, asyncio.get_running_loop())
        task = asyncio.create_task(autoscaler.run(), name="autoscaler")
        when_told(task.cancel)
        log.info("pools: %s", ", ".join(f"{one.settings.name} ({one.settings.actuator})" for one in pools))
        try:
            with suppress(asyncio.CancelledError):
                await task
        finally:
            await asyncio.gather(*(one.actuator.aclose() for one in pools if one.actuator is not None))


def _pools(said: dict[str, Any], rules: list[str], config: Path | None) -> list[PoolSettings]:
    """The pools of the file or of the command line. Raises BadScaling, and Failure for neither or both."""
    from workers.autoscaler.pools import one_pool, read

    table = {name: value for name, value in said.items() if value is not None}
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


def _looked_at(pools: list[PoolSettings], interval: float) -> list[PoolSettings]:
    """The same pools. Raises Failure where each look would count as blind: such a pool would never scale in."""
    for pool in pools:
        if pool.rules.blind <= interval:
            raise Failure(
                f"blind of {pool.name} is {pool.rules.blind:g} s; it must be above --interval, {interval:g} s"
            )
    return pools


def _shown(dry_run: bool) -> Any:
    """Prints each decision of a dry run that changes something."""

    def show(pool: str, state: dict[str, Any], changed: bool) -> None:
        if dry_run and changed:
            trouble = f"; {state['trouble']}" if state["trouble"] else ""
            say(f"{pool}  {state['wanted']}  {state['reason']}{trouble}")

    return show
