"""Histories of messages that luck seldom finds, as the broker's state machine goes through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from producers.broker.redis import calls as broker
from producers.contract import keys
from tests.protocol.messages import MARKS, POISON, good

if TYPE_CHECKING:
    from tests.protocol.test_broker import BrokerMachine

QUEUE, OTHER = "penstock:m", "penstock:m@1"
#: The queue's lists by rank, the best tier's first.
FIRST, *_, LAST = (name for name, _ in sorted(broker.lists([QUEUE]), key=lambda one: one[1]))
INC, SECOND = "i1", "i2"


def task(
    id_: str, tenant: str = "", seqs: int = 1, tokens: float = 100, marks: int = 0, order_key: str | None = None
) -> bytes:
    """`marks`: of its prompt."""
    return good(id_, keys.TASK_NAME, seqs, tokens, True, tenant, "".join(MARKS[:marks]) or None, order_key)


def come_back(machine: BrokerMachine) -> None:
    """Before what has arrived meanwhile; its tenant is charged for nothing, though another was served less."""
    machine.send(FIRST, [task("a", "t1"), task("b", "t1"), task("c", "t2")])
    machine.fetch_more(INC, 1)
    machine.send(FIRST, [task("d", "t1")])
    machine.back(INC, 0, False, False)


def rest(machine: BrokerMachine) -> None:
    """After it one who was served less than those who stayed is as they are."""
    machine.send(FIRST, [task("a", "t1"), task("b", "t2"), task("c", "t2")])
    machine.fetch_more(INC, 2)
    machine.send(FIRST, [task("d", "t1")])
    machine.fetch(INC, 0, 0, [0] * 4, [0] * 4)


def rest_after_much(machine: BrokerMachine) -> None:
    """And one who was served more still was."""
    machine.send(FIRST, [task("a", "t1", tokens=400), task("b", "t2")])
    machine.fetch_more(INC, 1)
    machine.send(FIRST, [task("c", "t1")])
    machine.fetch(INC, 0, 0, [0] * 4, [0] * 4)


def suspect(machine: BrokerMachine) -> None:
    """A tenant's second one waits for the first, another's ordinary tasks do not."""
    machine.have_come_back({"a", "b"})
    machine.send(FIRST, [task("a", "t1"), task("b", "t1"), task("c", "t2")])
    machine.send(FIRST, [task("d", "t2")])
    machine.fetch(INC, 0, 0, [0] * 4, [0] * 4)
    machine.fetch_more(INC, 4)


def want_room(machine: BrokerMachine) -> None:
    """A lower tier does not pass what has none; what waits longest has none, and a higher tier goes on."""
    machine.send(FIRST, [task("a", seqs=4)])
    machine.send(LAST, [task("b")])
    machine.fetch(INC, 1, 0, [2] * 4, [8] * 4)
    machine.a_head_waits(sorted(machine.model.unserved).index(LAST), 4)
    machine.fetch(INC, 1, 0, [4, 4, 4, 0], [8] * 4)


def weigh(machine: BrokerMachine) -> None:
    machine.weigh("t1", "4")
    machine.send(FIRST, [task("a", "t1"), task("b", "t1")])
    machine.fetch_more(INC, 1)


def say_nan(machine: BrokerMachine) -> None:
    machine.send(FIRST, [task("a", tokens=float("nan"))])
    machine.fetch_more(INC, 1)


def count_texts(machine: BrokerMachine) -> None:
    """Of tasks by the names of kinds that generate nothing, by the length of what was sent, where it says no size."""
    if not machine.all_place:
        return  # nor does the release before know these names
    for name in keys.NAMED_KINDS:
        machine.send(FIRST, [good("a", name, None, None, False, "t1", body="é" * 401)])
        machine.fetch(INC, 1, 0, [8] * 4, [1] * 4)
        machine.fetch_more(INC, 1)
    machine.send(FIRST, [good("b", "penstock.embed", 2, 400, True), good("c", "penstock.embed", 1, -3, True, body="")])
    machine.fetch_more(INC, 2)


def live_and_lapse(machine: BrokerMachine) -> None:
    """Who lives is not reaped; whose lease is gone is given nothing."""
    machine.send(FIRST, [task("a"), task("b")])
    machine.fetch_more(INC, 1)
    machine.reap(INC)
    machine.lapses(INC)
    machine.fetch_more(INC, 1)


def taken_early(machine: BrokerMachine) -> None:
    """Only who says that it listens, and does not, as seen by one who does. An ordinary task comes later."""
    for mute, heard, looker_heard, joined in (
        (True, False, True, "long ago"),
        (False, True, True, "before"),
        (False, False, False, "before"),
        (False, False, True, "after"),
    ):
        machine.send(FIRST, [task("a"), good("b", "app.add", 1, 0, False, "")])
        machine.fetch_more(INC, 2)
        machine.reap_early(INC, mute, heard, looker_heard, joined)
    machine.reap_early(INC, False, False, True, "before")
    machine.again()
    machine.retract(INC)
    machine.again()
    machine.lease(INC, True, QUEUE)
    machine.fetch_more(INC, 2)
    machine.dies(INC)
    machine.retract(INC)


def hold(machine: BrokerMachine) -> None:
    """What its worker has in its books is no stray, what it has forgotten is."""
    machine.send(FIRST, [task("a"), task("b")])
    machine.fetch_more(INC, 2)
    machine.strays(INC, 0, True)
    machine.strays(INC, 0, False)


def move(machine: BrokerMachine) -> None:
    """What was sorted goes back in its order, and to its version's queue once its pool has nobody left."""
    for take in (lambda: machine.recall(QUEUE, set(), 100), lambda: machine.adopt(False), machine.desert):
        machine.send(FIRST, [task("a", "t2"), task("b", "t1"), task("c")])
        machine.fetch(INC, 0, 0, [0] * 4, [0] * 4)
        take()


