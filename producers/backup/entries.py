"""The lines of a backup: one JSON object each, in files of many (`archive`).

| `kind` | fields beside it |
| --- | --- |
| `task` | `id`, `record`, `stream` (its entries), `result` (the compacted stream), `entry` (its Idempotency-Key's) |
| `batch` | `id`, `batch`, `refused`, `parts`, `begun` |
| `file` | `id`, `fields` |
| `row` | `name`, `fields`, `due` (ms, of its place in an index) of the outbox |
| `usage` | `id`, `fields` of a row of the ledger |
| `key` | `name`, `type`, `value` of any other key |
| `letter` | `value`: a dead letter of the broker |
| `weight` | `tenant`, `weight` |

`at`: the server's time (ms) of the reading; `ttl`: what was left to live then (ms), absent where it had no end. Bytes
that are not UTF-8 are `{"b": base64}`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

#: Kinds, in the order of a backup.
KINDS: Final = ("usage", "task", "batch", "file", "row", "key", "letter", "weight")

Entry = dict[str, Any]


def encode(value: Any) -> Any:
    """A value of the store as JSON may have it."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"b": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        # A field's name that is no text would not be JSON; none of ours is.
        return {
            name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name: encode(item)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [encode(item) for item in value]
    return value


def decode(value: Any) -> bytes:
    """A value as the store takes it."""
    if isinstance(value, dict):
        return base64.b64decode(value["b"])
    return str(value).encode("utf-8", "surrogateescape")


def pairs(value: Mapping[str, Any]) -> list[bytes]:
    """A hash as arguments of HSET."""
    return [part for name, item in value.items() for part in (decode(name), decode(item))]


def line(entry: Entry) -> bytes:
    return json.dumps(entry, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def parse(chunks: Iterable[bytes]) -> Iterable[Entry]:
    """The entries of a file's bytes."""
    remainder = b""
    for chunk in chunks:
        *whole, remainder = (remainder + chunk).split(b"\n")
        for text in whole:
            yield json.loads(text)


def commands(name: str, kind: str, value: Any) -> list[tuple[Any, ...]]:
    """The commands that make a key of this type, which is not there.

    Raises ValueError for an unknown type.
    """
    if not value and value != "":
        return []
    match kind:
        case "hash":
            flat = pairs(value)
            return [("HSET", name, *flat[k : k + 1000]) for k in range(0, len(flat), 1000)]
        case "string":
            return [("SET", name, decode(value))]
        case "set":
            return [("SADD", name, *map(decode, value[k : k + 1000])) for k in range(0, len(value), 1000)]
        case "zset":
            flat = [part for member, score in value for part in (repr(score).encode(), decode(member))]
            return [("ZADD", name, *flat[k : k + 1000]) for k in range(0, len(flat), 1000)]
        case "list":
            return [("RPUSH", name, *map(decode, value[k : k + 1000])) for k in range(0, len(value), 1000)]
        case "stream":
            return [("XADD", name, entry, *map(decode, fields)) for entry, fields in value]
    raise ValueError(f"{name} has the type {kind}, which no key of Penstock has")
