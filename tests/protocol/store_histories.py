"""Histories of tasks that are too long for luck to find, as the store's state machine goes through them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from tests.protocol.store import INCS, LIMIT, POOLS, TASKS, reason_of

if TYPE_CHECKING:
    from tests.protocol.test_scripts import StoreMachine

#: Workers that take a task up one after the other and die: whether each got on with it. Too long for luck to find.
LIVES = ([False] * LIMIT, [True, *[False] * LIMIT], [False, True] * 2 + [False] * LIMIT, [True] * 4 * LIMIT)


def be_late(kind: type[StoreMachine]) -> None:
    """One that nobody sent, one that runs, one that was cancelled and whose worker died; then all of them at rest."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    machine.admit("t1", "mine", False)
    machine.admit("t2", "mine", False)
    machine.queued("t2", True)
    machine.expire("t2", False, True)
    for t in ("t2", "p"):
        machine.claim(t, "i1", False, False, False)
    machine.cancel("p", False, True)
    for t in TASKS:
        machine.expire(t, False, True)
        machine.deadline_passes(t, True)
        machine.expire(t, False, True)
    machine.lease("i1", False)
    for t in TASKS:
        machine.expire(t, False, True)
        machine.again()
    machine.lease("i2", True)
    for t in TASKS:
        machine.claim(t, "i2", False, False, False)
    ends = {t: r and r.end for t, r in machine.model.items()}
    assert ends == {"t1": "failed", "t2": "incomplete", "p": "cancelled"}
    machine.teardown()


def be_late_with_a_part(kind: type[StoreMachine]) -> None:
    """One choice ended long before the deadline, one has begun, one has not; found by CLAIM, and by EXPIRE. Beside it a
    task that nobody took up."""
    for found_by_claim in (True, False):
        machine = kind()
        machine.begin(begun=(0, 0, 0), alive=(True, True, True))
        machine.claim("p", "i1", False, False, False)
        machine.append([("p", False, True, 0, 0, 3)])
        machine.append([("p", False, True, 1, 0, 600)])
        machine.admit("t2", "mine", False)
        machine.queued("t2", True)
        for t in ("t2", "p"):
            machine.deadline_passes(t, True)
        machine.expire("t2", False, True)
        machine.lease("i1", False)
        if found_by_claim:
            machine.claim("p", "i2", False, False, False)
        else:
            machine.expire("p", False, True)
        r = machine.model["p"]
        assert r
        assert (r.end, reason_of(r, 0), reason_of(r, 2)) == ("incomplete", "stop", "deadline")
        machine.teardown()


def go_on_after_the_end(kind: type[StoreMachine]) -> None:
    """The worker that ended it still holds the claim."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    machine.claim("p", "i1", False, False, False)
    machine.append([("p", False, True, 0, 0, 1)])
    machine.finish("p", True, "completed", 0)  # by another index than the last, which is refused
    machine.finish("p", True, "completed", 9)
    machine.queued("p", False)
    machine.append([("p", False, True, 0, 0, 1)])
    machine.finish("p", True, "failed", 9)
    machine.teardown()


def condemned(kind: type[StoreMachine]) -> None:
    """By the broker, which cannot know that somebody lived to take it up."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    machine.claim("p", "i1", False, False, False)
    machine.again()
    machine.lease("i1", False)
    machine.claim("p", "i2", True, False, False)
    r = machine.model["p"]
    assert r
    assert not r.end
    machine.teardown()


def die(kind: type[StoreMachine], lives: list[bool]) -> None:
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(False, False, False))
    for got_on, inc in zip([*lives, False], cycle(INCS), strict=False):
        machine.lease(inc, True)
        machine.claim("p", inc, False, False, False)
        if got_on:
            machine.append([("p", False, True, 0, 0, 1)])
        machine.lease(inc, False)
    r = machine.model["p"]
    assert r
    assert r.why == "dead"
    machine.teardown()


