"""What a worker tells the broker of what it holds, and that it says it again where the broker has lost it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from producers.broker.memory.broker import MemoryConsumer
from producers.broker.memory.server import Server
from workers.leases import holdings
from workers.leases.holdings import Holdings

MARKS = [f"{number:016x}" for number in range(holdings.PORTION + 10)]


class Worker:
    """A worker of which only this is there."""

    def __init__(self) -> None:
        self.server, self.marks = Server(), MARKS[:3]
        self.broker = MemoryConsumer(self.server, ["q"])
        self.deliveries = SimpleNamespace(serves=True)
        served = SimpleNamespace(places=True, engine=SimpleNamespace(marks=lambda: self.marks))
        self.served: Any = served
        self.holdings = Holdings(self.served, self.broker, self.deliveries)  # type: ignore[arg-type]
        self.begin("w.1")

    def begin(self, incarnation: str) -> None:
        self.life: Any = SimpleNamespace(id=incarnation, begun=True)
        self.broker.take_lease(incarnation, "{}", 600.0)

    def tell(self, times: int = 1) -> set[str]:
        """What the broker has of this life afterwards."""
        for _ in range(times):
            self.holdings.tell(self.life)
        return self.server.held.get(self.life.id, set())


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_the_broker_has_what_is_held_and_no_more(worker: Worker) -> None:
    assert worker.tell() == set(MARKS[:3])
    worker.marks = MARKS[2:5]
    assert worker.tell() == worker.holdings.held == set(MARKS[2:5])
    assert worker.holdings.has_part({"penstock": {"prefix": MARKS[0] + MARKS[4]}}) is True
    assert worker.holdings.has_part({"penstock": {"prefix": MARKS[0]}}) is False
    assert worker.holdings.has_part({}) is worker.holdings.has_part({"penstock": {"prefix": "no mark"}}) is None


def test_much_is_told_in_portions_the_newest_first(worker: Worker) -> None:
    worker.marks = MARKS
    assert worker.tell() == set(MARKS[10:])
    assert worker.tell() == set(MARKS)


def test_what_the_broker_lost_is_told_again_and_a_new_life_begins_anew(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.tell()
    worker.server.held["w.1"].discard(MARKS[0])
    monkeypatch.setattr(holdings, "AGAIN_S", 0.0)
    worker.marks = MARKS[:4]
    assert worker.tell(2) == set(MARKS[:4])
    worker.begin("w.2")
    assert worker.tell() == set(MARKS[:4])


def test_who_takes_no_tasks_holds_nothing(worker: Worker) -> None:
    worker.tell()
    worker.deliveries.serves = False
    assert worker.tell() == set()
    assert worker.server.prefixes == {}
    worker.broker.end_lease("w.1")
    worker.deliveries.serves = True
    assert worker.tell() == set(), "its life is over"


def test_who_takes_no_tasks_withdraws_much_at_once(worker: Worker) -> None:
    worker.marks = MARKS
    assert worker.tell(2) == set(MARKS)
    worker.deliveries.serves = False
    assert worker.tell() == set()
    worker.deliveries.serves = True
    assert worker.tell(2) == set(MARKS)
