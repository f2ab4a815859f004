"""Reads a message as a sender wrote it. `fetch.lua` reads it the same way, with cjson."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from producers.contract import keys
from producers.contract.message import marks_in, tokens_of_texts


class Unusable(Exception):
    """The message must become a dead letter; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A usable message. `counts`: as sequences and tokens; 0 of either: unknown."""

    raw: bytes
    id: str
    tenant: str = ""
    counts: bool = True
    seqs: float = 0
    tokens: float = 0
    at: float = 0
    """When its task was submitted (ms); 0: unknown."""
    order_key: str = ""
    marks: tuple[str, ...] = ()
    """Of its prompt's prefixes, the shortest part first."""

    def size(self, capacity: tuple[int, int], plain_tokens: int) -> tuple[int, int]:
        """Sequences and tokens that it needs of an engine."""
        if not self.counts:
            return 0, 0
        seqs, tokens = min(self.seqs or 1, capacity[0]), min(self.tokens or plain_tokens, capacity[1])
        return int(seqs), int(tokens)


def read(raw: bytes) -> Sent:
    """Parse a message. Raises Unusable."""
    m = _decoded(raw)
    headers = _of(m, "headers")
    if not isinstance(m, dict | list):
        raise Unusable("not a JSON object")
    if not isinstance(_of(m, "properties"), dict | list):
        raise Unusable("no properties")
    if not isinstance(_of(_of(m, "properties"), "delivery_info"), dict | list):
        raise Unusable("no delivery_info")
    task_id, task = _of(headers, "id"), _of(headers, "task")
    if not isinstance(task_id, str) or not task_id or not isinstance(task, str):
        raise Unusable("no task id and name in the headers")
    body = _of(m, "body")
    if not isinstance(body, str):
        raise Unusable("no body")
    size = _of(headers, "penstock")
    return Sent(
        raw,
        task_id,
        _name(_of(size, "tenant")),
        task in keys.NAMED_KINDS,
        _whole(_of(size, "n")),
        _whole(_of(size, "tokens")) or tokens_of_texts(task, body),
        _whole(_of(size, "at")),
        _name(_of(size, "order_key")),
        tuple(marks_in(headers)) if isinstance(headers, dict) else (),
    )


def task_id_of(raw: bytes) -> str | None:
    """The id of a message's task; None if it has none."""
    try:
        task_id = _of(_of(_decoded(raw), "headers"), "id")
    except Unusable:
        return None
    return task_id if isinstance(task_id, str) else None


def _decoded(raw: bytes) -> Any:
    """The value of JSON. Bytes that are not UTF-8 are kept. A lone surrogate, written as an escape, raises Unusable."""
    try:
        json.dumps(json.loads(raw.decode("latin-1")), ensure_ascii=False).encode()
        return json.loads(raw.decode(errors="surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise Unusable("not JSON") from error


def _of(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _name(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: Any) -> float:
    """A size from a header, rounded down; 0 if it is not a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return 0
    try:
        return value if math.isinf(value) else math.floor(value)
    except OverflowError:  # a whole number that no float can hold
        return math.inf
