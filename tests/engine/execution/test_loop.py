"""The step loop with a stand-in for the model: who hears what, whatever fails, aborts or closes meanwhile."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest

from engine.errors import EngineError, RequestError
from engine.execution.loop import StepLoop
from engine.kv import KvSpace
from engine.plan import StepPlan
from engine.request import Event
from engine.scheduling.scheduler import Scheduler
from tests.engine.looping import PATIENCE, Gate, Listener, Steps, request, until, waited
from tests.engine.stepping import made


@pytest.fixture(params=[0, 1], ids=["synchronous", "overlapping"])
def overlap(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture(params=[False, True], ids=["at-launch", "when-collected"])
def steps(request: pytest.FixtureRequest) -> Steps:
    return Steps(late=request.param)


@pytest.fixture
def scheduler() -> Scheduler:
    return made(spaces=[KvSpace(32)], block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)


@pytest.fixture
def loop(steps: Steps, scheduler: Scheduler, overlap: int) -> Iterator[StepLoop]:
    made = StepLoop(scheduler, steps, lambda: None, overlap=overlap)
    yield made
    made.close()
    assert steps.ahead == 0
    assert steps.most_ahead <= 1 + overlap
    scheduler.check_integrity()
    assert scheduler.stats().kv_blocks_used == 0


def test_refusals_come_in_the_callers_thread_and_leave_nothing(loop: StepLoop) -> None:
    with pytest.raises(RequestError, match="context"):
        loop.submit(request("long", length=70), Listener())
    heard = Listener()
    loop.submit(request("long"), heard)
    heard.wait()


def test_an_id_in_use_is_refused_until_its_request_has_ended(loop: StepLoop, steps: Steps) -> None:
    gate = steps.before = Gate()
    first, second = Listener(), Listener()
    loop.submit(request("a"), first)
    gate.wait()
    with pytest.raises(RequestError, match="in use"):
        loop.submit(request("a"), second)
    gate.open()
    first.wait()
    loop.submit(request("a", first=50), second)
    assert second.wait().tokens == [51, 52, 53, 54]


def test_an_abort_during_a_step_frees_its_blocks_before_the_next_is_planned(
    loop: StepLoop, steps: Steps, scheduler: Scheduler, overlap: int
) -> None:
    """With an overlap, one step of it may have been planned already."""
    used: list[int] = []
    gate = Gate()

    def before(plan: StepPlan) -> None:
        used.append(scheduler.stats().kv_blocks_used)
        if len(used) == 2:
            gate(plan)

    steps.before = before
    large, small = Listener(), Listener()
    with loop._wake:  # both are there before the first step
        loop.submit(request("large", length=15, max_tokens=40), large)
        loop.submit(request("small", length=1, max_tokens=30), small)
    gate.wait()
    assert loop.abort("large")
    assert not loop.abort("large")
    told = len(large.events)
    gate.open()
    small.wait()
    assert (len(large.events), loop.stats().aborted) == (told, 1)
    assert used[1] >= 5, "15 tokens in blocks of 4, and those of the small one"
    for step, blocks in enumerate(used[2 + overlap :], 2 + overlap):
        assert blocks <= 1 + (1 + step) // 4 + overlap


def test_an_abort_during_the_last_step_is_an_abort(loop: StepLoop, steps: Steps) -> None:
    """The step's result ends the old request while its id already belongs to a new one."""
    gate = steps.before = Gate()
    old, new = Listener(), Listener()
    loop.submit(request("a", max_tokens=1), old)
    gate.wait()
    loop.abort("a")
    loop.submit(request("a", first=50), new)
    with pytest.raises(RequestError, match="in use"):
        loop.submit(request("a"), Listener())
    steps.before = lambda plan: None
    gate.open()
    assert new.wait().tokens == [51, 52, 53, 54]
    assert old.events == []


def test_a_request_aborted_before_it_was_taken_in_never_runs(loop: StepLoop, steps: Steps) -> None:
    gate = steps.before = Gate()
    loop.submit(request("first"), first := Listener())
    gate.wait()
    loop.submit(request("a"), heard := Listener())
    loop.abort("a")
    gate.open()
    first.wait()
    assert heard.events == []
    assert not any("a" in plan for plan in steps.plans)


def test_abort_from_within_an_event_ends_the_events(loop: StepLoop) -> None:
    heard: list[Event] = []
    other = Listener()

    def on_event(event: Event) -> None:
        heard.append(event)
        loop.abort("a")

    loop.submit(request("a", max_tokens=30), on_event)
    loop.submit(request("b", max_tokens=10), other)
    other.wait()
    assert len(heard) == 1


def test_a_listener_that_raises_stops_nothing(loop: StepLoop, caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Event) -> None:
        raise ValueError("deaf")

    loop.submit(request("a"), broken)
    loop.submit(request("b"), heard := Listener())
    assert heard.wait().tokens == [11, 12, 13, 14]
    assert "on_event of request 'a' raised" in caplog.text


def test_on_step_comes_after_all_events_of_the_step(loop: StepLoop, caplog: pytest.LogCaptureFixture) -> None:
    order: list[str] = []
    ended = threading.Event()

    def on_step() -> None:
        order.append("step")
        if order.count("b") == 4:
            ended.set()
        raise ValueError("late")

    loop.on_step = on_step
    loop.submit(request("a"), lambda event: order.append("a"))
    loop.submit(request("b"), lambda event: order.append("b"))
    assert ended.wait(PATIENCE)
    # Whether b was in time for a's first step or not, no step ends between two events of one plan.
    assert re.fullmatch("(as|bs|abs)+", "".join(name[0] for name in order))
    assert "on_step raised" in caplog.text


