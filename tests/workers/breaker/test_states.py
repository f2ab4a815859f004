"""The breaker's states, without a worker: its clock, and the answers of its probes, are the tests' own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import NOT_FINITE, EngineError
from workers import breaker as module
from workers.breaker import FIRST_S, GIVE_UP, IN_A_ROW, MOST_S, Breaker, Figures, State, Window


class Bench:
    """A breaker, and what it asked for: `due` are its timers (s, action), `asked` the probes without an answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.asked: list[Callable[[str | None], None]] = []
        self.given_up: list[str] = []
        self.rooms: list[int | None] = []
        self.window = Window("m", lambda: self.now)
        self.breaker = Breaker(self.window, self, self.asked.append, self.given_up.append, **fields)  # type: ignore[arg-type]
        self.breaker.on_change = lambda: self.rooms.append(self.breaker.room)

    def later(self, delay: float, action: Callable[[], None]) -> None:
        self.due.append((delay, action))

    def probe(self, answer: str | None) -> float:
        """The next probe is due, and is answered so. Returns for how long it was waited."""
        delay, action = self.due.pop(0)
        self.now += delay
        action()
        self.asked.pop()(answer)
        return delay

    def probe_slowly(self) -> None:
        """The next probe is due, and answers, after ten times as long as peers take."""
        self.breaker.peers = [Figures("m", steps={(1, 5): (100, 0.01)})] * 2
        self.due.pop(0)[1]()
        self.window._slices[-1].steps[1, 5] = [16, 16 * 0.1]
        self.asked.pop()(None)

    def fail(self, times: int = IN_A_ROW) -> list[bool]:
        return [self.breaker.failed() for _ in range(times)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_the_slow_part_of_an_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, explain=lambda: "the others wait for rank 1 of 2")
    assert bench.breaker.outlier() == ""
    monkeypatch.setattr(module, "judge", lambda mine, peers: "its decode steps take long")
    assert bench.breaker.outlier() == "its decode steps take long; the others wait for rank 1 of 2"


def test_failures_in_a_row_are_the_requests_if_the_probe_passes(bench: Bench) -> None:
    assert bench.fail(2) == [False, False]
    bench.breaker.completed()
    assert bench.fail() == [False, False, True], "the last one is tried elsewhere"
    assert bench.breaker.state is State.ASKING
    assert bench.probe(None) == 0.0
    assert bench.breaker.closed
    assert bench.rooms == [0, None]
    assert not any(bench.fail(20)), "it was just asked: the tries are spent"
    assert bench.breaker.openings == 0


def test_it_opens_for_longer_each_time_and_gives_up(bench: Bench) -> None:
    bench.fail()
    waited = [bench.probe("broken") for _ in range(GIVE_UP)]
    assert waited == [0.0, *(FIRST_S * 2**k for k in range(GIVE_UP - 1))]
    assert "5 probes in a row: broken" in bench.given_up[0]
    assert bench.breaker.openings == 1


def test_a_model_that_gives_nan_is_given_up_at_once(bench: Bench) -> None:
    bench.fail()
    bench.probe(NOT_FINITE)
    assert NOT_FINITE in bench.given_up[0]


def test_one_task_proves_it(bench: Bench) -> None:
    bench.fail()
    bench.probe("broken")
    bench.probe(None)
    assert (bench.breaker.state, bench.breaker.room) == (State.HALF_OPEN, 1)
    assert bench.fail(1) == [True]
    assert bench.breaker.state is State.OPEN
    assert bench.probe(None) == 2 * FIRST_S
    bench.breaker.completed()
    assert bench.breaker.closed
    assert bench.breaker.reason == ""


def test_an_outlier_that_nobody_needs_is_closed_at_last(bench: Bench) -> None:
    bench.breaker.open("it is slow")
    assert bench.breaker.reason == "its breaker is open: it is slow"
    bench.probe(None)
    bench.breaker.on_idle()
    assert not bench.breaker.closed
    bench.now += module.TRIAL_S
    bench.breaker.on_idle()
    assert bench.breaker.closed


def test_openings_are_forgotten_in_time(bench: Bench) -> None:
    for _ in range(9):
        bench.breaker.open("it is slow")
        waited = bench.probe(None)
        bench.breaker.completed()
    assert waited == MOST_S
    bench.now += 20 * module.FORGET_S
    bench.breaker.open("it is slow")
    assert bench.probe(None) == FIRST_S


def test_a_worker_that_is_slow_for_days_is_asked_on_and_forgives_as_soon(bench: Bench) -> None:
    bench.breaker.open("it is slow")
    for _ in range(1100):
        bench.now += MOST_S
        bench.probe_slowly()
    assert [delay for delay, _ in bench.due] == [MOST_S]
    bench.breaker.refused()
    bench.now += module.LONGEST_STREAK * module.FORGET_S
    bench.breaker.open("it is slow")
    assert bench.due[-1][0] == FIRST_S


def test_who_is_refused_serves_and_its_old_probe_is_void(bench: Bench) -> None:
    bench.breaker.open("it is slow")
    bench.breaker.refused()
    assert bench.breaker.closed
    bench.breaker.open("it is slow")
    _, old = bench.due.pop(0)
    old()
    assert not bench.asked


def test_a_probe_that_is_slow_keeps_it_open(bench: Bench) -> None:
    bench.breaker.open("it is slow")
    bench.now += FIRST_S
    bench.probe_slowly()
    assert bench.breaker.state is State.OPEN
    assert "10.0 times" in bench.breaker.why


def test_switched_off_it_never_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, enabled=False)
    assert not any(bench.fail(20))
    assert bench.breaker.failures == 20
    assert bench.breaker.outlier() == ""


def test_a_probe_that_the_engine_does_not_take_is_sent_later(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    def busy(_: object) -> None:
        raise EngineError("the probe before has not ended")

    with monkeypatch.context() as patch:
        patch.setattr(bench.breaker, "_send_probe", busy)
        bench.fail()
        bench.due.pop(0)[1]()
    assert bench.breaker.state is State.ASKING
    assert bench.probe(None) == FIRST_S
    assert bench.breaker.closed
