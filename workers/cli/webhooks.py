"""`penstock webhooks`: run is the process that delivers; ls, show and replay look after deliveries, rows of the outbox;
endpoints, test and secret after endpoints; listen receives here, verifies and prints, for development.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, PROCESS_STATUS, Exit, Failure, needs, refusing
from workers.cli.options import (
    Broker,
    DataDir,
    HealthPort,
    Json,
    LogLevel,
    Port,
    SecretsKey,
    Store,
    WebhookAllow,
    finite,
)
from workers.cli.servers import look_at_servers, set_up_logging, store_address, system, use_secrets_key
from workers.cli.terminal import note, say

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler

    from producers.client.aio import AsyncClient
    from producers.store.outbox import Row, State

#: Time (s) for which a test waits for a delivery.
TEST_S: Final = 25.0
#: Largest body (bytes) that is read; events are far smaller.
MAX_BODY: Final = 64 * 1024
#: Shortest time (s) between two reads of all secrets.
REREAD_S: Final = 1.0
HOST: Final = "127.0.0.1"
#: The environment variable with the secret.
SECRET: Final = "WEBHOOK_SECRET"  # noqa: S105 - a variable's name
STATES: Final = ("due", "dead", "delivered")


def _moment(text: str | None) -> int | None:
    """A time as unix seconds. Raises typer.BadParameter."""
    if text is None:
        return None
    try:
        if text.isascii() and text.isdecimal():
            return int(text)
        at = datetime.fromisoformat(text)
        return int((at if at.tzinfo else at.astimezone()).timestamp())
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is no time; it must look like 2026-11-20T08:00, or be unix seconds"
        ) from None


def _state(text: str | None) -> str | None:
    if text is not None and text not in STATES:
        raise typer.BadParameter(f"{text!r} is unknown; there are {', '.join(STATES)}")
    return text


Names = Annotated[list[str], typer.Argument(metavar="ID...", help="Deliveries, by their name or their webhook-id.")]
AnyState = Annotated[str | None, typer.Option(callback=_state, help="due, dead or delivered. Unset: all three.")]
OfEndpoint = Annotated[
    str | None,
    typer.Option(help="Only this endpoint's; `own`: of webhooks that tasks brought along; `reply`: sources' replies."),
]
Since = Annotated[
    str | None, typer.Option(callback=_moment, metavar="TIME", help="Only events from this time on: 2026-11-20T08:00.")
]
Until = Annotated[str | None, typer.Option(callback=_moment, metavar="TIME", help="Only events up to this time.")]
Tenant = Annotated[str | None, typer.Option(help="The tenant. Unset: tasks without one.")]

_SERVER = "redis://10.0.0.5:6379/0"
app = Commands(
    "Operations", OPERATOR_STATUS, "webhooks", "Webhooks: the process that delivers them, and its deliveries."
)


@app.shown(f"penstock webhooks run --broker {_SERVER} --webhook-allow 10.0.0.0/8", status=PROCESS_STATUS)
def run(
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
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
        from workers.webhooks import deliverer
    set_up_logging(log_level)
    use_secrets_key(secrets_key)
    allowed = tuple(webhook_allow or ())
    server = store_address(broker, store, data_dir)
    settings = deliverer.WebhookSettings(server, allowed, drain=drain_timeout, health_port=health_port)
    with refusing(ValueError):
        look_at_servers(server, server, "webhooks")
        asyncio.run(deliverer.run(settings))


@app.shown("penstock webhooks ls --state dead", "ls")
def listed(
    state: AnyState = None,
    endpoint: OfEndpoint = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, help="Most deliveries of a state.")] = 50,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List deliveries, the last of each state first."""
    from producers.store import outbox

    any_found = False
    with system(broker, store, data_dir) as (client, loop):
        for each_state in (state,) if state else STATES:
            rows = outbox.rows(
                client.store, cast("State", each_state), endpoint=endpoint, since=_s(since), until=_s(until)
            )
            for row in loop.run(_first(rows, limit)):
                any_found = True
                _say_line(json.dumps(_shown(row)) if as_json else _described(row))
    if not any_found and not as_json:
        typer.echo("There are no such deliveries.")


