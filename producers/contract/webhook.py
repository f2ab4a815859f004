"""A webhook: where to call, with which secret, at which events. Tasks name one of their own, endpoints are kept.

`Webhook.read` checks what a caller wrote. Whether its address may be called is checked where it is called
(`producers.connection.addresses`), and by the gateway before it takes the task.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from producers.connection.addresses import check_form
from producers.contract.sealing import seal
from producers.errors import InvalidTask, shown

#: Events of a task or a background response that has ended.
FINAL_EVENTS: Final = ("response.completed", "response.failed", "response.cancelled", "response.incomplete")
#: Events that a task's own webhook may ask for.
TASK_EVENTS: Final = (*FINAL_EVENTS, "response.in_progress")
EVENT_TYPES: Final = (*TASK_EVENTS, "batch.completed", "batch.failed", "batch.expired", "batch.cancelled")
MAX_URL: Final = 2048
#: Beginning of a secret; base64 of its bytes follows (Standard Webhooks).
SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - what a secret begins with
#: Fewest and most bytes of a secret, and how many a new one has.
SECRET_BYTES: Final = (24, 64)
NEW_SECRET_BYTES: Final = 32
#: A host's name, or an address; whether there is such a host, the resolver says.
_HOST: Final = re.compile(r"[A-Za-z0-9_.-]{1,253}|[0-9A-Fa-f:.]{2,45}")
_PRINTABLE: Final = re.compile(r"[!-~]+")

#: The JSON schema of a task's `webhook`.
WEBHOOK: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["url"],
    "properties": {
        "url": {"type": "string", "minLength": 1, "maxLength": MAX_URL},
        "secret": {"type": "string", "description": "whsec_ and base64 of 24 to 64 bytes; unset: the tenant's own"},
        "events": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "string", "enum": list(TASK_EVENTS)},
            "description": "unset: all but response.in_progress",
        },
    },
}


@dataclass(frozen=True, slots=True)
class Destination:
    """A URL's parts: the connection's (`host`, `port`), and the request's (`target`: path and query)."""

    scheme: str
    host: str
    port: int
    target: str

    @classmethod
    def parse(cls, url: str) -> Destination:
        """Raises ValueError, which completes "the URL ..."."""
        if len(url) > MAX_URL:
            raise ValueError(f"has {len(url)} characters; at most {MAX_URL} are taken")
        if not _PRINTABLE.fullmatch(url):
            raise ValueError("has a space or a character that is not ASCII; escape it, a host's name as Punycode")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"cannot be read: {error}") from None
        if parts.scheme not in ("https", "http"):
            raise ValueError("must begin with https://")
        if "@" in parts.netloc:
            raise ValueError("holds a user name or password; receivers check the signature instead")
        if parts.fragment:
            raise ValueError("has a fragment (#...), which is never sent; leave it out")
        if port == 0:
            raise ValueError("has the port 0, on which nothing listens")
        if not parts.hostname or not _HOST.fullmatch(parts.hostname):
            raise ValueError("names no host")
        check_form(parts.hostname)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), target)

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.scheme == "https" else 80
        return host if self.port == usual else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """Scheme, host and port: rows of one origin share limits."""
        return f"{self.scheme}://{self.authority}"


@dataclass(frozen=True, slots=True)
class Webhook:
    """A task's own webhook."""

    url: str
    events: tuple[str, ...] = FINAL_EVENTS
    secret: str | None = field(default=None, repr=False)

    @classmethod
    def read(cls, value: Any) -> Webhook:
        """Raises InvalidTask, with a `param` such as `webhook.url`."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidTask(
                f'webhook is {shown(value)}; it must be an object such as {{"url": "https://example.com/hook"}}',
                param="webhook",
                code="invalid_type",
            )
        unknown = next((name for name in value if name not in WEBHOOK["properties"]), None)
        if unknown is not None:
            raise InvalidTask(
                f"webhook has no {shown(unknown)}; it has url, secret and events",
                param="webhook",
                code="unknown_parameter",
            )
        secret, events = value.get("secret"), value.get("events")
        return cls(
            checked_url(value.get("url"), "webhook.url"),
            FINAL_EVENTS if events is None else checked_events(events, "webhook.events", TASK_EVENTS),
            None if secret is None else checked_secret(secret, "webhook.secret"),
        )

    def fields(self) -> dict[str, str]:
        """Its fields of a record (`producers.contract.record`), the secret in plain."""
        values = {"webhook": json.dumps({"url": self.url, "events": list(self.events)})}
        return values if self.secret is None else values | {"webhook_secret": self.secret}

    def stored(self) -> dict[str, str]:
        """The fields as they are stored: the secret is encrypted if there is a key. Raises SecretUnreadable."""
        values = self.fields()
        return values if self.secret is None else values | {"webhook_secret": seal(self.secret)}


def checked_url(url: Any, param: str) -> str:
    """The URL, if its form is right. Raises InvalidTask."""
    if url is None:
        raise InvalidTask(f"{param} is missing: an https:// URL", param=param, code="missing_parameter")
    if not isinstance(url, str):
        raise InvalidTask(f"{param} is {shown(url)}; it must be an https:// URL", param=param, code="invalid_type")
    try:
        Destination.parse(url)
    except ValueError as error:
        raise InvalidTask(f"{param} is {shown(url)}: it {error}", param=param) from None
    return url


def checked_events(events: Any, param: str, event_types: Sequence[str] = EVENT_TYPES) -> tuple[str, ...]:
    """The event types, each once, in the caller's order. Raises InvalidTask."""
    if not isinstance(events, (list, tuple)) or not events:
        code = "invalid_value" if isinstance(events, (list, tuple)) else "invalid_type"
        raise InvalidTask(f"{param} is {shown(events)}; it must be a list of event types", param=param, code=code)
    for event in events:
        if event not in event_types:
            raise InvalidTask(
                f"{param} has {shown(event)}; the event types are {', '.join(event_types)}",
                param=param,
                code="invalid_value",
            )
    return tuple(dict.fromkeys(events))


def checked_secret(secret: Any, param: str) -> str:
    """The secret. Raises InvalidTask, which never shows it."""
    smallest, largest = SECRET_BYTES
    expected = f"it must be {SECRET_PREFIX} and base64 of {smallest} to {largest} bytes"
    if not isinstance(secret, str):
        raise InvalidTask(f"{param} is not text; {expected}", param=param, code="invalid_type")
    try:
        if not secret.startswith(SECRET_PREFIX):
            raise ValueError(f"does not begin with {SECRET_PREFIX}")
        size = len(base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True))
        if not smallest <= size <= largest:
            raise ValueError(f"has {size} bytes")
    except (binascii.Error, UnicodeError) as error:
        raise InvalidTask(f"{param} is not base64 ({error}); {expected}", param=param) from None
    except ValueError as error:
        raise InvalidTask(f"{param} {error}; {expected}", param=param) from None
    return secret


def new_secret() -> str:
    """A fresh secret."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(NEW_SECRET_BYTES)).decode()


def hint(secret: str) -> str:
    """A secret as it may be shown: its last four characters."""
    return f"{SECRET_PREFIX}...{secret[-4:]}"
