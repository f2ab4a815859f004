"""A task's copy for another version: made after the task, compared with it once, and gone whoever dies.

A model of its own: one task that is a sample, its copy, and a sweeper that leads, which may be killed between any two
calls and whose replies may be lost. The copy's way through queue and workers is any task's, and short here. `check`
visits every state, and then goes back from the good ends; a rule that is dropped must be missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

RULES: Final = {
    "exists": "ADMIT makes a copy only of a task that has a record",
    "open": "ADMIT enters the copy into the index of open copies, in the script that makes it",
    "with_it": "DELETE of a task deletes its copy, too",
    "once": "PAIR writes the row and marks the copy in one script",
    "tidy": "a copy that has its row is deleted",
    "orphan": "a copy whose task is gone is deleted",
    "late": "a copy that has not begun in time is deleted",
    "end": "a task that goes on for long, or a copy, is waited for no longer than the copy may run",
}
Rules = frozenset[str]
ALL: Final = frozenset(RULES)


class World(NamedTuple):
    task: str = ""
    """`live`, `final`; `expired` or `deleted`: it has no record any more."""
    sampled: bool = False
    """Its id is in the list of samples."""
    copy: str = ""
    """`submitting`, `queued`, `running`, `final`; `gone`: it is deleted, and its id is not used again."""
    open: bool = False
    messages: int = 0
    paired: bool = False
    rows: int = 0
    sweeper: str = ""
    """What it is about to do: `admit`, `send`, `mark`, `again` (its PAIR got no reply)."""
    faults: int = 2


def steps(w: World, rules: Rules) -> Iterator[tuple[str, bool, World]]:
    """Label, whether it happens unless something hinders it, and the world after it."""
    yield from _caller(w, rules)
    yield from _makes(w, rules)
    yield from _runs(w, rules)
    yield from _compares(w, rules)
    if w.sweeper and w.faults:
        yield "the sweeper is killed", False, w._replace(sweeper="", faults=w.faults - 1)


def _caller(w: World, rules: Rules) -> Iterator[tuple[str, bool, World]]:
    if not w.task:
        yield "ADMIT of the task", True, w._replace(task="live", sampled=True)
    if w.task == "live":
        yield "the task ends", False, w._replace(task="final")
    if w.task == "final":
        yield "its time to live ends", False, w._replace(task="expired")
    if w.task in ("live", "final"):
        after = w._replace(task="deleted")
        taken = "with_it" in rules and w.copy not in ("", "gone")
        yield "DELETE of the task", False, _deleted(after) if taken else after


def _makes(w: World, rules: Rules) -> Iterator[tuple[str, bool, World]]:
    if w.sampled and not w.sweeper:
        taken = w._replace(sampled=False, sweeper="admit")
        yield "takes the sample", True, taken
        if w.faults:
            yield "takes the sample, reply lost", False, taken._replace(sweeper="", faults=w.faults - 1)
        yield "drops the sample", True, taken._replace(sweeper="")
    if w.sweeper == "admit":
        refused = w.copy != "" or (w.task in ("expired", "deleted") and "exists" in rules)
        if refused:
            yield "ADMIT refuses the copy", True, w._replace(sweeper="")
        else:
            made = w._replace(copy="submitting", open="open" in rules)
            yield "ADMIT of the copy", True, made._replace(sweeper="send")
    elif w.sweeper == "send":
        yield "sends the copy's message", True, w._replace(sweeper="mark", messages=w.messages + 1)
    elif w.sweeper == "mark":
        queued = "queued" if w.copy == "submitting" else w.copy
        yield "QUEUED of the copy", True, w._replace(sweeper="", copy=queued)
    if w.copy == "submitting" and w.sweeper not in ("send", "mark") and w.messages < 2:
        yield "a sweeper sends what is unsent", True, w._replace(copy="queued", messages=w.messages + 1)


def _runs(w: World, rules: Rules) -> Iterator[tuple[str, bool, World]]:
    if w.messages and w.copy != "running":
        if w.copy in ("submitting", "queued"):
            yield "a worker: CLAIM", False, w._replace(copy="running", messages=w.messages - 1)
        else:
            yield "a worker: CLAIM finds nothing to do, ACK", True, w._replace(messages=w.messages - 1)
    if w.copy == "running":
        yield "FINISH of the copy", False, w._replace(copy="final")
        yield "its deadline ends the copy", "end" in rules, w._replace(copy="final")
        if w.faults:
            yield "its worker dies", False, w._replace(copy="queued", messages=w.messages + 1, faults=w.faults - 1)


def _compares(w: World, rules: Rules) -> Iterator[tuple[str, bool, World]]:
    there = w.copy in ("submitting", "queued", "running", "final")
    if w.open and w.copy == "gone":
        yield "leaves out what is gone", True, w._replace(open=False)
    if w.sweeper == "again" and not there:
        yield "PAIR finds no copy", True, w._replace(sweeper="")
    if not (w.open and there) or w.sweeper not in ("", "again"):
        return
    if w.task in ("expired", "deleted") and "orphan" in rules:
        yield "DELETE of the orphaned copy", True, _deleted(w)
    if w.copy in ("submitting", "queued") and "late" in rules:
        yield "DELETE of the late copy", True, _deleted(w)
    if w.copy == "final" and w.task == "live" and "end" in rules:
        yield "DELETE of a copy whose task goes on for too long", True, _deleted(w)
    if w.copy == "final" and (w.task == "final" or w.sweeper == "again"):
        again = "once" in rules and w.paired
        paired = w if again else w._replace(rows=w.rows + 1, paired="once" in rules)
        if not w.paired or w.sweeper == "again":
            yield "PAIR", True, paired._replace(sweeper="") if "once" in rules else _deleted(paired)
            if w.faults:
                yield "PAIR, reply lost", False, paired._replace(sweeper="again", faults=w.faults - 1)
        if w.paired and "tidy" in rules:
            yield "DELETE of the compared copy", True, _deleted(w)


def _deleted(w: World) -> World:
    return w._replace(copy="gone", open=False)


def wrong(w: World) -> str:
    """What is broken, in words."""
    if w.rows > 1:
        return "a pair has two rows"
    if w.task == "deleted" and w.copy not in ("", "gone"):
        return "a copy is left of a deleted task"
    return ""


def good(w: World) -> bool:
    """Nothing is left of the copy, whatever becomes of the task."""
    gone = w.copy in ("", "gone") and not w.open and not w.messages
    return w.task != "" and gone and not w.sampled and not w.sweeper


def check(rules: Rules = ALL) -> tuple[str, int]:
    """What went wrong in some state, empty where nothing did; and the number of states."""
    first = World()
    states, todo, into = {first}, [first], dict[World, set[World]]()
    while todo:
        w = todo.pop()
        if broken := wrong(w):
            return broken, len(states)
        for _, fair, after in steps(w, rules):
            if fair:
                into.setdefault(after, set()).add(w)
            if after not in states:
                states.add(after)
                todo.append(after)
    fine = {w for w in states if good(w)}
    todo = list(fine)
    while todo:
        before = into.get(todo.pop(), set()) - fine
        fine |= before
        todo += before
    stuck = states - fine
    return (f"no good end from {min(stuck, key=str)}" if stuck else ""), len(states)