def cancel_what_the_dead_left(kind: type[StoreMachine]) -> None:
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    machine.claim("p", "i1", False, False, False)
    machine.lease("i1", False)
    machine.cancel("p", False, True)
    machine.teardown()


def cancel_what_dies_then(kind: type[StoreMachine]) -> None:
    """Cancelled under a worker, with a deadline and without one, and before it was sent; no other worker comes."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    machine.admit("t1", "mine", False)
    machine.admit("t2", "mine", False)
    machine.claim("t2", "i1", False, False, False)
    for t in ("t1", "t2"):
        machine.cancel(t, False, True)
        machine.expire(t, False, True)
    machine.lease("i1", False)
    machine.queued("t1", True)
    for t in ("t1", "t2"):
        machine.expire(t, False, True)
    assert {t: r and r.end for t, r in machine.model.items()} == {"t1": "cancelled", "t2": "cancelled", "p": None}
    machine.teardown()


def end_and_not_settle(kind: type[StoreMachine]) -> None:
    """A client's task: its worker lives, then it is dead."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    machine.admit("t2", "mine", False)
    machine.orphan("t2", False)
    machine.claim("t2", "i1", False, False, False)
    machine.orphan("t2", True)
    machine.append([("t2", False, True, 0, 0, 1)])
    machine.finish("t2", True, "completed", 9)
    machine.orphan("t2", False)
    machine.orphan("t2", True)
    r = machine.model["t2"]
    assert r
    assert not r.settled
    machine.lease("i1", False)
    machine.orphan("t2", False)
    r = machine.model["t2"]
    assert r
    assert r.settled
    machine.teardown()


def keep_the_letter(kind: type[StoreMachine]) -> None:
    """A client's task is given up, and whoever was to keep its message dies."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(False, False, False))
    machine.admit("t1", "mine", False)
    for inc in [*INCS, *INCS][: LIMIT + 1]:
        machine.lease(inc, True)
        machine.claim("t1", inc, False, False, False)
        machine.lease(inc, False)
    machine.orphan("t1", False)
    r = machine.model["t1"]
    assert r
    assert not r.settled
    machine.orphan("t1", True)
    machine.teardown()


def meet_another_pool(kind: type[StoreMachine]) -> None:
    """What was begun: of its own version while a worker of its pool lives, and once none does; of another version. And
    what nobody has begun, of a client and of plain Celery."""
    own, sister, other = POOLS
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    for t in ("t1", "t2"):
        machine.admit(t, "mine", False)
    for t in TASKS:
        machine.claim(t, "i3", False, False, False, other)
        machine.release(t, True)
        machine.claim(t, "i2", False, False, False, sister)
        machine.release(t, True)
    for t in TASKS:
        machine.claim(t, "i1", False, False, False, own)
        machine.append([(t, True, True, 0, 0, 1)])
        machine.release(t, True)
        for inc, pool in (("i2", sister), ("i3", other), ("i1", own)):
            machine.claim(t, inc, False, False, False, pool)
            machine.release(t, True)
    machine.lease("i1", False)
    for t in TASKS:
        machine.claim(t, "i3", False, False, False, other)
        machine.claim(t, "i2", False, False, False, sister)
    assert [r and r.owner for r in machine.model.values()] == ["i2"] * 3
    machine.teardown()


def end_in_another_version(kind: type[StoreMachine]) -> None:
    """What is cancelled, or too late, is ended by whoever has its message."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    for t in ("t1", "t2"):
        machine.admit(t, "mine", False)
    machine.cancel("t1", True, True)
    machine.deadline_passes("t2", True)
    for t in ("t1", "t2"):
        machine.claim(t, "i3", False, False, False, POOLS[2])
    assert [machine.model[t].end for t in ("t1", "t2")] == ["cancelled", "failed"]
    machine.teardown()


