"""A message of a kind that some release does not know: put aside, taken by a later release's worker, or ended.

A model of its own, since such a message has no record, and CLAIM no part in it. One message; a worker of this release
(level 0), which does not know its kind, and one of the next (level 1), which does or does not; a sweeper of this
release. Workers come and go, and are killed; so is the sweeper. `check` visits every state, and then goes back from the
good ends; a rule that is dropped must be missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

RULES: Final = {
    "aside_up": "a worker puts what it does not know into the queue above its own level, from which it takes nothing",
    "aside_back": "what is put aside goes BACK: that counts no try",
    "able_lives": "a sweeper ends nothing in a queue that a living worker takes from",
    "looked_after": "a sweeper looks at two levels above its own: what the next release put aside may be left",
    "told_first": "the result is stored before the message becomes a dead letter",
    "one_script": "BURY removes the message and keeps the letter in one script",
    "ends_there": "what is ended does not go back to a worker",
}
Rules = frozenset[str]
ALL: Final = frozenset(RULES)
#: Returns after which a message is condemned: it is a dead letter, as it was before there were levels.
LIMIT: Final = 2
#: The queue of plain Celery senders; others are those of levels.
MODEL: Final = 0
LEVELS: Final = 2


class Worker(NamedTuple):
    lives: bool = False
    lease: bool = False
    origin: int | None = None
    """The queue that it took the message from, which it holds."""


class World(NamedTuple):
    place: int | None = MODEL
    """The queue that it waits in; None: it is in flight, or no more."""
    workers: tuple[Worker, Worker] = (Worker(True, True), Worker())
    knows: bool = True
    """Whether the next release knows the kind."""
    sweeper: str = ""
    """What it has done of ending it: `told`, `removed`, `buried`."""
    result: str = ""
    letter: bool = False
    done: bool = False
    tries: int = 0
    deaths: int = 0
    asides: int = 0
    faults: int = 2
    bad: str = ""


def steps(w: World, rules: Rules) -> Iterator[tuple[str, bool, World]]:
    """Label, whether it is no fault, and the world after it."""
    for level, worker in enumerate(w.workers):
        yield from _worker(w, level, worker, rules)
    yield from _sweeper(w, rules)


def _worker(w: World, level: int, worker: Worker, rules: Rules) -> Iterator[tuple[str, bool, World]]:
    name = f"worker of level {level}"
    if not worker.lives:
        if worker.lease:
            after = _put(w, level, Worker())
            if worker.origin is not None:
                counted = {"tries": w.tries + 1, "deaths": w.deaths + 1}
                after = after._replace(place=worker.origin, **counted)
            yield f"{name}: its lease lapses, REAP", True, after
        else:
            yield f"{name} starts", False, _put(w, level, Worker(True, True))
        return
    if w.place is not None and w.place <= level:
        taken = _put(w._replace(place=None), level, worker._replace(origin=w.place))
        if w.tries >= LIMIT:  # condemned: told, and kept as a dead letter, whatever its kind
            over = _put(w._replace(place=None), level, worker)
            yield f"{name} buries it unread", True, over._replace(letter=True, result=w.result or "failed")
        else:
            yield f"{name}: FETCH", True, taken
    if worker.origin is not None:
        free = _put(w, level, worker._replace(origin=None))
        if level and w.knows:
            yield f"{name} runs it, ACK", True, free._replace(done=True, result="done")
        else:
            to = level + 1 if "aside_up" in rules else worker.origin
            counts = 0 if "aside_back" in rules else 1
            after = free._replace(place=to, asides=w.asides + 1, tries=w.tries + counts)
            yield f"{name} puts it aside", True, after
    elif level and w.place is not MODEL:  # the release is taken back
        yield f"{name} drains, and is gone", False, _put(w, level, Worker())
    if w.faults:
        killed = _put(w, level, worker._replace(lives=False))
        yield f"{name} is killed", False, killed._replace(faults=w.faults - 1)


def _sweeper(w: World, rules: Rules) -> Iterator[tuple[str, bool, World]]:
    told, buried = {"result": w.result or "failed"}, {"place": None, "letter": True}
    if w.sweeper and w.faults:
        yield "the sweeper is killed", False, w._replace(sweeper="", faults=w.faults - 1)
    if w.sweeper == "told":
        yield "BURY", True, _buried(w, rules)
    elif w.sweeper == "removed":
        yield "keeps the letter", True, w._replace(sweeper="", letter=True)
    elif w.sweeper == "buried":
        yield "stores the result", True, w._replace(sweeper="", **told)
    elif w.place and w.place <= (LEVELS if "looked_after" in rules else 1):
        able = any(worker.lease and level >= w.place for level, worker in enumerate(w.workers))
        if (able and "able_lives" in rules) or not any(worker.lives for worker in w.workers):
            return
        bad = "ended while a worker that takes it lives" if able else ""
        if "told_first" in rules:
            yield "stores the result", True, w._replace(sweeper="told", bad=bad, **told)
        else:
            yield "BURY", True, w._replace(sweeper="buried", bad=bad, **buried)


def _buried(w: World, rules: Rules) -> World:
    """After BURY of what it has told of: it may have been taken meanwhile."""
    if not w.place:
        return w._replace(sweeper="")
    if "ends_there" not in rules:
        return w._replace(sweeper="", place=MODEL)
    if "one_script" not in rules:
        return w._replace(sweeper="removed", place=None)
    return w._replace(sweeper="", place=None, letter=True)


def _put(w: World, level: int, worker: Worker) -> World:
    return w._replace(workers=(worker, w.workers[1]) if level == 0 else (w.workers[0], worker))


def good(w: World) -> bool:
    """It was run, or its sender was told and the message is kept; nothing is left of it."""
    held = any(worker.origin is not None for worker in w.workers)
    return (w.done or w.letter) and bool(w.result) and w.place is None and not held and not w.sweeper


def wrong(w: World) -> str:
    """What is broken, in words."""
    if w.tries > w.deaths:
        return "a try was counted, and no worker died"
    if w.asides > LEVELS + w.deaths:
        return "it goes round: more often put aside than there are levels"
    return w.bad


def check(rules: Rules = ALL, *, knows: bool = True) -> tuple[str, int]:
    """What went wrong in some state, empty where nothing did; and the number of states."""
    first = World(knows=knows)
    seen, todo, into = {first}, [first], dict[World, set[World]]()
    while todo:
        w = todo.pop()
        if said := wrong(w):
            return said, len(seen)
        for _, fair, after in steps(w, rules):
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
    lost = [w for w in seen - fine if any(worker.lives for worker in w.workers)]
    return (f"no good end from {lost[0]}" if lost else ""), len(seen)
