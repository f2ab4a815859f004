"""`penstock tenants`: waiting tenants, their weights and limits. It needs the broker and the store, but no gateway."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Failure
from workers.cli.keys import parsed_limits, tenant_limit_options
from workers.cli.option_groups import takes
from workers.cli.options import AnyBroker, DataDir, Json, KeyStore, Store
from workers.cli.servers import records, system
from workers.cli.terminal import say

app = Commands(
    "Operations", OPERATOR_STATUS, "tenants", "Tenants, the weights by which they share each tier, and their limits."
)


@app.shown("penstock tenants ls", "ls")
def listed(broker: AnyBroker = None, store: Store = None, as_json: Json = False) -> None:
    """List tenants with waiting tasks, by tier, and tenants with a weight."""
    from producers.admin.tenants import tenants

    with system(broker, store) as (client, loop):
        found, unsorted = loop.run(tenants(client))
    for one in found:
        if as_json:
            typer.echo(json.dumps({"tenant": one.name, "weight": one.weight, "waiting": one.waiting}))
            continue
        waiting = ", ".join(f"{count} {tier}" for tier, count in one.waiting.items() if count) or "nothing"
        name = one.name or "(no tenant)"
        say(f"{name}  weight {one.weight:g}  waiting: {waiting}")
    if not as_json and not found:
        typer.echo("No tenant has waiting tasks.")
    if not as_json and unsorted:
        typer.echo(f"{unsorted} tasks are not sorted by tenant yet: workers sort them")


@app.shown("penstock tenants weigh acme 4 --broker redis://10.0.0.5:6379/0")
def weigh(
    tenant: Annotated[
        str, typer.Argument(help="The tenant's name as in its tasks; '' stands for all tasks without one.")
    ],
    weight: Annotated[
        float, typer.Argument(help="A tenant of weight 2 gets twice the tokens of one of weight 1. The default is 1.")
    ],
    broker: AnyBroker = None,
    store: Store = None,
) -> None:
    """Set a tenant's weight. It applies from the next fetch on, and within seconds in running engines."""
    with system(broker, store) as (client, loop):
        loop.run(client.broker.weigh(tenant, weight))


@app.shown("penstock tenants limit acme --rpm 600 --budget-tokens none")
@takes(bounds=tenant_limit_options())
def limit(
    tenant: Annotated[str, typer.Argument(help="The tenant's name, as in its keys or tasks.")],
    *,
    bounds: dict[str, Any],
    data_dir: DataDir = None,
    store: KeyStore = None,
    as_json: Json = False,
) -> None:
    """Change what all of a tenant's keys may use together; `none` unsets a limit. Without options, show its limits."""
    from producers.admin import tenants
    from producers.store.access.audit import Actor, operator
    from producers.store.access.tenants import TooManyTenants

    asked = parsed_limits(bounds)
    with records(store, data_dir) as (client, loop):
        try:
            new = loop.run(tenants.limit(client, tenant, asked, Actor(operator())))
        except TooManyTenants:
            raise Failure("10,000 tenants have limits, the most; unset those of one first") from None
    found = {name: getattr(new, name) for name in tenants.LIMITED}
    said = ", ".join(f"{name} {most}" for name, most in found.items() if most is not None) or "no limits"
    say(json.dumps({"tenant": tenant, **found}) if as_json else f"{tenant}: {said}")