def find_no_room(kind: type[StoreMachine]) -> None:
    """Of two tiers the worse one is refused first, and stops writing first; what was admitted is so when it is full."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    for share in (0.95, 0.8, 0.0, 0.95):
        for t in ("t1", "t2"):
            machine.admit(t, "mine", False, share)
    for t in ("t1", "t2"):
        machine.claim(t, "i1", False, False, False)
    for share in (1.2, 1.05, 0.95, 1.2):
        machine.append([(t, False, True, 0, 0, 2) for t in ("t1", "t2")], share)
        machine.append([(t, False, True, 0, -2, 2) for t in ("t1", "t2")], share)
    machine.teardown()


def come_late(kind: type[StoreMachine]) -> None:
    """A request that reaches the store after its time."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    machine.admit("t1", "mine", True)
    machine.teardown()


def leave_a_dead_letter_to_another(kind: type[StoreMachine]) -> None:
    """The worker that settled it dies before it acknowledges the message."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    machine.claim("p", "i1", True, False, False)
    machine.settle("p", letter=True)
    machine.claim("p", "i2", False, False, False)
    machine.teardown()


def compact_what_was_read_in_part(kind: type[StoreMachine]) -> None:
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    machine.claim("p", "i1", False, False, False)
    machine.append([("p", False, True, 0, 0, 2)])
    machine.finish("p", True, "completed", 9)
    machine.settle("p")
    machine.compact("p", True, True)
    machine.compact("p", True, False)
    machine.teardown()


def be_settled_by_its_end(kind: type[StoreMachine]) -> None:
    """In one call, which may be called again, by whoever has its message; of one that is cancelled, too."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    for cancelled in (False, True):
        machine.admit("t1", "mine", False)
        machine.queued("t1", True)
        machine.claim("t1", "i1", False, False, False)
        machine.append([("t1", False, True, 0, 0, 2)])
        if cancelled:
            machine.cancel("t1", True, True)
        machine.finish("t1", False, "completed", 9, native=True)  # by another claim
        machine.finish("t1", True, "completed", 0, native=True)  # by another index than the last
        machine.finish("t1", True, "completed", 9, native=True)
        machine.again()
        machine.finish("t1", False, "completed", 9, native=True)
        machine.finish("t1", False, "completed", 9)
        machine.claim("t1", "i2", False, False, False)
        machine.ttl_runs_out("t1")
        machine.its_id_may_be_used_again("t1")
    machine.teardown()


def end_in_two_lives(kind: type[StoreMachine]) -> None:
    """An id that is used again has events of its own."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    for _ in range(2):
        machine.admit("t1", "mine", False)
        machine.queued("t1", True)
        machine.cancel("t1", True, True)
        machine.settle("t1")
        machine.ttl_runs_out("t1")
    assert machine.past["t1 cancelled own"] == 2
    machine.teardown()


def be_deleted(kind: type[StoreMachine]) -> None:
    """While it waits, while it runs, once it has ended, once it is settled, and once its stream is compacted; and what
    its worker still says."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    for far in range(5):
        machine.admit("t1", "mine", False)
        if far > 0:
            machine.claim("t1", "i1", False, False, False)
            machine.append([("t1", False, True, 0, 0, 2)])
        if far > 1:
            machine.finish("t1", True, "completed", 9)
        if far > 2:
            machine.settle("t1")
        if far > 3:
            machine.compact("t1", True, False)
        machine.delete("t1", True)
        machine.again()
        machine.append([("t1", False, True, 0, 0, 1)])
        machine.finish("t1", False, "completed", 9)
        machine.settle("t1")
        machine.admit("t1", "mine", False)
        assert machine.model["t1"] is None
        machine.its_id_may_be_used_again("t1")
    assert not machine.past
    machine.teardown()