@app.shown("penstock webhooks show evt_5f0d3c")
def show(
    names: Names, broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """Show deliveries with their tries: when, what the receiver answered, and how long that took."""
    with system(broker, store, data_dir) as (client, loop):
        for row in (row for name in names for row in loop.run(_named(client, name))):
            if as_json:
                typer.echo(json.dumps(_shown(row)))
                continue
            _say_line(_described(row))
            for attempt in row.attempts:
                result = attempt.error if attempt.status is None else f"{attempt.status} {attempt.answer}"
                _say_line(f"  {_when(attempt.at)}  {attempt.latency_ms} ms  {result}")


@app.shown("penstock webhooks replay --endpoint whe_019 --since 2026-11-20T08:00")
def replay(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="ID...", help="Deliveries, by their name or their webhook-id.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All that the other options select.")] = False,
    state: Annotated[
        str, typer.Option(callback=_state, help="With no ID: replay those that are dead, delivered or due.")
    ] = "dead",
    endpoint: OfEndpoint = None,
    since: Since = None,
    until: Until = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
) -> None:
    """Deliver again, now, with the webhook-id that it had. Exit status 1: one is being tried at this moment.

    Name deliveries, or select them by --endpoint, --since and --until, or say --all.
    """
    selected = bool(every or endpoint or since is not None or until is not None)
    if bool(names) == selected:
        raise Failure("name deliveries, or select some with --endpoint, --since, --until or --all; not both")
    from producers.connection.script import arun, text
    from producers.store import outbox

    with system(broker, store, data_dir) as (client, loop):
        if names:
            rows = [row for name in names for row in loop.run(_named(client, name))]
        else:
            matching = outbox.rows(
                client.store, cast("State", state), endpoint=endpoint, since=_s(since), until=_s(until)
            )
            rows = loop.run(_first(matching, None))  # all: a replayed row leaves the list
        once = dict.fromkeys(row.name for row in rows)
        answers = {name: text(loop.run(arun(client.store, outbox.replay(name)))) for name in once}
    busy = [name for name, answer in answers.items() if answer == "held"]
    for name in busy:
        note(f"{name} is being tried at this moment")
    typer.echo(f"{list(answers.values()).count('replayed')} deliveries are due again")
    if busy:
        raise typer.Exit(Exit.TASK_FAILED)


@app.shown("penstock webhooks endpoints", "endpoints")
def endpoints_listed(
    broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """List the endpoints, the newest first."""
    from producers.store import endpoints

    with system(broker, store, data_dir) as (client, loop):
        rows = loop.run(endpoints.every(client.store))
    for endpoint in rows:
        fields = {
            "id": endpoint.id,
            "url": endpoint.url,
            "event_types": list(endpoint.event_types),
            "tenant": endpoint.tenant,
            "celery": endpoint.celery,
            "disabled_because": endpoint.disabled_because,
        }
        if as_json:
            typer.echo(json.dumps(fields))
            continue
        state = "" if endpoint.enabled else f"  disabled: {endpoint.disabled_because}"
        whose = "" if endpoint.tenant is None else f"  tenant {endpoint.tenant}"
        say(f"{endpoint.id}  {endpoint.url}  {', '.join(endpoint.event_types)}{whose}{state}")
    if not rows and not as_json:
        typer.echo("There are no endpoints; POST /v1/webhook_endpoints makes one.")


@app.shown("penstock webhooks test whe_019 --event-type batch.completed", "test")
def send_test(
    endpoint: Annotated[str, typer.Argument(help="The endpoint's id; penstock webhooks endpoints shows all.")],
    event_type: Annotated[str, typer.Option(help="The type of the made-up event.")] = "response.completed",
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
) -> None:
    """Deliver a made-up event to an endpoint once, and show what it answers. Exit status 1: it was not delivered."""
    from producers.contract.webhook import EVENT_TYPES
    from producers.store import endpoints

    with system(broker, store, data_dir) as (client, loop):
        if event_type not in EVENT_TYPES:
            raise Failure(f"--event-type is {event_type!r}; there are {', '.join(EVENT_TYPES)}")
        target = loop.run(endpoints.get(client.store, endpoint))
        if target is None:
            raise Failure(f"there is no endpoint {endpoint}; penstock webhooks endpoints shows all")
        row = loop.run(endpoints.tested(client.store, target, event_type, TEST_S))
    if row is None:
        raise Failure(f"nobody delivered it within {TEST_S:g} s: start `penstock webhooks run`", Exit.TASK_FAILED)
    _say_line(_described(row))
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
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
) -> None:
    """Show the secret that signs the webhooks of a tenant's tasks which name none of their own."""
    from producers.errors import SecretUnreadable
    from producers.store import endpoints
    from producers.store.access.audit import Change, operator

    if drop_old and not rotate:
        raise Failure("--drop-old needs --rotate")
    with refusing(SecretUnreadable), system(broker, store, data_dir) as (client, loop):
        if rotate:
            audit = Change(operator(), "webhook_secret.rotate", tenant or "", tenant)
            secrets = loop.run(endpoints.rotate_own(client.store, tenant, audit, keep_old=not drop_old))
        else:
            secrets = loop.run(endpoints.own_secrets(client.store, tenant))
        typer.echo(secrets.plain())


