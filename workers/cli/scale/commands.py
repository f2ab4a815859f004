"""`penstock scale`: how many workers pools have, why, and another try for one whose workers do not come up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.admin.servers import system
from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Failure
from workers.cli.options import AnyBroker, Json, Store
from workers.cli.scale.simulate import EXAMPLE, simulate
from workers.cli.terminal.show import say

if TYPE_CHECKING:
    from producers.client.aio import AsyncClient

_LATER = "no autoscaler leads; the next one tries at once"
Pool = Annotated[str, typer.Argument(help="A pool, or a model with all its pools; penstock scale ls shows all.")]


app = Commands("Operations", OPERATOR_STATUS, "scale", "Scaling: how many workers each pool has, and why.")


@app.shown("penstock scale ls", "ls")
def listed(broker: AnyBroker = None, store: Store = None, as_json: Json = False) -> None:
    """List the pools that are scaled, with the number of workers that each should have."""
    from workers.autoscaler.explain import summary

    with system(broker, store) as (client, loop):
        now, states = loop.run(_states(client))
    for pool, state in states.items():
        say(json.dumps({"pool": pool, **state}) if as_json else summary(pool, state, now))
    if not states and not as_json:
        say(_nobody())


@app.shown("penstock scale explain tiny --history 20")
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
    from producers.store.fleet.scaling import decisions
    from workers.autoscaler.explain import explained

    with system(broker, store) as (client, loop):
        now, states = loop.run(_states(client))
        for name in _named(pool, states) if pool is not None else list(states):
            changes = loop.run(decisions(client.store, name, history)) if history else []
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


@app.shown("penstock scale retry tiny")
def retry(pool: Pool, broker: AnyBroker = None, store: Store = None) -> None:
    """Try at once to start workers of a pool whose starts failed. The failures so far are forgotten."""
    from producers.store.fleet import scaling

    with system(broker, store) as (client, loop):
        now, states = loop.run(_states(client))
        for name in _named(pool, states):
            if name not in states:
                raise Failure(_unknown(name, states))
            loop.run(scaling.retry(client.store, name))
            say(f"{name}: {'the next try is now' if scaling.is_fresh(states[name].get('at'), now) else _LATER}")


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


app.shown(EXAMPLE)(simulate)
