"""`penstock webhooks`: the process that delivers, its endpoints and secrets. Deliveries are in `deliveries`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from workers.cli.admin.servers import system
from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, PROCESS_STATUS, Exit, Failure, needs, refusing
from workers.cli.options import AnyBroker, Broker, HealthPort, Json, LogLevel, SecretsKey, Store, WebhookAllow
from workers.cli.options.checks import finite
from workers.cli.starting import look_at_servers, set_up_logging, store_of, use_secrets_key
from workers.cli.terminal.show import say
from workers.cli.webhooks import deliveries, listen
from workers.cli.webhooks.listen import Tenant

#: Time (s) for which a test waits for a delivery.
TEST_S = 25.0


_SERVER = "redis://10.0.0.5:6379/0"
app = Commands(
    "Operations", OPERATOR_STATUS, "webhooks", "Webhooks: the process that delivers them, and its deliveries."
)


@app.shown(f"penstock webhooks run --broker {_SERVER} --webhook-allow 10.0.0.0/8", status=PROCESS_STATUS)
def run(
    broker: Broker,
    store: Store = None,
    webhook_allow: WebhookAllow = None,
    secrets_key: SecretsKey = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds that running deliveries may go on after SIGTERM.")
    ] = 25.0,
    health_port: HealthPort = None,
    log_level: LogLevel = "info",
) -> None:
    """Deliver webhooks, until SIGTERM. Any number of such processes may run."""
    import asyncio

    with needs("webhooks"):
        from workers.webhooks import process
        from workers.webhooks.deliverer import WebhookSettings
    set_up_logging(log_level)
    use_secrets_key(secrets_key)
    allowed = tuple(webhook_allow or ())
    settings = WebhookSettings(store_of(broker, store), allowed, drain=drain_timeout, health_port=health_port)
    with refusing(ValueError):
        look_at_servers(settings.store, None)
        asyncio.run(process.run(settings))


app.shown("penstock webhooks ls --state dead", "ls")(deliveries.listed)
app.shown("penstock webhooks show evt_5f0d3c")(deliveries.show)
app.shown("penstock webhooks replay --endpoint whe_019 --since 2026-11-20T08:00")(deliveries.replay)


@app.shown("penstock webhooks endpoints", "endpoints")
def endpoints_listed(broker: AnyBroker = None, store: Store = None, as_json: Json = False) -> None:
    """List the endpoints, the newest first."""
    from producers.store import endpoints

    with system(broker, store) as (client, loop):
        found = loop.run(endpoints.every(client.store))
    for one in found:
        about = {
            "id": one.id,
            "url": one.url,
            "event_types": list(one.event_types),
            "tenant": one.tenant,
            "celery": one.celery,
            "disabled_because": one.disabled_because,
        }
        if as_json:
            typer.echo(json.dumps(about))
            continue
        state = "" if one.enabled else f"  disabled: {one.disabled_because}"
        whose = "" if one.tenant is None else f"  tenant {one.tenant}"
        say(f"{one.id}  {one.url}  {', '.join(one.event_types)}{whose}{state}")
    if not found and not as_json:
        typer.echo("There are no endpoints; POST /v1/webhook_endpoints makes one.")


@app.shown("penstock webhooks test whe_019 --event-type batch.completed", "test")
def send_test(
    endpoint: Annotated[str, typer.Argument(help="The endpoint's id; penstock webhooks endpoints shows all.")],
    event_type: Annotated[str, typer.Option(help="The type of the made-up event.")] = "response.completed",
    broker: AnyBroker = None,
    store: Store = None,
) -> None:
    """Deliver a made-up event to an endpoint once, and show what it answers. Exit status 1: it was not delivered."""
    from producers.contract.webhook import EVENT_TYPES
    from producers.store import endpoints

    with system(broker, store) as (client, loop):
        if event_type not in EVENT_TYPES:
            raise Failure(f"--event-type is {event_type!r}; there are {', '.join(EVENT_TYPES)}")
        one = loop.run(endpoints.get(client.store, endpoint))
        if one is None:
            raise Failure(f"there is no endpoint {endpoint}; penstock webhooks endpoints shows all")
        row = loop.run(endpoints.tested(client.store, one, event_type, TEST_S))
    if row is None:
        raise Failure(f"nobody delivered it within {TEST_S:g} s: start `penstock webhooks run`", Exit.TASK_FAILED)
    deliveries.tell(deliveries.described(row))
    if row.state != "delivered":
        raise typer.Exit(Exit.TASK_FAILED)


@app.shown("penstock webhooks secret --tenant acme --rotate")
def secret(
    tenant: Tenant = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Make a new secret. The old one signs beside it for 24 hours.")
    ] = False,
    drop_old: Annotated[
        bool, typer.Option("--drop-old", help="With --rotate: the old secret signs no longer.")
    ] = False,
    broker: AnyBroker = None,
    store: Store = None,
) -> None:
    """Show the secret that signs the webhooks of a tenant's tasks which name none of their own."""
    from producers.errors import SecretUnreadable
    from producers.store import endpoints
    from producers.store.access.audit import Change, operator

    if drop_old and not rotate:
        raise Failure("--drop-old needs --rotate")
    with refusing(SecretUnreadable), system(broker, store) as (client, loop):
        if rotate:
            audit = Change(operator(), "webhook_secret.rotate", tenant or "", tenant)
            found = loop.run(endpoints.rotate_own(client.store, tenant, audit, keep_old=not drop_old))
        else:
            found = loop.run(endpoints.own_secrets(client.store, tenant))
        typer.echo(found.plain())


app.shown("penstock webhooks listen --port 9000", status=PROCESS_STATUS)(listen.listen)