def be_deleted_for_good(kind: type[StoreMachine]) -> None:
    """A plain task's message makes no record again. Rows of an earlier life of an id are not this one's to take."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    for deleted in (False, True):
        machine.claim("p", "i1", False, False, False)
        machine.append([("p", False, True, 0, 0, 2)])
        machine.finish("p", True, "completed", 9)
        if deleted:
            machine.delete("p", True)
        else:
            machine.settle("p")
            machine.ttl_runs_out("p")
    assert machine.past["p completed we_1"] == 1
    machine.settle("p")
    machine.claim("p", "i2", False, False, False)
    assert machine.model["p"] is None
    machine.teardown()


def be_revoked(kind: type[StoreMachine]) -> None:
    """Before it has a record, by a message then and by one of a worker that cannot read it; while it waits, while a
    worker has it, after that has died, and once it has ended. And a mark whose time is over."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, False))
    for t in TASKS:
        machine.revoke(t, True)
    machine.admit("t1", "mine", False)  # a client's is another task
    machine.claim("p", "i1", False, False, False)
    machine.settle("p")
    machine.ttl_runs_out("p")
    machine.claim("p", "i2", True, False, False)
    machine.revoke("p", True)
    machine.admit("t2", "mine", False)
    machine.claim("t2", "i1", False, False, False)
    for t in ("t1", "t2"):
        machine.revoke(t, True)  # the one is only flagged, for it is not sent yet; the other is its worker's
    machine.lease("i1", False)
    machine.revoke("t2", True)
    assert [(r.cancel, r.end) for t in ("t1", "t2") if (r := machine.model[t])] == [(True, None), (True, "cancelled")]
    machine.settle("p")
    machine.ttl_runs_out("p")
    machine.its_revocation_is_forgotten("p")
    machine.claim("p", "i2", False, False, False)
    for t in ("t1", "t2"):
        machine.delete(t, True)
    machine.revoke("t1", True)
    machine.teardown()


def keep_the_links(kind: type[StoreMachine]) -> None:
    """A plain task's need its message, however its owner died."""
    machine = kind()
    machine.begin(begun=(0, 0, 0), alive=(True, True, True))
    machine.claim("p", "i1", False, False, False)
    machine.finish("p", True, "completed", 9)
    machine.lease("i1", False)
    machine.orphan("p", False)
    machine.teardown()


def be_buried(kind: type[StoreMachine]) -> None:
    """A task whose message becomes a dead letter ends with it, also one that nobody could claim."""
    for claimed in (True, False):
        machine = kind()
        machine.begin(begun=(3 * claimed, 0, 2), alive=(True, True, True))
        machine.release("p" if claimed else "t2", claimed, True)
        machine.teardown()


def live_after_all(kind: type[StoreMachine]) -> None:
    """The first of two owners was taken for dead, with progress or without it; somebody else was not."""
    for got_on in (True, False):
        machine = kind()
        machine.begin(begun=(0, 0, 0), alive=(True, True, True))
        for owner, other in (("i1", "i2"), ("i2", "i1")):
            machine.claim("p", owner, False, False, False)
            machine.lease(owner, False)
            if got_on and owner == "i2":
                machine.append([("p", False, True, 0, 0, 2)])
            machine.lease(other, True)
            machine.claim("p", other, False, False, False)
        machine.absolve("p", True, False)
        for _ in range(3):
            machine.absolve("p", True, True)
        machine.teardown()


#: All of them.
HISTORIES: tuple[Callable[[type[StoreMachine]], None], ...] = (
    be_late,
    be_late_with_a_part,
    condemned,
    go_on_after_the_end,
    end_and_not_settle,
    leave_a_dead_letter_to_another,
    keep_the_letter,
    be_buried,
    be_deleted,
    be_deleted_for_good,
    be_revoked,
    cancel_what_the_dead_left,
    cancel_what_dies_then,
    come_late,
    find_no_room,
    compact_what_was_read_in_part,
    be_settled_by_its_end,
    end_in_two_lives,
    keep_the_links,
    live_after_all,
    meet_another_pool,
    end_in_another_version,
    *(partial(die, lives=lives) for lives in LIVES),
)
