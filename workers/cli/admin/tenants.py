"""`penstock tenants`: who waits, and by which weights they share. It needs the broker and the store, and no gateway."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.admin.dlq import with_client
from workers.cli.exits import MINDER_STATUS
from workers.cli.processes import AnyBroker, Store
from workers.cli.terminal.show import printable

if TYPE_CHECKING:
    from producers.client.aio import AsyncClient

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    group = typer.Typer(no_args_is_help=True, help="Tenants, who share each tier by the tokens that they are served.")
    examples: dict[str, tuple[Callable[..., None], str]] = {
        "ls": (listed, "penstock tenants ls"),
        "weigh": (weigh, "penstock tenants weigh acme 4 --broker redis://10.0.0.5:6379/0"),
    }
    for name, (command, example) in examples.items():
        group.command(name, epilog=f"Example: {example}\n\n{MINDER_STATUS}")(command)
    app.add_typer(group, name="tenants", rich_help_panel="Processes")


def listed(broker: AnyBroker = None, store: Store = None, as_json: Json = False) -> None:
    """List tenants of whom tasks wait, by tier, and those with a weight of their own."""

    async def work(client: AsyncClient) -> None:
        from producers.admin.tenants import tenants

        found, unsorted = await tenants(client)
        for one in found:
            if as_json:
                typer.echo(json.dumps({"tenant": one.name, "weight": one.weight, "waiting": one.waiting}))
                continue
            waiting = ", ".join(f"{count} {tier}" for tier, count in one.waiting.items() if count) or "nothing"
            name = one.name or "(no tenant)"
            typer.echo(printable(f"{name}  weight {one.weight:g}  waiting: {waiting}", sys.stdout.isatty()))
        if not as_json and not found:
            typer.echo("No tenant waits.")
        if not as_json and unsorted:
            typer.echo(f"{unsorted} tasks have not been sorted by tenant yet: workers do that")

    with_client(broker, store, work)


def weigh(
    tenant: Annotated[str, typer.Argument(help="Its name, as tasks give it; '' are all who give none.")],
    weight: Annotated[float, typer.Argument(help="2 is served twice as many tokens as 1. 1 is what all begin with.")],
    broker: AnyBroker = None,
    store: Store = None,
) -> None:
    """Set a tenant's share of each tier. It holds from the next fetch on; in running engines within seconds."""

    async def work(client: AsyncClient) -> None:
        await client.broker.weigh(tenant, weight)

    with_client(broker, store, work)
