"""A device that has no memory for a step gets smaller ones, and nobody's tokens are lost by it."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from engine.execution.loop import StepLoop
from engine.kv import KvSpace
from engine.memory import release
from engine.plan import StepPlan
from engine.scheduling.scheduler import Scheduler
from tests.engine.execution.test_loop import overlap, steps
from tests.engine.looping import PATIENCE, Listener, Steps, request, submitted, waited
from tests.engine.stepping import made
from tests.waiting import until

__all__ = ["overlap", "steps"]


@pytest.fixture
def scheduler() -> Scheduler:
    return made(spaces=[KvSpace(64)], block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


@pytest.fixture
def loop(steps: Steps, scheduler: Scheduler, overlap: int) -> Iterator[StepLoop]:
    made = StepLoop(scheduler, steps, lambda: None, overlap=overlap, release=release)
    yield made
    made.close()
    scheduler.check_integrity()
    assert scheduler.stats().kv_blocks_used == 0


def room_for(most: int, seen: list[int]) -> object:
    def before(plan: StepPlan) -> None:
        seen.append(plan.num_tokens)
        if plan.num_tokens > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    return before


def test_steps_become_as_small_as_there_is_memory_for(loop: StepLoop, steps: Steps, scheduler: Scheduler) -> None:
    seen: list[int] = []
    steps.before = room_for(20, seen)
    heard = submitted(loop, 4, length=30, max_tokens=6)
    for i, listener in enumerate(heard):
        assert listener.wait().tokens == [100 * i + 1 + place for place in range(6)]
    stats = loop.stats()
    failed = sum(tokens > 20 for tokens in seen)
    assert stats.out_of_memory >= stats.shrinks >= 2  # 64, 32, 16
    assert failed >= 2
    # From the smallest size on nothing failed.
    assert all(tokens <= 16 for tokens in seen[max(i for i, tokens in enumerate(seen) if tokens > 20) + 1 :])


def test_once_is_enough_where_half_a_step_fits(loop: StepLoop, steps: Steps) -> None:
    seen: list[int] = []
    steps.before = room_for(32, seen)
    heard = submitted(loop, 2, length=40)
    for i, listener in enumerate(heard):
        assert listener.wait().tokens == [100 * i + 1 + place for place in range(4)]
    assert (loop.stats().out_of_memory, loop.stats().shrinks) == (1, 1)


def test_what_fits_not_even_alone_ends_alone(loop: StepLoop, steps: Steps) -> None:
    def before(plan: StepPlan) -> None:
        if any(row.seq.request.id == "large" for row in plan.rows):
            raise torch.OutOfMemoryError("CUDA out of memory")

    steps.before = before
    large, small = Listener(), Listener()
    loop.submit(request("small", first=50, max_tokens=8), small)
    loop.submit(request("large"), large)
    assert small.wait().tokens == list(range(51, 59))
    large.wait()
    assert large.events[-1].finish_reason == "error"
    assert "out of memory" in (large.events[-1].error or "")
    assert loop.stats().shrinks > 0


def no_memory(plan: StepPlan) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_device_without_memory_for_any_sequence_is_lost_if_another_takes_over(
    steps: Steps, scheduler: Scheduler, overlap: int
) -> None:
    all_in, told = threading.Event(), list[tuple[str, set[str]]]()
    steps.before = no_memory
    made = StepLoop(scheduler, steps, lambda: waited(all_in), overlap=overlap, release=release)
    made.on_lost = lambda why, suspects: told.append((why, suspects))
    heard = submitted(made, 3)
    all_in.set()
    made._thread.join(PATIENCE)
    ((why, suspects),) = told
    assert "has no memory for the step of a single sequence" in why
    assert len(suspects) > 1, "none of them more than another"
    assert [listener.events for listener in heard] == [[], [], []], "no request has failed"
    assert scheduler.stats().shrinks > 0, "smaller steps were tried first"
    made.close()


def test_if_no_other_takes_over_each_sequence_fails_alone_and_the_engine_goes_on(loop: StepLoop, steps: Steps) -> None:
    steps.before = no_memory
    heard = submitted(loop, 3)
    assert all("out of memory" in (listener.wait().events[-1].error or "") for listener in heard)
    steps.before = lambda plan: None
    again = Listener()
    loop.submit(request("again", first=7), again)
    assert again.wait().tokens


@pytest.mark.parametrize("between", [True, False])
def test_one_after_the_other_is_enough_unless_somebody_had_memory_between(
    steps: Steps, scheduler: Scheduler, overlap: int, between: bool
) -> None:
    told = list[str]()
    made = StepLoop(scheduler, steps, lambda: None, overlap=overlap, release=release)
    made.on_lost = lambda why, suspects: told.append(why)

    def run(name: str, fails: bool) -> Listener:
        steps.before = no_memory if fails else lambda plan: None
        listener = Listener()
        made.submit(request(name), listener)
        return listener

    assert run("0", True).wait().events[-1].finish_reason == "error"
    if between:
        assert run("1", False).wait().tokens
        assert run("2", True).wait().events[-1].finish_reason == "error"
        made.close()
    else:
        run("2", True)
        made._thread.join(PATIENCE)
    assert bool(told) is not between


@pytest.mark.parametrize("seed", range(6))
def test_whatever_lacks_memory_when_all_tokens_are_right(loop: StepLoop, steps: Steps, seed: int) -> None:
    """Steps fail by chance; whoever is not alone at that loses nothing."""
    dice = random.Random(seed)

    def before(plan: StepPlan) -> None:
        if len(plan.rows) > 1 and dice.random() < 0.4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    steps.before = before
    heard = [Listener() for _ in range(6)]
    with loop._wake:  # all are there before the first step: one that runs to its end alone does not fail
        for i, listener in enumerate(heard):
            loop.submit(request(str(i), first=100 * i, length=dice.randint(1, 30), max_tokens=9), listener)
    for i, listener in enumerate(heard):
        assert listener.wait().tokens == [100 * i + 1 + place for place in range(9)]
    assert loop.stats().shrinks > 0


def test_who_keeps_a_steps_error_keeps_none_of_its_tensors(
    loop: StepLoop, steps: Steps, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    launch, collect, failures = steps.launch, steps.collect, iter(range(4))

    def tensor() -> torch.Tensor:
        found = torch.empty(1)
        made.append(weakref.ref(found))
        return found

    def before(plan: StepPlan) -> None:
        held = tensor()
        if next(failures, None) is not None:
            try:
                raise ValueError(f"of {held.nbytes} bytes")
            except ValueError as cause:
                raise torch.OutOfMemoryError("CUDA out of memory") from cause

    steps.before = before
    # Launches give a tensor, which is held until they are collected.
    monkeypatch.setattr(steps, "launch", lambda plan: (tensor(), launch(plan)))
    monkeypatch.setattr(steps, "collect", lambda launched: collect(launched[1]))
    heard = Listener()
    loop.submit(request("a"), heard)
    heard.wait()
    assert any(record.exc_info for record in caplog.records)
    # The last step's own are let go of after its events have been told.
    until(lambda: all(one() is None for one in made))


def test_another_fault_makes_nothing_smaller(loop: StepLoop, steps: Steps) -> None:
    def before(plan: StepPlan) -> None:
        raise ZeroDivisionError("not a matter of memory")

    steps.before = before
    heard = Listener()
    loop.submit(request("a"), heard)
    heard.wait()
    assert heard.events[-1].finish_reason == "error"
    assert (loop.stats().out_of_memory, loop.stats().shrinks) == (0, 0)


@pytest.mark.parametrize(
    ("error", "lacking"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_a_lack_of_memory_is_known_by_its_kind_or_its_text(error: Exception, lacking: bool) -> None:
    assert release(error) is lacking


def test_no_step_is_made_smaller_than_one_token_for_each_sequence(scheduler: Scheduler) -> None:
    sizes = [(scheduler.shrink(0.0, tried=False), scheduler.step_tokens) for _ in range(8)]
    assert sizes == [(True, 32), (True, 16), (True, 8), (True, 4), *[(False, 4)] * 4]
    assert (scheduler.stats().out_of_memory, scheduler.stats().shrinks) == (8, 4)


def test_who_came_last_waits_and_loses_nothing(scheduler: Scheduler) -> None:
    for i in range(3):
        scheduler.add(request(str(i), first=100 * i, length=10))
    assert scheduler.schedule(0.0) is not None
    assert scheduler.shrink(0.0, tried=False)
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (2, 1, 1)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [(row.seq.request.id, row.start, row.count) for row in plan.rows] == [
        ("0", 0, 10),
        ("1", 0, 10),
        ("2", 0, 10),
    ]
    scheduler.check_integrity()
