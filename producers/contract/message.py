"""The broker's message for a task, in Celery's protocol 2 (docs.celeryq.dev, Message Protocol), as kombu writes it.

It carries no prompt: the task is in its record, and the message only announces it with its size. The sync client lets
Celery write the message, the asyncio client writes it here; a test compares the two field by field.

A message that is too large for its queue has a claim check: a store keeps the body, a reference travels instead.

    send:     check_in(envelope, limit, bodies) ─▶ the envelope, or one without a body, with the header `penstock_body`
    receive:  redeem(envelope, bodies)          ─▶ the envelope as it was

Only Penstock's own receivers read references, so use this for queues that its workers take from. What is received by
reference and sent anew stays a reference. A `BodyStore` removes a body by time, not with its message: copies of a
message find it, too.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Final, Protocol

from producers.contract import keys
from producers.contract.record import Record
from producers.errors import PenstockError

BODY_HEADER: Final = "penstock_body"
_NO_CALLBACKS: Final = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
#: The body of a message from Penstock's own senders: no arguments, and nothing to be sent afterwards.
NATIVE_BODY: Final = json.dumps([[], {}, _NO_CALLBACKS])
_BODY: Final = base64.b64encode(NATIVE_BODY.encode()).decode()
#: Longest encoded body that is looked at for being that one, written otherwise.
_NATIVE_LENGTH: Final = 300
#: Headers by which Celery has a part in a task.
_CELERY: Final = (
    "eta",
    "expires",
    "group",
    "group_index",
    "chord",
    "retries",
    "shadow",
    "stamped_headers",
    BODY_HEADER,
)
#: The sender's reply queue. Results are ignored, so nothing replies, but Celery's messages always name one.
_REPLY_TO: Final = str(uuid.uuid4())
#: Stands where a message's own values belong. No name of a queue contains it.
_CUT: Final = "\0cut\0"
_NUMBERS: Final = (int, float)
#: Characters of a body in base64 that are estimated to be a token: three bytes.
_BASE64_PER_TOKEN: Final = 4
#: Hexadecimal digits of a mark (`engine.prefix`), of which a message has 16 at most.
DIGITS: Final = 16
_PREFIX: Final = re.compile(r"(?:[0-9a-f]{16}){0,16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Message:
    """One task's message: `n` sequences that may need `tokens` KV tokens, on which a worker's credit is spent."""

    id: str
    queue: str
    tier: str
    n: int
    tokens: int
    tenant: str = ""
    """The task's tenant; empty: all tasks without one share a turn."""
    at: int = 0
    """When the task was submitted (ms of the store's clock); 0: not known."""
    order_key: str = ""
    """The task's own; empty: it keeps no order. Only for brokers that keep the order of a key."""
    prefix: str = ""
    """The marks of its prompt (`engine.prefix`), one after another; empty: not known, or nobody goes by them."""

    @classmethod
    def of(cls, record: Record) -> Message:
        """The message of a record, to send it again. Raises KeyError or ValueError for a broken record."""
        fields = record.fields
        tenant = fields.get("tenant", "")
        at = record.time("created") or 0
        order_key, tokens = fields.get("order_key", ""), int(fields["tokens"])
        return cls(record.id, fields["queue"], fields["tier"], record.width, tokens, tenant, at, order_key)

    def options(self) -> dict[str, Any]:
        """The message as options of Celery's `send_task`."""
        return {
            "task_id": self.id,
            "root_id": self.id,
            "queue": self.queue,
            "priority": keys.TIERS[self.tier][1],
            "headers": {"penstock": self._size()},
            "ignore_result": True,
        }

    def envelope(self) -> str:
        """The message as JSON text, as kombu would put it on a list."""
        name, tag = json.dumps(self.id), f'"{uuid.uuid4()}"'
        parts = _envelope(os.getpid(), self.queue, keys.TIERS[self.tier][1])
        between = (name, name, json.dumps(self._size()), name, tag, "")
        return "".join(chain.from_iterable(zip(parts, between, strict=True)))

    def _size(self) -> dict[str, int | str]:
        fields: dict[str, int | str] = {"tenant": self.tenant, "at": self.at, "order_key": self.order_key}
        fields["prefix"] = self.prefix
        return {"v": 1, "n": self.n, "tokens": self.tokens, **{name: value for name, value in fields.items() if value}}


@lru_cache(256)
def _envelope(pid: int, queue: str, priority: int) -> list[str]:
    """The JSON text of a message, cut where its id, its id, its size, its id and its delivery's tag belong."""
    headers: dict[str, Any] = {
        "lang": "py",
        "task": keys.TASK_NAME,
        "id": _CUT,
        "shadow": None,
        "eta": None,
        "expires": None,
        "group": None,
        "group_index": None,
        "retries": 0,
        "timelimit": [None, None],
        "root_id": _CUT,
        "parent_id": None,
        "argsrepr": "()",
        "kwargsrepr": "{}",
        "origin": f"gen{pid}@{socket.gethostname()}",
        "ignore_result": True,
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
        "penstock": _CUT,
    }
    properties = {
        "correlation_id": _CUT,
        "reply_to": _REPLY_TO,
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": queue},
        "priority": priority,
        "body_encoding": "base64",
        "delivery_tag": _CUT,
    }
    whole = json.dumps(
        {
            "body": _BODY,
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": headers,
            "properties": properties,
        }
    )
    return whole.split(json.dumps(_CUT))