@app.shown("penstock webhooks listen --port 9000", status=PROCESS_STATUS)
def listen(
    port: Port = 9000,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's tasks. Unset: all tasks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as JSON, one a line.")] = False,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
) -> None:
    """Receive webhooks on this machine: verify each and print it, until Ctrl-C. Bad signatures get 400.

    WEBHOOK_SECRET has the secret, whsec_...: an endpoint's is in the answer that made it. Unset, those of tasks count:
    of all, or of one --tenant. No option takes it, as everybody on the machine sees a command line.

    Gateway and webhooks process must allow this machine: penstock up --webhook-allow 127.0.0.0/8.
    """
    from http.server import ThreadingHTTPServer

    with needs("webhooks"):
        from standardwebhooks import Webhook, WebhookVerificationError
    from producers.contract.webhook import checked_secret
    from producers.errors import InvalidTask

    try:
        secret = os.environ.get(SECRET)
        read = partial(_tasks_secrets, broker, store, data_dir, tenant)
        secrets = [checked_secret(secret, SECRET)] if secret else read()
    except InvalidTask as error:
        raise Failure(str(error)) from None
    signing = SigningSecrets(secrets, None if secret or tenant is not None else read)

    def verified(body: bytes, headers: dict[str, str], secrets: list[str]) -> Any:
        for key in secrets:
            with suppress(WebhookVerificationError):
                return Webhook(key).verify(body, headers)
        return Webhook(secrets[0]).verify(body, headers)  # raises what is wrong

    def received(body: bytes, headers: dict[str, str]) -> None:
        try:
            event = verified(body, headers, signing.secrets)
        except WebhookVerificationError:
            event = verified(body, headers, signing.read_again())
        line = json.dumps(event) if as_json else f"{event['type']}  {event['data']['id']}  {event['id']}  verified"
        typer.echo(line)

    try:
        server = ThreadingHTTPServer((HOST, port), _handler(received))
    except OSError as error:
        raise Failure(f"cannot listen on port {port}: {error.strerror}; choose another with --port") from error
    url = f"http://{HOST}:{server.server_address[1]}/"
    typer.echo(f'listening; give tasks "webhook": {{"url": "{url}"}}', err=True)
    server.serve_forever()


async def _named(client: AsyncClient, name: str) -> list[Row]:
    """The rows of a name or of a webhook-id. Raises Failure if there is none."""
    from producers.store import endpoints, outbox

    names = [name]
    if "." not in name:
        names += [
            f"{name}.own",
            f"{name}.reply",
            *(f"{name}.{endpoint.id}" for endpoint in await endpoints.every(client.store)),
        ]
    rows = [row for candidate in names if (row := await outbox.get(client.store, candidate)) is not None]
    if not rows:
        raise Failure(f"there is no delivery {name}; penstock webhooks ls shows what there is")
    return rows


