"""`penstock webhooks listen`: a receiver on this machine that verifies and prints, for development."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.admin.servers import system
from workers.cli.exits import Failure, needs, refusing
from workers.cli.options import AnyBroker, Port, Store

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler

Tenant = Annotated[str | None, typer.Option(help="The tenant. Unset: tasks without one.")]
#: Largest body (bytes) that is read; events are far smaller.
MAX_BODY: Final = 64 * 1024
HOST: Final = "127.0.0.1"
#: The environment variable with the secret.
SECRET: Final = "WEBHOOK_SECRET"  # noqa: S105 - a variable's name


def listen(
    port: Port = 9000,
    tenant: Tenant = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as JSON, one a line.")] = False,
    broker: AnyBroker = None,
    store: Store = None,
) -> None:
    """Receive webhooks on this machine: verify each and print it, until Ctrl-C. Bad signatures get 400.

    WEBHOOK_SECRET has the secret, whsec_...: an endpoint's is in the answer that made it. Unset, it is that of the
    tenant's own tasks. No option takes it, as everybody on the machine sees a command line.

    Gateway and webhooks process must allow this machine: penstock up --webhook-allow 127.0.0.0/8.
    """
    from http.server import ThreadingHTTPServer

    with needs("webhooks"):
        from standardwebhooks import Webhook
    from producers.contract.webhook import checked_secret
    from producers.errors import InvalidTask

    try:
        secret = os.environ.get(SECRET)
        key = checked_secret(secret, SECRET) if secret else _own(broker, store, tenant)
    except InvalidTask as error:
        raise Failure(str(error)) from None
    verify = Webhook(key).verify

    def received(body: bytes, headers: dict[str, str]) -> None:
        event = verify(body, headers)
        line = json.dumps(event) if as_json else f"{event['type']}  {event['data']['id']}  {event['id']}  verified"
        typer.echo(line)

    try:
        server = ThreadingHTTPServer((HOST, port), _handler(received))
    except OSError as error:
        raise Failure(f"cannot listen on port {port}: {error.strerror}; choose another with --port") from error
    url = f"http://{HOST}:{server.server_address[1]}/"
    typer.echo(f'listening; give tasks "webhook": {{"url": "{url}"}}', err=True)
    server.serve_forever()


def _own(broker: str | None, store: str | None, tenant: str | None) -> str:
    from producers.errors import SecretUnreadable
    from producers.store import endpoints

    with refusing(SecretUnreadable), system(broker, store) as (client, loop):
        return loop.run(endpoints.own_secrets(client.store, tenant)).plain()


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
