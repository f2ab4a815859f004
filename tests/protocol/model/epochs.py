"""LEASE and LEAD across a restore: who began before it holds nothing after it, and nothing starts on half a store.

A model of its own: `lease` and `lead` are the scripts as far as epochs go, `steps` has a worker, a sweeper and one
restore into the server behind the same name (`producers/store/epoch.py`). A process looks at its start whether the
store is being restored, and reads the epoch only afterwards. `check` visits every state, and then goes back from the
good ends; a rule that is dropped must be missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

RULES: Final = {
    "compared": "LEASE and LEAD compare the caller's epoch with the store's",
    "not_restoring": "they refuse while the store is being restored, also who has read the new epoch already",
    "another_id": "a restore gives the store another epoch before it writes anything",
    "ends": "who is told of another epoch ends, and is started anew",
}
Rules = frozenset[str]
ALL: Final = frozenset(RULES)
#: What both answer to a caller of another epoch.
OTHER: Final = -1
WORKER, SWEEPER = 0, 1


class Store(NamedTuple):
    epoch: str = ""
    restoring: bool = False
    leases: frozenset[str] = frozenset()
    leader: str = ""


def _other(s: Store, own: str, rules: Rules) -> bool:
    return ("compared" in rules and s.epoch != own) or ("not_restoring" in rules and s.restoring)


def lease(s: Store, inc: str, own: str, *, take: bool, rules: Rules = ALL) -> tuple[int, Store]:
    """1: taken or renewed; 0: it is gone; OTHER."""
    if _other(s, own, rules):
        return OTHER, s
    if not take and inc not in s.leases:
        return 0, s
    return 1, s._replace(leases=s.leases | {inc})


def lead(s: Store, me: str, own: str, rules: Rules = ALL) -> tuple[int, Store]:
    """0: it leads; 1: another does; OTHER."""
    if _other(s, own, rules):
        return OTHER, s
    return (1, s) if s.leader not in ("", me) else (0, s._replace(leader=me))


class Process(NamedTuple):
    """`pc`: down, looked (no restore is under way), up. `own`: the epoch that it read; `began`: restores until then."""

    pc: str = "down"
    own: str = ""
    began: int = 0


class World(NamedTuple):
    store: Store = Store()
    processes: tuple[Process, Process] = (Process(), Process())
    restores: int = 0
    kills: int = 1
    bad: str = ""


def steps(w: World, rules: Rules) -> Iterator[tuple[str, bool, World]]:
    """Label, whether it is no fault, and the world after it."""
    for k, process in enumerate(w.processes):
        yield from _process(w, k, process, rules)
    for held in w.store.leases:
        yield "the worker's lease lapses", True, w._replace(store=w.store._replace(leases=w.store.leases - {held}))
    if w.store.leader:
        yield "the lead lapses", True, w._replace(store=w.store._replace(leader=""))
    if w.store.restoring:
        yield "the restore ends", True, w._replace(store=w.store._replace(restoring=False))
    elif not w.restores:
        epoch = "restored" if "another_id" in rules else w.store.epoch
        yield "a restore begins", True, w._replace(store=Store(epoch, True), restores=1)


def _process(w: World, k: int, process: Process, rules: Rules) -> Iterator[tuple[str, bool, World]]:
    name = ("worker", "sweeper")[k]
    if process.pc == "down":
        if not w.store.restoring:
            yield f"the {name} looks at its start", True, _put(w, k, Process("looked"))
        return
    if w.kills:
        yield f"the {name} is killed", False, _put(w, k, Process())._replace(kills=w.kills - 1)
    if process.pc == "looked":
        yield f"the {name} reads the epoch", True, _put(w, k, Process("up", w.store.epoch, w.restores))
        return
    for take in (True, False):
        if k == WORKER:
            answer, after = lease(w.store, name, process.own, take=take, rules=rules)
        else:
            answer, after = lead(w.store, name, process.own, rules)
        there = w._replace(store=after)
        if answer == OTHER:
            yield f"the {name} is told", True, _put(there, k, Process()) if "ends" in rules else there
        elif after != w.store or name in (*after.leases, after.leader):
            bad = "what began before the restore holds a lease after it" if process.began < w.restores else ""
            bad = "a process holds a lease on a store that is being restored" if w.store.restoring else bad
            yield f"the {name} holds its lease", True, there._replace(bad=bad)


def _put(w: World, k: int, process: Process) -> World:
    first, second = w.processes
    return w._replace(processes=(process, second) if k == WORKER else (first, process))


def good(w: World) -> bool:
    """All is restored, and both go on there."""
    return bool(w.restores and not w.store.restoring and w.store.leases and w.store.leader)


def check(rules: Rules = ALL) -> tuple[str, int]:
    """What went wrong in some state, empty where nothing did; and the number of states."""
    seen, todo, into = {World()}, [World()], dict[World, set[World]]()
    while todo:
        w = todo.pop()
        if w.bad:
            return w.bad, len(seen)
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
    return ("no good end" if seen - fine else ""), len(seen)
