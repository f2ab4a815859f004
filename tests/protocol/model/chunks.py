"""CHUNKS, PARENT and the ends of chunks: a task of many texts, whoever of its submitters dies, and whatever is lost.

A model of its own: to the rest of the protocol a chunk is a task as any other. A submitter goes on from the number that
it was told; an equal call after its death is another one. `check` visits every state; a rule that is dropped must be
missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

RULES: Final = {
    "from": "CHUNKS makes no chunk that is made",
    "final": "CHUNKS makes nothing of a parent that has ended",
    "order": "entries come in the order of chunks, whichever ends first",
    "all": "a parent completes with the last of all of its chunks, not of those that are made",
    "fails": "a chunk that ends otherwise than completed ends its parent",
    "wins": "a parent that has ended stays as it is",
    "joins": "PARENT appends entries for chunks that an earlier release has ended",
    "lost": "a chunk that the store has lost ends its parent",
    "interrupted": "PARENT ends a parent that nobody has written to the end",
    "tidies": "PARENT cancels what is left of a parent that has ended",
}
ALL: Final = frozenset(RULES)
#: The chunks of the parent that `check` follows.
TOTAL: Final = 3
#: Ends of tasks. A chunk is None before it is made, `waits`, an end, or `lost`.
FINAL: Final = frozenset({"completed", "failed", "cancelled"})


class World(NamedTuple):
    chunks: tuple[str | None, ...] = (None,) * TOTAL
    status: str = "queued"
    written: int = 0
    entries: tuple[int, ...] = ()
    """The chunks of the stream's entries."""
    tidied: int = 0
    listed: bool = True
    """It is among the open parents, which sweepers look at."""
    submitters: tuple[int | None, ...] = (0,)
    """The number from which each goes on; None once it is through, or dead."""
    faults: int = 2
    remade: bool = False


def write(w: World, first: int, count: int, rules: frozenset[str] = ALL) -> tuple[tuple[str, int], World]:
    """The script CHUNKS: its answer, and the world afterwards."""
    ended = w.status in FINAL and "final" in rules
    if ended or (first != w.written and "from" in rules) or first + count > len(w.chunks):
        return (w.status, w.written), w
    remade = any(chunk is not None for chunk in w.chunks[first : first + count])
    chunks = (*w.chunks[:first], *("waits",) * count, *w.chunks[first + count :])
    written = first + count
    return (w.status, written), w._replace(chunks=chunks, written=written, remade=w.remade or remade)


def ends(w: World, number: int, status: str, rules: frozenset[str] = ALL) -> World:
    """Any script that ends a chunk, in which its parent learns of it."""
    w = _put(w, number, status)
    if status == "completed":
        return joined(w, rules)
    return failed(w, status, rules) if "fails" in rules else w


def joined(w: World, rules: frozenset[str] = ALL) -> World:
    """What a parent does once chunks have completed: the entries of the next ones, and its end."""
    if w.status in FINAL:
        return w
    if "order" not in rules:
        late = tuple(k for k, chunk in enumerate(w.chunks) if chunk == "completed" and k not in w.entries)
        w = w._replace(entries=w.entries + late)
    while len(w.entries) < w.written:
        chunk = w.chunks[len(w.entries)]
        if chunk == "completed":
            w = w._replace(entries=(*w.entries, len(w.entries)))
        elif chunk == "lost":
            return failed(w, "failed", rules) if "lost" in rules else w
        elif chunk in FINAL:
            return failed(w, str(chunk), rules) if "fails" in rules else w
        else:
            return w
    if len(w.entries) == (len(w.chunks) if "all" in rules else w.written):
        return w._replace(status="completed")
    return w


def failed(w: World, status: str, rules: frozenset[str] = ALL) -> World:
    return w if w.status in FINAL and "wins" in rules else w._replace(status=status)