def name_nobody(machine: BrokerMachine) -> None:
    """An id that is empty is none."""
    machine.send(FIRST, [next(raw for raw, _ in POISON if b'"id": ""' in raw), task("a")])
    machine.fetch_more(INC, 2)


def come_back_among_others(machine: BrokerMachine) -> None:
    """Where nothing more of the list is sorted: before what was sent meanwhile."""
    machine.send(FIRST, [task("a", "t1")])
    machine.fetch_more(INC, 1)
    machine.send(FIRST, [task(name, "t1") for name in "bcdefg"])
    machine.back(INC, 0, False, False)
    machine.fetch_more(INC, 1)


def recall_a_few(machine: BrokerMachine) -> None:
    """Who stood before them keeps its place: what is still sorted may be older."""
    machine.send(FIRST, [task(name, "t1") for name in "abc"])
    machine.fetch_more(INC, 1)
    machine.back(INC, 0, False, False)
    machine.recall(QUEUE, set(), 1)


def recall_in_order(machine: BrokerMachine) -> None:
    """What came back stands behind what was sent before it, and was sorted."""
    machine.send(FIRST, [task("a", "t1"), task("b", "t1"), task("c", "t2")])
    machine.fetch_more(INC, 2)
    machine.back(INC, 1, False, False)
    machine.recall(QUEUE, set(), 100)
    machine.fetch_more(INC, 3)


def go_elsewhere(machine: BrokerMachine) -> None:
    """To the front of another queue, where it is sorted to where it stood."""
    machine.send(FIRST, [task("a", "t1"), task("b", "t1")])
    machine.send(LAST, [task("c", "t1")])
    machine.fetch_more(INC, 3)
    for _ in range(3):
        machine.back(INC, 0, False, False, OTHER)
    machine.fetch(INC, 0, 0, [0] * 4, [0] * 4)


