"""The step loop with a stand-in for the model that fails: whom a fault is told to, and that nobody else feels it."""

from __future__ import annotations

import threading

import pytest

from engine.execution.loop import StepLoop
from engine.kv import KvSpace
from engine.plan import Sampled, StepPlan
from engine.request import Event, Request
from engine.scheduling.scheduler import Scheduler
from tests.engine.execution.test_loop import loop, overlap, scheduler, steps
from tests.engine.looping import Gate, Listener, Steps, request, waited
from tests.engine.stepping import made

__all__ = ["loop", "overlap", "scheduler", "steps"]  # fixtures


@pytest.mark.parametrize("length", [3, 30])
def test_a_fault_fails_the_request_that_caused_it_alone(
    loop: StepLoop, steps: Steps, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    """Also when the culprit is in the middle of its prompt and samples nothing."""

    def fail(plan: StepPlan) -> None:
        if any(row.seq.request.id == "culprit" for row in plan.rows):
            raise ZeroDivisionError("bad\nday")

    gate = steps.before = Gate()
    loop.submit(request("first", max_tokens=8), first := Listener())
    gate.wait()
    loop.submit(request("culprit", length=length), culprit := Listener())
    loop.submit(request("last"), last := Listener())
    steps.before = fail
    gate.open()
    assert first.wait().tokens == [11, 12, 13, 14, 15, 16, 17, 18]
    assert last.wait().tokens == [11, 12, 13, 14]
    assert [event.finish_reason for event in culprit.wait().events] == ["error"]
    assert culprit.events[0].error == "the model failed on this request: ZeroDivisionError: bad"
    assert "run in halves" in caplog.text


@pytest.mark.parametrize("culprits", [{0}, {31}, {17}, {3, 30}, set(range(32))])
def test_it_takes_few_steps_to_find_them(culprits: set[int]) -> None:
    """Among 32: five halvings each, and no row of the others is computed anew."""
    scheduler = made(spaces=[KvSpace(256)], block_size=4, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=64)
    steps, all_in = Steps(late=False), threading.Event()
    sizes: list[int] = []

    def fail(plan: StepPlan) -> None:
        sizes.append(len(plan.rows))
        if any(int(row.seq.request.id) in culprits for row in plan.rows):
            raise ZeroDivisionError

    steps.before = fail
    loop = StepLoop(scheduler, steps, lambda: waited(all_in))
    heard = [Listener() for _ in range(32)]
    for k, listener in enumerate(heard):
        loop.submit(request(str(k), first=40 * k, max_tokens=1), listener)
    all_in.set()
    for k, listener in enumerate(heard):
        assert listener.wait().events[-1].finish_reason == ("error" if k in culprits else "length")
    loop.close()
    assert sizes[0] == 32
    assert len(sizes) <= 1 + min(10 * len(culprits), 62)
    assert scheduler.stats().kv_blocks_used == 0


def test_copies_of_a_failed_step_are_made_before_its_rows_run_alone(loop: StepLoop, steps: Steps) -> None:
    def fail_together(plan: StepPlan) -> None:
        if len(plan.rows) > 1:
            raise ZeroDivisionError

    steps.before = fail_together
    loop.submit(request("a", length=6, n=2), heard := Listener())
    heard.wait()
    assert len(steps.copied) == 1


def test_a_row_that_the_model_gives_up_fails_alone(loop: StepLoop, steps: Steps) -> None:
    def spoil(plan: StepPlan, found: list[Sampled]) -> list[Sampled]:
        sampling = [row for row in plan.rows if row.samples]
        return [
            Sampled(-1, error="not finite") if row.seq.request.id == "bad" else one
            for row, one in zip(sampling, found, strict=True)
        ]

    steps.spoil = spoil
    loop.submit(request("good"), good := Listener())
    loop.submit(request("bad"), bad := Listener())
    assert good.wait().tokens == [11, 12, 13, 14]
    assert (bad.wait().events[0].finish_reason, bad.events[0].error) == ("error", "not finite")


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_fault_of_the_engine_itself_ends_what_is_in_and_the_loop_goes_on(
    loop: StepLoop,
    scheduler: Scheduler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[BaseException],
) -> None:
    def broken(*args: object) -> list[Event]:
        raise kind("upside down")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "update", broken)
        loop.submit(request("a"), heard := Listener())
        assert heard.wait().events[0].error == f"the engine failed: {kind.__name__}: upside down"
    loop.submit(request("b"), after := Listener())
    assert after.wait().tokens == [11, 12, 13, 14]
    assert "a step failed as a whole" in caplog.text


def test_a_request_that_cannot_be_taken_in_fails_alone(
    loop: StepLoop, scheduler: Scheduler, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = scheduler.add

    def add(one: Request) -> list[Event]:
        if one.id == "bad":
            raise RuntimeError("torn")
        return plain(one)

    monkeypatch.setattr(scheduler, "add", add)
    loop.submit(request("good"), good := Listener())
    loop.submit(request("bad"), bad := Listener())
    assert good.wait().tokens == [11, 12, 13, 14]
    assert [event.finish_reason for event in bad.wait().events] == ["error"]
    assert "torn" in (bad.events[0].error or "")