def advance(w: World, interrupted: bool, most: int, rules: frozenset[str] = ALL) -> tuple[tuple[str, int], World]:
    """The script PARENT. `interrupted`: none of its chunks was made for long."""
    if w.status not in FINAL:
        if w.written < len(w.chunks) and interrupted:
            w = failed(w, "failed") if "interrupted" in rules else w
        elif "joins" in rules:
            w = joined(w, rules)
    if w.status not in FINAL:
        return (w.status, 1), w
    to = min(w.tidied + most, w.written)
    if "tidies" in rules:
        chunks = tuple(
            "cancelled" if w.tidied <= k < to and chunk == "waits" else chunk for k, chunk in enumerate(w.chunks)
        )
        w = w._replace(chunks=chunks)
    w = w._replace(tidied=to, listed=to < w.written)
    return (w.status, int(w.listed)), w


def steps(w: World, rules: frozenset[str]) -> Iterator[World]:
    for k, first in enumerate(w.submitters):
        if first is None:
            continue
        (status, written), after = write(w, first, 1, rules)
        through = status in FINAL or written in (first, len(w.chunks))
        yield _submitter(after, k, None if through else written)
        if w.faults:  # it dies, and its caller asks again, with what the record says, or not
            dead = _submitter(w._replace(faults=w.faults - 1), k, None)
            yield dead
            if w.status not in FINAL and w.written < len(w.chunks):
                yield dead._replace(submitters=(*dead.submitters, w.written))
                # Or it was only slow: both go on.
                yield w._replace(faults=w.faults - 1, submitters=(*w.submitters, w.written))
    for number, chunk in enumerate(w.chunks):
        if chunk == "waits":
            yield ends(w, number, "completed", rules)
            if w.faults:
                less = w._replace(faults=w.faults - 1)
                yield ends(less, number, "failed", rules)
                yield _put(less, number, "completed")  # by an earlier release
                yield _put(less, number, "lost")
    if w.status not in FINAL and w.faults:
        yield w._replace(status="cancelled", faults=w.faults - 1)
    if w.listed:
        alone = all(first is None for first in w.submitters)
        yield advance(w, alone, 1, rules)[1]
        if not alone and w.faults:
            yield advance(w._replace(faults=w.faults - 1), True, 1, rules)[1]


def wrong(before: World | None, w: World, rules: frozenset[str]) -> str:
    """What must never be seen, of a world and the one before it; else ""."""
    if before and before.status in FINAL and before.status != w.status:
        return "a parent that had ended changed"
    if before and before.status in FINAL and not before.listed and w.written > before.written:
        return "chunks of a parent that is through"
    if w.remade:
        return "a chunk was made twice"
    if w.entries != tuple(range(len(w.entries))):
        return "entries out of order"
    if w.status == "completed" and (len(w.entries) < len(w.chunks) or w.written < len(w.chunks)):
        return "completed without all of its chunks"
    return "" if _ends_well(w, rules) else "no good end without a fault"


def _ends_well(w: World, rules: frozenset[str]) -> bool:
    """With no submitter any more, workers and sweepers end the parent and all that was made of it."""
    for number, chunk in enumerate(w.chunks):
        if chunk == "waits" and w.status not in FINAL:
            w = ends(w, number, "completed", rules)
    for _ in range(2 * len(w.chunks) + 2):
        if w.listed:
            _, w = advance(w, True, 1, rules)
    return w.status in FINAL and not w.listed and "waits" not in w.chunks


def check(rules: frozenset[str] = ALL) -> tuple[str, int]:
    """Visits every state. Returns what is wrong, or "", and the number of states."""
    seen, todo = {World()}, [World()]
    while todo:
        w = todo.pop()
        for after in steps(w, rules):
            if message := wrong(w, after, rules):
                return message, len(seen)
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return "", len(seen)


def _put(w: World, number: int, status: str) -> World:
    return w._replace(chunks=(*w.chunks[:number], status, *w.chunks[number + 1 :]))


def _submitter(w: World, k: int, first: int | None) -> World:
    return w._replace(submitters=(*w.submitters[:k], first, *w.submitters[k + 1 :]))