def id_of(headers: Mapping[str, Any]) -> str | None:
    """The task's id; None without a usable one. A lone surrogate cannot be part of a key."""
    task_id = headers.get("id")
    if not isinstance(task_id, str) or not task_id:
        return None
    return None if any("\ud800" <= character <= "\udfff" for character in task_id) else task_id


def marks_in(headers: Mapping[str, Any]) -> list[str]:
    """The marks of a task's prompt in its message's headers, the shortest part first; [] where there are none that a
    broker takes."""
    header = headers.get("penstock")
    prefix = header.get("prefix") if isinstance(header, dict) else None
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        return []
    return [prefix[at : at + DIGITS] for at in range(0, len(prefix), DIGITS)]


def is_plain(headers: Mapping[str, Any]) -> bool:
    """Whether the message is plain Celery's: Penstock clients send a valid `penstock` header with the task's size."""
    size = headers.get("penstock")
    if not isinstance(size, dict) or size.get("v") != 1:
        return True
    return type(size.get("n")) not in _NUMBERS or type(size.get("tokens")) not in _NUMBERS


def tokens_of_texts(task: str, body: str) -> int:
    """Estimated tokens of the texts in a plain message, by its body's length; 0 if its task's name is none of a kind
    that generates nothing. `fetch.lua` computes the same."""
    if keys.NAMED_KINDS.get(task, "generate") == "generate":
        return 0
    return -(-len(body.encode(errors="replace")) // _BASE64_PER_TOKEN)


def is_native(payload: Mapping[str, Any]) -> bool:
    """Whether Celery has no part in the message's task: it is as Penstock's clients, gateways and sources write it. The
    result is ignored, nothing is to be sent after it, and it is neither delayed nor a retry. `payload`: the whole
    message; nothing about it is trusted, so it may be anything that JSON has."""
    headers, properties = payload["headers"], payload["properties"]
    return (
        headers["task"] == keys.TASK_NAME
        and headers.get("ignore_result") is True
        and not any(map(headers.get, _CELERY))
        and not is_plain(headers)
        and id_of(headers) is not None
        and payload.get("content-type") == "application/json"
        and properties.get("body_encoding") == "base64"
        and isinstance(properties.get("delivery_info"), dict)
        and _is_native_body(payload.get("body"))
    )


def _is_native_body(body: Any) -> bool:
    return body == _BODY or (isinstance(body, str) and len(body) < _NATIVE_LENGTH and _says_nothing(body))


@lru_cache(256)
def _says_nothing(body: str) -> bool:
    try:
        return bool(json.loads(base64.b64decode(body)) == [[], {}, _NO_CALLBACKS])
    except (ValueError, RecursionError):
        return False


def task_headers(raw: bytes | str) -> dict[str, Any] | None:
    """The headers of a task's message; None for another message, which becomes a dead letter once it is fetched."""
    try:
        headers: dict[str, Any] = json.loads(raw)["headers"]
        return headers if headers["task"] in keys.NAMED_KINDS and id_of(headers) is not None else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def kind_of(raw: bytes | str) -> tuple[str, str] | None:
    """The id and the kind of a message that is Penstock's by its name, and no task's; None for any other."""
    try:
        headers: dict[str, Any] = json.loads(raw)["headers"]
        kind, task_id = headers["task"], id_of(headers)
        return (task_id, kind) if task_id and kind not in keys.NAMED_KINDS and kind.startswith(keys.KINDS) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


class MessageTooLarge(PenstockError):
    """The queue does not take a message of this size."""


class BodyGone(PenstockError):
    """The body of a message is not where its reference says: nobody can use the message any more."""


class BodyStore(Protocol):
    """Keeps bodies of messages: `producers.store.files` on disk or S3. Both calls block, and may raise
    OSError and redis.exceptions.RedisError."""

    def put(self, body: bytes) -> Mapping[str, str]:
        """Keep a body. Returns its reference."""

    def get(self, reference: Mapping[str, str]) -> bytes:
        """The body. Raises BodyGone."""


def check_in(envelope: str, limit: int, bodies: BodyStore | None) -> str:
    """An envelope (JSON as kombu writes it) of up to `limit` bytes: itself, or one whose body is in `bodies`.

    Raises MessageTooLarge: there are no `bodies`, or the headers alone are too large.
    """
    size = len(envelope.encode())
    if size <= limit:
        return envelope
    if bodies is None:
        raise MessageTooLarge(
            f"the message has {size} bytes, and its queue takes {limit}; with --files-dir it would fit"
        )
    message: dict[str, Any] = json.loads(envelope)
    headers = {**message["headers"], BODY_HEADER: {}}
    if (without := len(json.dumps({**message, "body": "", "headers": headers}).encode())) > limit:
        raise MessageTooLarge(f"the message has {without} bytes without its body, and its queue takes {limit}")
    headers[BODY_HEADER] = dict(bodies.put(message["body"].encode()))
    return json.dumps({**message, "body": "", "headers": headers})


def redeem(envelope: str, bodies: BodyStore | None) -> str:
    """An envelope with its body. Costs nothing where it has it. Raises BodyGone."""
    if f'"{BODY_HEADER}"' not in envelope:
        return envelope
    message = json.loads(envelope)
    headers = dict(message["headers"])
    reference = headers.pop(BODY_HEADER, None)
    if reference is None:  # the word stands elsewhere
        return envelope
    if bodies is None or not isinstance(reference, dict):
        raise BodyGone("the message's body is kept aside, and nothing here can read it")
    return json.dumps({**message, "headers": headers, "body": bodies.get(reference).decode()})