async def _first(rows: AsyncIterator[Row], limit: int | None) -> list[Row]:
    """The first rows; None: all."""
    chosen: list[Row] = []
    async for row in rows:
        chosen.append(row)
        if len(chosen) == limit:
            break
    return chosen


def _shown(row: Row) -> dict[str, Any]:
    """A row for programs, without its secret."""
    return {name: value for name, value in asdict(row).items() if name != "secret"}


def _s(moment: Any) -> int | None:
    """The result of `_moment` for an option, which typer types as text."""
    return cast("int | None", moment)


def _when(seconds: int) -> str:
    if abs(seconds - time.time()) > 100 * 365 * 86400:
        return f"{seconds} s"
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _described(row: Row) -> str:
    """A delivery in a line."""
    last = row.attempts[-1] if row.attempts else None
    last_text = "" if last is None else f"  last: {last.status if last.status is not None else last.error}"
    return (
        f"{row.name}  {row.state}  {_when(row.at)}  {row.type}  {row.object}  {row.url}  {row.tries} tries{last_text}"
    )


def _say_line(line: str) -> None:
    """Print a line that may hold a receiver's text, which may have several."""
    say(line.replace("\n", " "))


class SigningSecrets:
    """The secrets that webhooks are verified with. `read` gives those of all tenants; None: they stay as they are.

    Anybody may send bad signatures, and reading takes the store's time: it is done once in REREAD_S at most, for all
    who came before it.
    """

    def __init__(self, secrets: list[str], read: Callable[[], list[str]] | None) -> None:
        self.secrets = secrets
        self._read = read
        self._read_at = -math.inf
        self._lock = threading.Lock()

    def read_again(self) -> list[str]:
        """The secrets with that of a tenant whose first task has come since they were read. Waits for its turn."""
        arrived_at = time.monotonic()
        with self._lock:
            if self._read is not None and self._read_at < arrived_at:
                time.sleep(max(0.0, self._read_at + REREAD_S - time.monotonic()))
                self._read_at = time.monotonic()
                with suppress(Failure):  # the store does not answer: what is known stays
                    self.secrets = self._read()
        return self.secrets


def _tasks_secrets(broker: str | None, store: str | None, data_dir: Path | None, tenant: str | None) -> list[str]:
    """The secrets that sign webhooks of a tenant's tasks; without a tenant, of all tasks. Raises Failure."""
    from producers.connection.script import aexecute_many, text
    from producers.contract import keys
    from producers.errors import SecretUnreadable
    from producers.store import endpoints

    with refusing(SecretUnreadable), system(broker, store, data_dir) as (client, loop):
        names: list[str | None] = [tenant]
        if tenant is None:
            (known,) = loop.run(aexecute_many(client.store, [("HKEYS", keys.WEBHOOK_SECRETS)]))
            names += [text(name) for name in known if name]
        return [loop.run(endpoints.own_secrets(client.store, name)).plain() for name in names]


def _handler(received: Callable[[bytes, dict[str, str]], None]) -> type[BaseHTTPRequestHandler]:
    from http.server import BaseHTTPRequestHandler

    from standardwebhooks import WebhookVerificationError

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30.0

        def do_POST(self) -> None:
            length = self.headers.get("content-length", "")
            if not length.isdecimal() or int(length) > MAX_BODY:
                self.close_connection = True
                return self._answer(413, "the body is too large, or of unknown length")
            body = self.rfile.read(int(length))
            try:
                received(body, dict(self.headers))
            except (WebhookVerificationError, ValueError, KeyError, TypeError) as error:
                typer.echo(f"not verified: {error}; an event of an endpoint needs its secret in {SECRET}", err=True)
                return self._answer(400, f"not verified: {error}")
            return self._answer(200, "")

        def _answer(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Log nothing: events are printed."""

    return Handler