def leave_a_list(machine: BrokerMachine) -> None:
    """One of two equal messages, and to the front of another list: a worker put it aside, or nobody may do it."""
    pick = sorted([FIRST, LAST]).index(FIRST)
    for leave in (
        lambda: machine.move(FIRST, LAST, pick, True),
        lambda: machine.bury(FIRST, pick, "nobody", True),
    ):
        machine.send(LAST, [task("c")])
        machine.send(FIRST, [task("a"), task("a")])
        leave()


def leave_to_a_holder(machine: BrokerMachine) -> None:
    """To who holds more and has room; what follows goes first, but not for ever."""
    if not machine.all_place:
        return
    machine.hold(SECOND, MARKS[:2], set(), False)
    machine.fetch(SECOND, 1, 0, [8] * 4, [8] * 4)
    machine.send(FIRST, [task("a", "t1", marks=2), task("b", "t1", marks=3), task("c", "t1"), task("d", "t2")])
    machine.fetch_more(INC, 2)
    machine.fetch_more(INC, 2)
    machine.was_left_for(0, 0)
    machine.fetch_more(INC, 1)
    machine.was_left_for(0, 1)
    machine.fetch_more(INC, 1)
    machine.fetch_more(SECOND, 2)


def leave_to_nobody(machine: BrokerMachine) -> None:
    """Who has no room, or holds no more, or is gone, or is a stranger to the mark, is not waited for; nor is a message
    with an order key passed over, or one behind it taken first."""
    if not machine.all_place:
        return
    for prepare in (
        lambda: machine.fetch(SECOND, 1, 0, [0] * 4, [8] * 4),
        lambda: machine.fetch(SECOND, 1, 0, [8] * 4, [0] * 4),
        lambda: machine.hold(INC, MARKS[:2], set(), False),
        lambda: machine.hold(SECOND, [], set(MARKS[:1]), True),
        lambda: machine.lapses(SECOND),
    ):
        machine.hold(INC, [], set(MARKS), False)
        machine.hold(SECOND, MARKS[:2], set(), False)
        machine.fetch(SECOND, 1, 0, [8] * 4, [8] * 4)
        prepare()
        machine.send(FIRST, [task("a", "t1", marks=2), task("b", "t1")])
        machine.fetch_more(INC, 2)
    machine.begins(SECOND, QUEUE)
    machine.hold(SECOND, MARKS, set(), True)
    machine.fetch(SECOND, 1, 0, [8] * 4, [8] * 4)
    machine.send(FIRST, [task("a", "t1", marks=2, order_key="k"), task("b", "t1")])
    machine.fetch_more(INC, 1)
    machine.send(FIRST, [task("a", "t1", marks=2), task("c", "t1", order_key="k"), task("d", "t1")])
    machine.fetch_more(INC, 3)


def take_what_is_held(machine: BrokerMachine) -> None:
    """Of those behind what is left: the one of which most is held here, of the first eight; five times at most."""
    if not machine.all_place:
        return
    machine.hold(SECOND, MARKS, set(), False)
    machine.fetch(SECOND, 1, 0, [8] * 4, [8] * 4)
    machine.hold(INC, MARKS[:1], set(), False)
    machine.send(FIRST, [task("a", "t1", marks=3)])
    machine.send(FIRST, [task(name, "t1") for name in "bcde"])
    machine.send(FIRST, [task("b", "t1", marks=1), task("c", "t1", marks=3), task("d", "t1"), task("e", "t1", marks=1)])
    machine.fetch(INC, 0, 0, [8] * 4, [8] * 4)
    machine.fetch(INC, 0, 0, [8] * 4, [8] * 4)
    for count in (1, 1, 2, 3):
        machine.fetch_more(INC, count)


