"""A task of more texts than a worker takes at once: a parent, and its chunks, which are tasks of their own.

    submit ─▶ ADMIT: the parent, charged for all ─▶ CHUNKS, a portion at a time: their records ─▶ messages ─▶ workers
    a chunk ends (_final.lua) ─▶ the parent's stream gets the entries of its next chunks, in order ─▶ the last: its end
    readers: the parent's stream ─▶ a `Chunk` each ─▶ the rows in that chunk's own stream, or in the blob of its result

The parent is a record as any other, so that waiting, polling, webhooks, lists, cancel, deadline, retry and delete are a
task's. No message announces it, and no worker claims it. A chunk is a task as any other, so that workers, leases,
retries and dead letters are a task's; its id is a function of its parent's and its number.

docs/how/deaths.md has what stands when a process dies between any two of these.

A cancel of the parent and the end of its last chunk are two scripts, and the first one wins: the other finds a final
parent. A chunk that ends otherwise than `completed` ends its parent so, with its error by the parent's numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

from producers.connection.script import Call, script
from producers.contract import keys
from producers.store.protocol import PACKAGE

#: Time (ms) without another chunk after which a parent without all of its chunks has lost its submitter.
INTERRUPTED_MS: Final = 60_000
#: Chunks cancelled in one script.
CANCELLED: Final = 32
#: Time (s) for which a chunk is kept beside its parent's time to live, until that has ended: longer than it may take.
MARGIN_S: Final = 14 * 24 * 3600
#: Most chunks of a task, as `_chunks.lua` has it.
MAX_CHUNKS: Final = 512
#: Fields of a chunk's record that may differ between chunks.
OWN_FIELDS: Final = ("task", "tokens", "result_bytes", "prompt_tokens", "offset", "texts")


def chunk_id(parent: str, number: int) -> str:
    """The id of a parent's chunk: a UUID that is a function of both."""
    name = hashlib.sha1(f"{parent}:{number}".encode(), usedforsecurity=False).hexdigest()
    return f"{name[:8]}-{name[8:12]}-8{name[13:16]}-8{name[17:20]}-{name[20:32]}"


def write(parent: str, first: int, shared: Mapping[str, str | int], chunks: Sequence[Mapping[str, str | int]]) -> Call:
    """CHUNKS: make the records of a parent's chunks from number `first` on. Answers `[status, how many there are]`, or
    `[gone, 0]`.

    `shared`: fields of all records; `chunks`: the OWN_FIELDS of each.
    """
    pairs = [part for item in shared.items() for part in item]
    args: list[str | int] = [parent, first, len(chunks), len(pairs), len(OWN_FIELDS), *pairs, *OWN_FIELDS]
    args += [chunk.get(name, "") for chunk in chunks for name in OWN_FIELDS]
    return Call(script(PACKAGE, "chunks"), (keys.task(parent), keys.SUBMITTING, keys.DEADLINES), args)


def advance(parent: str, interrupted_ms: int = INTERRUPTED_MS) -> Call:
    """PARENT: take an open parent as far as it goes without its submitter. Answers `[its status then, whether it stays
    open]`, or `[gone, 0]`."""
    return Call(script(PACKAGE, "parent"), (keys.task(parent), keys.PARENTS), (parent, interrupted_ms, CANCELLED))
