"""Placement: a message goes to the worker that holds the longest part of its prefix, and waits for it but a moment.

A model of its own, since placement decides which message FETCH takes and nothing else: whatever it leaves still waits.
One tenant's queue: `head`, whose prefix has two marks, and others that came after it, of which one worker holds `b`.
Workers hold marks (HOLDS), take messages (FETCH), end them, hang while their lease stands, are suspended until it has
lapsed, and are killed. Time is the head's: `LIMIT` ticks from when it was first left. `check` visits every state, and
then goes back from the good ends; a rule that is dropped must be missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

RULES: Final = {
    "time": "a head that was left for the limit of time is taken by whoever has room",
    "count": "a head that so many of its tenant's messages have overtaken is passed over no more",
    "ordered": "a message with an order key is overtaken by nobody",
    "longer": "a head is left only to a holder of a longer part of its prefix than is held here",
    "alive": "a head is left only to a holder whose lease stands",
    "room": "a head is left only to a holder that had room for it when it last fetched",
    "told": "FETCH tells a worker that left a head when to look again: nothing else might wake it",
    "own": "HOLDS asks for the lease, so that nothing is entered for who was reaped",
    "reaped": "REAP removes all that was entered for the dead",
}
Rules = frozenset[str]
ALL: Final = frozenset(RULES)
#: Ticks for which a head is left, and messages that may overtake it.
LIMIT, COUNT = 2, 1
MARKS: Final = (1, 2)
#: The worker that holds what `b` needs, so that it may take that first.
HOLDS_B: Final = 1


class Worker(NamedTuple):
    lives: bool = True
    lease: bool = True
    hangs: bool = False
    """It fetches no more, while its lease stands."""
    asleep: bool = False
    """Suspended: it does nothing until it goes on, and its lease may lapse."""
    room: int = 2
    said: int = 2
    """Its room at the end of its last FETCH, as the broker knows it."""
    awake: bool = True
    timer: bool = False
    """It looks again once the head's time is over."""


class World(NamedTuple):
    waiting: tuple[str, ...]
    workers: tuple[Worker, ...] = (Worker(), Worker())
    holds: frozenset[tuple[int, int]] = frozenset()
    """(worker, mark) that was entered."""
    newest: tuple[int | None, ...] = (None, None)
    """Of each mark, who entered it last."""
    age: int | None = None
    """Ticks since the head was first left; None: it was not."""
    over: int = 0
    """Messages that have overtaken it."""
    left_by: frozenset[tuple[int, int]] = frozenset()
    """(worker, holder) of those that left the head, by what is entered now."""
    faults: int = 1
    bad: str = ""


def here(w: World, me: int) -> int:
    return max((mark for who, mark in w.holds if who == me), default=0)


def holder(w: World, me: int, rules: Rules) -> int | None:
    """To whom `me` leaves the head, as far as holders decide."""
    for mark in reversed(MARKS):
        who = w.newest[mark - 1]
        if mark <= here(w, me) and "longer" in rules:
            return None
        if who is None or who == me:
            continue
        other = w.workers[who]
        if (other.lease or "alive" not in rules) and (other.said > 0 or "room" not in rules):
            return who
    return None


def steps(w: World, rules: Rules, *, ordered: bool) -> Iterator[tuple[str, bool, World]]:
    """Label, whether it is no fault, and the world after it."""
    for k, one in enumerate(w.workers):
        if not one.lives or one.asleep:
            if one.lease:
                yield f"the lease of {k} lapses", True, _put(w, k, one._replace(lease=False))
            elif any(who == k for who, _ in w.holds):
                yield f"REAP {k}", True, _reaped(w, k) if "reaped" in rules else w
            if one.asleep:
                yield f"{k} goes on", True, _goes_on(w, k, one, rules)
            continue
        yield from _works(w, k, one, rules, ordered=ordered)
        if w.faults:
            fault = w._replace(faults=w.faults - 1)
            yield f"{k} is killed", False, _put(fault, k, one._replace(lives=False))
            yield f"{k} hangs", False, _put(fault, k, one._replace(hangs=True))
            yield f"{k} is suspended", False, _put(fault, k, one._replace(asleep=True))
    if w.age is not None and w.age < LIMIT:
        yield "time goes by", True, _later(w)


def _works(w: World, k: int, one: Worker, rules: Rules, *, ordered: bool) -> Iterator[tuple[str, bool, World]]:
    for mark in MARKS:
        if (k, mark) not in w.holds and all((k, lower) in w.holds for lower in MARKS if lower < mark):
            yield f"HOLDS {k} {mark}", False, _entered(w, k, mark)
    if (k, MARKS[-1]) in w.holds:
        yield f"HOLDS {k} drops {MARKS[-1]}", False, _dropped(w, k, MARKS[-1])
    if one.room < 2:
        yield f"{k} ends one", True, _put(w, k, one._replace(room=one.room + 1, awake=True))
    if not one.hangs and one.awake:
        yield f"{k} FETCH", True, _fetch(w, k, one, rules, ordered=ordered)


