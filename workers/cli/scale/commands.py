"""`penstock scale`: how many workers pools have, why, and another try for one whose workers do not come up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.admin.dlq import with_client
from workers.cli.exits import OPERATOR_STATUS, Command, Failure, add_group
from workers.cli.options import AnyBroker, Json, Store
from workers.cli.scale.simulate import EXAMPLE, simulate
from workers.cli.terminal.show import say

if TYPE_CHECKING:
    from producers.client.aio import AsyncClient

_LATER = "no autoscaler leads; the next one tries at once"
Pool = Annotated[str, typer.Argument(help="A pool, or a model with all its pools; penstock scale ls shows all.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    about = "Scaling: how many workers each pool has, and why."
    commands: dict[str, Command] = {
        "ls": (listed, "penstock scale ls"),
        "explain": (explain, "penstock scale explain tiny --history 20"),
        "retry": (retry, "penstock scale retry tiny"),
        "simulate": (simulate, EXAMPLE),
    }
    add_group(app, "scale", about, OPERATOR_STATUS, commands)


def listed(broker: AnyBroker = None, store: Store = None, as_json: Json = False) -> None:
    """List the pools that are scaled, with the number of workers that each should have."""

    async def work(client: AsyncClient) -> None:
        from workers.autoscaler.explain import summary

        now, states = await _states(client)
        for pool, state in states.items():
            say(json.dumps({"pool": pool, **state}) if as_json else summary(pool, state, now))
        if not states and not as_json:
            say(_nobody())

    with_client(broker, store, work)


def explain(
    pool: Annotated[
        str | None,
        typer.Argument(help="A pool, or a model with all its pools; penstock scale ls shows all. Unset: all."),
    ] = None,
    broker: AnyBroker = None,
    store: Store = None,
    history: Annotated[int, typer.Option(min=0, max=10_000, help="Number of last changes to show.")] = 5,
    as_json: Json = False,
) -> None:
    """Tell why a pool has the number of workers that it has: what was seen, the formula, limits, trouble, changes."""

    async def work(client: AsyncClient) -> None:
        from producers.store.fleet.scaling import decisions
        from workers.autoscaler.explain import explained

        now, states = await _states(client)
        for name in _named(pool, states) if pool is not None else list(states):
            changes = await decisions(client.store, name, history) if history else []
            state = states.get(name)
            if state is None and not changes:
                raise Failure(_unknown(name, states))
            if as_json:
                say(json.dumps({"pool": name, **(state or {}), "history": changes}))
            else:
                for line in explained(name, state, changes, now):
                    say(line)
        if pool is None and not states and not as_json:
            say(_nobody())

    with_client(broker, store, work)


def retry(pool: Pool, broker: AnyBroker = None, store: Store = None) -> None:
    """Try at once to start workers of a pool whose starts failed. The failures so far are forgotten."""

    async def work(client: AsyncClient) -> None:
        from producers.store.fleet import scaling
        from producers.store.fleet.scaling import is_fresh

        now, states = await _states(client)
        for name in _named(pool, states):
            if name not in states:
                raise Failure(_unknown(name, states))
            await scaling.retry(client.store, name)
            say(f"{name}: the next try is now" if is_fresh(states[name].get("at"), now) else f"{name}: {_LATER}")

    with_client(broker, store, work)


async def _states(client: AsyncClient) -> tuple[float, dict[str, dict[str, Any]]]:
    """The store's clock (unix s), and the state of each pool by its name."""
    from producers.store.fleet.scaling import states

    seconds, micros = await client.store.time()
    return seconds + micros / 1e6, dict(sorted((await states(client.store)).items()))


def _named(pool: str, states: dict[str, Any]) -> list[str]:
    """The pools that a name means: that pool, or all that are versions of a model."""
    return [pool] if pool in states else [name for name in states if name.rpartition("@")[0] == pool] or [pool]


def _unknown(pool: str, states: dict[str, Any]) -> str:
    return f"nobody scales a pool {pool}; there are {', '.join(states)}" if states else _nobody()


def _nobody() -> str:
    return "No pool is scaled: start `penstock autoscaler`, or `penstock up --min 0 --max 2`."