def test_what_ends_as_it_is_taken_in_ends_a_step_too(loop: StepLoop, steps: Steps) -> None:
    """Else whoever waits for steps to look at events would not look."""
    told = threading.Event()
    loop.on_step = told.set
    loop.submit(request("a", max_tokens=0, n=2), heard := Listener())
    assert told.wait(PATIENCE)
    assert [event.finish_reason for event in heard.wait().events] == ["length", "length"]
    assert steps.plans == []


def test_closing_ends_what_is_in_with_abort(steps: Steps, scheduler: Scheduler, overlap: int) -> None:
    loop = StepLoop(scheduler, steps, lambda: None, overlap=overlap)
    gate = steps.before = Gate()
    loop.submit(request("running", max_tokens=20, n=2), running := Listener())
    gate.wait()
    loop.submit(request("waiting"), waiting := Listener())
    closer = threading.Thread(target=loop.close)
    closer.start()
    # Let go before it is told to close, the loop would run both to their ends.
    until(lambda: loop._closing)
    gate.open()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    for heard in (running.wait(), waiting.wait()):
        assert heard.events[-1].finish_reason == "abort"
    assert loop.stats().kv_blocks_used == 0
    with pytest.raises(EngineError, match="closed"):
        loop.submit(request("late"), Listener())
    loop.close()


def test_closing_from_within_an_event_does_not_wait_for_itself(
    steps: Steps, scheduler: Scheduler, overlap: int
) -> None:
    loop = StepLoop(scheduler, steps, lambda: None, overlap=overlap)
    heard = Listener()

    def on_event(event: Event) -> None:
        heard(event)
        loop.close()

    loop.submit(request("a", max_tokens=30), on_event)
    assert heard.wait().events[-1].finish_reason == "abort"
    loop.close()
    # A step that was running then is told to its end.
    assert heard.tokens == [11, 12][: 1 + overlap]


def test_an_idle_loop_has_nothing_in_flight(
    loop: StepLoop, scheduler: Scheduler, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last step that was planned held nobody any more."""
    looked = threading.Event()
    ahead: list[int] = []

    def check_idle() -> None:
        ahead.append(steps.ahead)
        if steps.plans:
            looked.set()

    monkeypatch.setattr(scheduler, "check_idle", check_idle)
    loop.submit(request("a", stop_token_ids=[12], max_tokens=9), heard := Listener())
    assert heard.wait().tokens == [11, 12]
    assert looked.wait(PATIENCE)
    assert set(ahead) == {0}


def test_an_idle_loop_notices_a_pool_that_is_not_whole(
    loop: StepLoop, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = threading.Event()

    def check_idle() -> None:
        looked.set()
        raise EngineError("2 blocks are held")

    monkeypatch.setattr(scheduler, "check_idle", check_idle)
    loop.submit(request("a"), heard := Listener())
    heard.wait()
    assert looked.wait(PATIENCE)
    loop.submit(request("b"), heard := Listener())
    heard.wait()
    assert "not whole" in caplog.text


def test_what_is_done_while_nothing_runs_ends_by_itself_and_holds_nobody_up(steps: Steps, scheduler: Scheduler) -> None:
    left, begun, go_on = [3], threading.Event(), threading.Event()

    def idle() -> bool:
        begun.set()
        waited(go_on)
        left[0] -= 1
        return left[0] > 0

    loop, heard = StepLoop(scheduler, steps, lambda: None, on_idle=idle), Listener()
    waited(begun)
    loop.submit(request("a"), heard)
    assert steps.plans == []
    go_on.set()
    heard.wait()
    until(lambda: left[0] == 0)
    loop.close()
    assert left == [0]


def test_a_fault_of_what_is_done_while_nothing_runs_ends_that_alone(steps: Steps, scheduler: Scheduler) -> None:
    calls: list[int] = []

    def idle() -> bool:
        calls.append(1)
        raise RuntimeError("no capture today")

    loop, heard = StepLoop(scheduler, steps, lambda: None, on_idle=idle), Listener()
    until(lambda: calls != [])
    loop.submit(request("a"), heard)
    assert heard.wait().tokens == [11, 12, 13, 14]
    loop.close()
    assert calls == [1]


def test_a_step_that_waits_for_more_requests_has_them_once_they_came(steps: Steps, scheduler: Scheduler) -> None:
    asked = threading.Event()

    def wait(now: float) -> float:
        asked.set()
        return 0.0 if scheduler.stats().waiting > 1 else PATIENCE

    loop, first, second = StepLoop(scheduler, steps, lambda: None, batching_wait=wait), Listener(), Listener()
    loop.submit(request("a"), first)
    waited(asked)
    assert steps.plans == []
    loop.submit(request("b", first=20), second)
    until(lambda: steps.plans != [])
    assert steps.plans[0] == ["a", "b"]
    loop.close()


def test_a_loop_that_waits_for_more_requests_can_be_closed(steps: Steps, scheduler: Scheduler) -> None:
    loop, heard = StepLoop(scheduler, steps, lambda: None, batching_wait=lambda now: PATIENCE), Listener()
    loop.submit(request("a"), heard)
    loop.close()
    assert heard.wait().events[-1].finish_reason == "abort"
    assert steps.plans == []
