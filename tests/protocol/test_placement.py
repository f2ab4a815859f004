"""What placement may change of the order in which messages are taken, with each broker: little, and for a moment."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from producers.broker.base import Consumer, Sender
from producers.broker.connect import connect_consumer, connect_sender
from producers.broker.values import Credit, Rules
from producers.contract.keys import pool_queue
from producers.contract.message import Message

QUEUE = pool_queue("m", "1", "test")
ME, HOLDER = "w.1", "w.2"
ROOM = Credit((10**6,) * 4, (10**9,) * 4)
#: Nobody waits so long in a test: a head is left until it was overtaken.
RULES = Rules(capacity=(10**6, 10**9), plain_tokens=100, ageing=10**6, max_redeliveries=5, left_ms=10**9)
MARKS = [f"{number:016x}" for number in range(4)]


@dataclass(slots=True)
class Pair:
    """A worker that takes, and one that holds and has room, and never fetches again."""

    sender: Sender
    worker: Consumer
    names: int = 0

    def send(self, task_id: str, marks: int = 0, tier: str = "default", tenant: str = "", order_key: str = "") -> None:
        prefix = "".join(MARKS[:marks])
        self.sender.send(Message(task_id, QUEUE, tier, 1, 100, tenant, 0, order_key, prefix))

    def take(self, count: int = 1, left_ms: int = RULES.left_ms, inc: str = ME, room: Credit = ROOM) -> list[str]:
        self.names += count
        uuids = [f"u{self.names - k}" for k in range(count)]
        fetched = self.worker.fetch(inc, uuids, room, replace(RULES, left_ms=left_ms), 1000)
        assert fetched is not None
        return [json.loads(one.raw)["headers"]["id"] for one in fetched]


@pytest.fixture(params=["redis", "memory"])
def pair(request: pytest.FixtureRequest, valkey_url: str, valkey: object) -> Iterator[Pair]:
    url = valkey_url if request.param == "redis" else f"memory://{uuid.uuid4()}"
    pair = Pair(connect_sender(url, url), connect_consumer(url, [QUEUE], url))
    pair.worker.places = True
    for inc in (ME, HOLDER):
        pair.worker.take_lease(inc, "{}", 600.0)
    assert pair.worker.hold(HOLDER, MARKS[2:]) == 2
    assert pair.take(1, inc=HOLDER) == []
    yield pair
    pair.sender.close()
    pair.worker.close()


def test_no_task_starves_and_nothing_overtakes_an_order_key(pair: Pair) -> None:
    """Whatever is held where: each is taken at last, after four younger ones at most from when it was the oldest."""
    rng = random.Random(3)
    pair.worker.hold(ME, MARKS[:1])
    waiting: dict[str, list[str]] = {tenant: [] for tenant in "ab"}
    keyed = set()
    for number in range(150):
        tenant, key = rng.choice("aab"), rng.choice(["", "", "", "", "k"])
        pair.send(f"t{number}", rng.choice([0, 0, 1, 3, 4]), tenant=tenant, order_key=key)
        waiting[tenant].append(f"t{number}")
        keyed |= {f"t{number}"} if key else set()
    overtaken: dict[str, int] = {}
    out_of_turn = 0
    while any(waiting.values()):
        taken = pair.take(rng.randint(1, 3)) or pair.take(left_ms=0)
        assert taken
        for task_id in taken:
            (line,) = [line for line in waiting.values() if task_id in line]
            place = line.index(task_id)
            assert place < 8
            if place:
                assert not keyed.intersection(line[:place])
                overtaken[line[0]] = overtaken.get(line[0], 0) + 1
                assert overtaken[line[0]] <= 4
            out_of_turn += bool(place)
            line.remove(task_id)
    assert out_of_turn > 10


def test_tiers_and_turns_are_as_without(pair: Pair) -> None:
    """What is held here goes before others of its tenant, and before no other tenant's and no better tier's."""
    pair.worker.hold(ME, MARKS)
    for tenant in "ab":
        for number in range(4):
            pair.send(f"{tenant}{number}", 4 * (number == 3), tenant=tenant)
    pair.send("p", tier="priority", tenant="b")
    taken = [one for _ in range(9) for one in pair.take()]
    assert taken[0] == "p"
    assert {"".join(sorted(one[0] for one in taken[at : at + 2])) for at in range(1, 9, 2)} == {"ab"}
    assert [one for one in taken if one[0] == "a"] == ["a3", "a0", "a1", "a2"]


def test_a_holder_takes_what_was_left_to_it_and_no_more_is_waited_for(pair: Pair) -> None:
    pair.send("a", 4)
    pair.send("b", 4)
    assert pair.take(2) == []
    assert 0 < (pair.worker.look_again or 0) <= RULES.left_ms / 1000
    assert pair.take(1, inc=HOLDER, room=Credit((1,) * 4, (10**9,) * 4)) == ["a"]
    assert pair.take(2) == ["b"], "the holder has no room any more"
    assert pair.worker.look_again is None


def test_who_is_gone_is_forgotten(pair: Pair) -> None:
    pair.worker.end_lease(HOLDER)
    pair.send("a", 4)
    assert pair.take() == ["a"]
    pair.worker.reap(HOLDER)
    pair.worker.take_lease(HOLDER, "{}", 600.0)
    assert pair.worker.hold(HOLDER, []) == 0
    pair.send("b", 4)
    assert pair.take() == ["b"]


def test_a_call_leaves_the_heads_of_so_many_tenants_and_no_more(pair: Pair) -> None:
    """Its work is bounded, whatever waits."""
    for number in range(100):
        pair.send(f"t{number}", 4, tenant=f"{number}")
    taken = pair.take(100)
    assert len(taken) == 100 - 64
    assert len(pair.take(100, left_ms=0)) == 64