def leave_what_others_hold(machine: BrokerMachine) -> None:
    """In place of what is left neither a suspect is taken, nor what has no room, nor the ninth."""
    if not machine.all_place:
        return
    machine.hold(SECOND, MARKS, set(), False)
    machine.fetch(SECOND, 1, 0, [8] * 4, [8] * 4)
    machine.have_come_back({"b", "c"})
    machine.send(FIRST, [task("a", "t1", marks=2), task("b", "t1"), task("d", "t1", seqs=8)])
    machine.fetch(INC, 1, 0, [4] * 4, [8] * 4)
    machine.was_left_for(0, -1)
    machine.fetch(INC, 1, 0, [4] * 4, [8] * 4)
    machine.send(FIRST, [task("e", "t2", marks=3) for _ in range(8)])
    machine.send(FIRST, [task("e", "t2")])
    for _ in range(3):
        machine.fetch(INC, 0, 0, [0] * 4, [0] * 4)
    machine.fetch(INC, 4, 0, [4] * 4, [8] * 4)


def overtake_with_what_is_held(machine: BrokerMachine) -> None:
    """With more than is held of the oldest, which is left to nobody: four times."""
    if not machine.all_place:
        return
    machine.hold(INC, MARKS[:2], set(), False)
    machine.send(FIRST, [task("a", "t1", marks=1), task("b", "t1", marks=1), task("c", "t1", marks=2)])
    machine.fetch_more(INC, 1)
    machine.send(FIRST, [task("d", "t1", marks=2) for _ in range(4)])
    for _ in range(2):
        machine.fetch(INC, 0, 0, [0] * 4, [0] * 4)
    machine.fetch_more(INC, 1)
    machine.hold(SECOND, MARKS, set(), False)
    machine.fetch(SECOND, 1, 0, [8] * 4, [8] * 4)
    machine.hold(INC, [], set(MARKS), True)
    machine.fetch(INC, 0, 0, [8] * 4, [8] * 4)
    machine.hold(INC, MARKS, set(), False)
    machine.fetch_more(INC, 4)
    machine.send(FIRST, [task("a", "t2"), task("b", "t2", marks=2)])
    machine.fetch(INC, 1, 0, [0] * 4, [0] * 4)
    machine.fetch_more(INC, 1)


def hold_more_than_others(machine: BrokerMachine) -> None:
    """What another holds a shorter part of, and what is no mark, is not left to it."""
    if not machine.all_place:
        return
    odd = "G" * 16
    machine.hold(INC, MARKS, set(), False)
    machine.hold(SECOND, [MARKS[0], odd], set(), False)
    machine.fetch(SECOND, 1, 0, [8] * 4, [8] * 4)
    machine.send(FIRST, [task("a", marks=3), good("b", keys.TASK_NAME, 1, 100, True, "", odd)])
    machine.fetch_more(INC, 2)


def forget_the_dead(machine: BrokerMachine) -> None:
    """REAP removes what it held, of what it was the last to enter; others' stays."""
    if not machine.all_place:
        return
    machine.hold(INC, MARKS, set(), False)
    machine.hold(SECOND, MARKS[:1], set(), False)
    machine.lapses(INC)
    machine.hold(INC, MARKS[1:], set(), False)
    machine.reap(INC)


def bury(machine: BrokerMachine) -> None:
    """What nobody can use is kept for people."""
    machine.send(FIRST, [task("a")])
    machine.fetch_more(INC, 1)
    machine.ack(INC, 0, False, "no 'é'", 0, False)


#: All of them.
HISTORIES: tuple[Callable[[BrokerMachine], None], ...] = (
    come_back,
    rest,
    rest_after_much,
    suspect,
    want_room,
    weigh,
    say_nan,
    count_texts,
    live_and_lapse,
    taken_early,
    hold,
    move,
    name_nobody,
    come_back_among_others,
    recall_a_few,
    recall_in_order,
    go_elsewhere,
    leave_a_list,
    bury,
    leave_to_a_holder,
    leave_to_nobody,
    take_what_is_held,
    leave_what_others_hold,
    overtake_with_what_is_held,
    hold_more_than_others,
    forget_the_dead,
)


def run_histories(kind: type[BrokerMachine]) -> None:
    """Each on a server and a model of its own."""
    for history in HISTORIES:
        machine = kind()
        machine.open()
        try:
            history(machine)
        finally:
            machine.teardown()