def _fetch(w: World, k: int, one: Worker, rules: Rules, *, ordered: bool) -> World:
    sleeps = one._replace(awake=False, timer=False, said=one.room)
    left = w._replace(left_by=frozenset(pair for pair in w.left_by if pair[0] != k))
    if not w.waiting or not one.room:
        return _put(left, k, sleeps)
    taken = one._replace(room=one.room - 1, said=one.room - 1)
    head, *rest = w.waiting
    if head != "head":
        return _put(left._replace(waiting=tuple(rest)), k, taken)
    may_pass = not (ordered and "ordered" in rules) and not (w.over >= COUNT and "count" in rules)
    to = holder(w, k, rules) if may_pass else None
    if "time" in rules and w.age is not None and w.age >= LIMIT:
        to = None
    held_here = may_pass and k == HOLDS_B and rest[:1] == ["b"] and not here(w, k)
    if to is None and not held_here:
        after = left._replace(waiting=tuple(rest), age=None, over=0, left_by=frozenset())
        return _put(after, k, taken)
    left = left._replace(bad=left.bad or wrong_to_pass(w, ordered=ordered))
    if to is not None:
        bad = left.bad or wrong_to_leave(w, k, to)
        left = left._replace(age=w.age or 0, left_by=left.left_by | {(k, to)}, bad=bad)
    if rest:  # what nobody else holds goes in its place
        return _put(left._replace(waiting=("head", *rest[1:]), over=min(w.over + 1, COUNT + 1)), k, taken)
    return _put(left, k, sleeps._replace(timer="told" in rules))


def wrong_to_pass(w: World, *, ordered: bool) -> str:
    """What is broken where the head is passed over at all, in words."""
    if ordered:
        return "a message with an order key was passed over"
    return "overtaken more often than the limit" if w.over >= COUNT else ""


def wrong_to_leave(w: World, k: int, to: int) -> str:
    """What is broken where worker `k` leaves the head to another, in words."""
    if not w.workers[to].lease:
        return "left to a holder without a lease"
    if not w.workers[to].said:
        return "left to a holder that said it has no room"
    if w.age is not None and w.age >= LIMIT:
        return "left for longer than the limit"
    return "two workers leave it to each other" if (to, k) in w.left_by else ""


def _later(w: World) -> World:
    age = (w.age or 0) + 1
    due = age >= LIMIT
    woken = (one._replace(awake=True, timer=False) if due and one.timer else one for one in w.workers)
    return w._replace(age=age, workers=tuple(woken))


def _entered(w: World, k: int, mark: int) -> World:
    newest = tuple(k if at == mark else who for at, who in zip(MARKS, w.newest, strict=True))
    return w._replace(holds=w.holds | {(k, mark)}, newest=newest, left_by=frozenset())


def _dropped(w: World, k: int, mark: int) -> World:
    newest = tuple(None if (at, who) == (mark, k) else who for at, who in zip(MARKS, w.newest, strict=True))
    return w._replace(holds=w.holds - {(k, mark)}, newest=newest, left_by=frozenset())


def _reaped(w: World, k: int) -> World:
    for mark in MARKS:
        w = _dropped(w, k, mark)
    return w


def _goes_on(w: World, k: int, one: Worker, rules: Rules) -> World:
    """With the HOLDS that it was about to send; then it learns whether its life is over, and is out of this model."""
    if one.lease:
        return _put(w, k, one._replace(asleep=False, awake=True))
    late = w if "own" in rules else _entered(w, k, MARKS[0])._replace(bad="entered for one who was reaped")
    return _put(late, k, one._replace(asleep=False, lives=False))


def _put(w: World, k: int, one: Worker) -> World:
    return w._replace(workers=(*w.workers[:k], one, *w.workers[k + 1 :]))


def good(w: World) -> bool:
    """All is taken, and nothing is entered for the dead."""
    return not w.waiting and all(w.workers[who].lease for who, _ in w.holds)


def check(rules: Rules = ALL, *, ordered: bool = False) -> tuple[str, int]:
    """What went wrong in some state, empty where nothing did; and the number of states."""
    seen = {
        World(waiting, (Worker(), Worker(room=room, said=room)))
        for waiting, room in ((("head",), 2), (("head",), 0), (("head", "b", "c"), 2))
    }
    todo, into = list(seen), dict[World, set[World]]()
    while todo:
        w = todo.pop()
        if w.bad:
            return w.bad, len(seen)
        for _, fair, after in steps(w, rules, ordered=ordered):
            if fair:
                into.setdefault(after, set()).add(w)
            if after not in seen:
                seen.add(after)
                todo.append(after)
    fine = {w for w in seen if good(w)}
    todo = list(fine)
    while todo:
        before = into.get(todo.pop(), set()) - fine
        fine |= before
        todo += before
    lost = [w for w in seen - fine if any(one.lives and not one.hangs and not one.asleep for one in w.workers)]
    return (f"no good end from {lost[0]}" if lost else ""), len(seen)
