"""EJECT and REINSTATE: which workers of a pool may be held back at once, whoever dies, and whatever reply is lost.

A model of its own, since no step touches a task. Workers judge themselves at any time, so that every step of the judge
is one that may happen. `check` visits every state; a rule that is dropped must be missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

RULES: Final = {
    "share": "EJECT grants no more than a third of the pool's living workers",
    "living": "entries of workers without a lease do not count",
    "again": "a worker that is entered does not count against itself",
    "own": "a worker that fails by itself is entered whatever the share",
    "asks_on": "a worker that is held back asks again each round, and closes where it is refused",
}
WORKERS: Final = 4


class Worker(NamedTuple):
    lease: bool = True
    lives: bool = True
    open: bool = False
    own: bool = False
    """It failed by itself: the share does not overrule it."""
    fresh: bool = False
    """It was granted its place by a view of the pool that still holds."""


class World(NamedTuple):
    workers: tuple[Worker, ...]
    ejected: frozenset[int] = frozenset()
    faults: int = 1


def eject(w: World, k: int, own: bool, rules: frozenset[str] = frozenset(RULES)) -> tuple[frozenset[int], bool]:
    """The script: who is entered afterwards, and whether the worker may be held back."""
    living = {i for i, one in enumerate(w.workers) if one.lease}
    entered = w.ejected & living if "living" in rules else w.ejected
    others = len(entered - {k} if "again" in rules else entered)
    granted = (own and "own" in rules) or "share" not in rules or 3 * (others + 1) <= len(living)
    return (entered | {k} if granted else entered - {k}), granted


def steps(w: World, rules: frozenset[str]) -> Iterator[tuple[str, World]]:
    for k, one in enumerate(w.workers):
        if not one.lives:
            if one.lease:
                yield f"the lease of {k} lapses", _put(w, k, one._replace(lease=False))
            continue
        if not one.open:
            yield from _judged(w, k, one, rules)
            if k in w.ejected:
                yield f"{k} REINSTATE", w._replace(ejected=w.ejected - {k})
            continue
        if "asks_on" in rules:
            entered, granted = eject(w, k, one.own, rules)
            after = _settled(_put(w._replace(ejected=entered), k, one._replace(open=granted)), k)
            yield f"{k} EJECT again -> {granted}", after
        yield f"the probe of {k} passes", _put(w, k, one._replace(open=False, own=False, fresh=False))
    if w.faults:
        for k, one in enumerate(w.workers):
            if one.lives:
                yield f"{k} is killed", _put(w, k, one._replace(lives=False))._replace(faults=w.faults - 1)
        yield "a failover loses the entries", _stale(w._replace(ejected=frozenset(), faults=w.faults - 1))


def _judged(w: World, k: int, one: Worker, rules: frozenset[str]) -> Iterator[tuple[str, World]]:
    for own in (False, True):
        entered, granted = eject(w, k, own, rules)
        said = w._replace(ejected=entered)
        opened = _put(said, k, one._replace(open=granted, own=own and granted))
        yield f"{k} EJECT{' by itself' if own else ''} -> {granted}", _settled(opened, k)
        if w.faults:
            yield f"{k} EJECT, reply lost", said._replace(faults=w.faults - 1)


def _settled(w: World, k: int) -> World:
    """It has its answer by the pool as it is now. An entry by itself may take another's place, which asks again."""
    if w.workers[k].own:
        return _put(_stale(w), k, w.workers[k])
    return _put(w, k, w.workers[k]._replace(fresh=w.workers[k].open))


def _stale(w: World) -> World:
    return w._replace(workers=tuple(one._replace(fresh=False) for one in w.workers))


def _put(w: World, k: int, one: Worker) -> World:
    lapsed = w.workers[k].lease and not one.lease
    after = w._replace(workers=(*w.workers[:k], one, *w.workers[k + 1 :]))
    return _stale(after) if lapsed else after


def wrong(w: World) -> str:
    """What is broken, in words."""
    living = [one for one in w.workers if one.lease]
    held = [one for k, one in enumerate(w.workers) if one.lease and one.open and k in w.ejected]
    if 3 * len(held) > len(living) and any(one.fresh for one in held):
        return "more than the share is held back by grants that all hold"
    return ""


def wrong_answer(w: World, rules: frozenset[str]) -> str:
    """What a worker is told that it must not be told."""
    living = sum(one.lease for one in w.workers)
    for k, one in enumerate(w.workers):
        if not one.lives:
            continue
        others = {i for i in w.ejected if w.workers[i].lease} - {k}
        if not eject(w, k, False, rules)[1] and 3 * (len(others) + 1) <= living:
            return "an outlier is refused though the share has room"
        if not eject(w, k, True, rules)[1]:
            return "a worker that fails by itself is refused"
    return ""


def stuck(w: World, rules: frozenset[str]) -> bool:
    """Whether more than the share are held back by comparison and nobody can find it out: no step asks again."""
    held = [k for k, one in enumerate(w.workers) if one.lease and one.lives and one.open and not one.own]
    over = 3 * sum(one.open and one.lives for one in w.workers) > sum(one.lease for one in w.workers)
    return bool(held) and over and not any(label.endswith("False") for label, _ in _asked_in_turn(w, rules))


def _asked_in_turn(w: World, rules: frozenset[str]) -> Iterator[tuple[str, World]]:
    """Two rounds of all that are held back, one after the other: in the second, each sees all others' entries."""
    for k in (*range(len(w.workers)), *range(len(w.workers))):
        for label, after in steps(w, rules):
            if label.startswith(f"{k} EJECT again"):
                yield label, after
                w = after
                break


def check(rules: frozenset[str] = frozenset(RULES)) -> tuple[str, int]:
    """What went wrong in some state, empty where nothing did; and the number of states."""
    first = World((Worker(),) * WORKERS)
    seen, todo = {first}, [first]
    while todo:
        w = todo.pop()
        if said := wrong(w) or wrong_answer(w, rules):
            return said, len(seen)
        if stuck(w, rules):
            return "more than the share stay held back", len(seen)
        for _, after in steps(w, rules):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return "", len(seen)
