"""A device that is lost for good: nobody waits for it, and nobody is asked to pay for it one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from engine.engine import check_alive
from engine.errors import DeviceLostError, EngineError
from engine.execution.loop import StepLoop
from engine.plan import StepPlan
from engine.scheduling.scheduler import Scheduler
from tests.engine.execution.test_loop import overlap, steps
from tests.engine.execution.test_shrink import scheduler
from tests.engine.looping import PATIENCE, Listener, Steps, request, submitted, waited

__all__ = ["overlap", "scheduler", "steps"]

CUDA = torch.device("cuda", 0)


class Device:
    """Lost from its third step on."""

    def __init__(self, steps: Steps) -> None:
        self.lost = False
        self.failures = 0
        self._steps = steps
        steps.before = self.run

    def run(self, plan: StepPlan) -> None:
        self.lost = len(self._steps.plans) >= 3
        if self.lost:
            self.failures += 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def check(self) -> None:
        if self.lost:
            raise DeviceLostError("the device does nothing more for this process")


@pytest.fixture
def died() -> Iterator[list[type[BaseException]]]:
    """What threads ended with."""
    found: list[type[BaseException]] = []
    hook, threading.excepthook = threading.excepthook, lambda args: found.append(args.exc_type)
    yield found
    threading.excepthook = hook


def test_all_unfinished_requests_get_an_event_and_the_thread_ends(
    steps: Steps, scheduler: Scheduler, overlap: int, died: list[type[BaseException]]
) -> None:
    device, all_in = Device(steps), threading.Event()
    loop = StepLoop(scheduler, steps, lambda: waited(all_in), overlap=overlap, check=device.check)
    heard = submitted(loop, 3, length=30, max_tokens=20)
    all_in.set()
    for listener in heard:
        last = listener.wait().events[-1]
        assert last.finish_reason == "error"
        assert last.error is not None
        assert last.error.startswith("the engine failed: DeviceLostError: the device does nothing more")
    loop._thread.join(PATIENCE)
    assert died == [DeviceLostError]
    assert not loop._thread.is_alive()
    # At most the step that had been launched ahead: nothing was tried row by row.
    assert device.failures <= 1 + overlap
    with pytest.raises(EngineError, match="closed"):
        loop.submit(request("3"), Listener())
    loop.close()
    scheduler.check_integrity()
    assert scheduler.stats().kv_blocks_used == 0


def test_on_lost_gets_the_requests_of_the_step(
    steps: Steps, scheduler: Scheduler, overlap: int, died: list[type[BaseException]]
) -> None:
    """And they are told nothing: no request has failed."""
    told: list[tuple[str, set[str]]] = []

    def check() -> None:
        raise DeviceLostError("lost")

    def before(plan: StepPlan) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    steps.before, all_in = before, threading.Event()
    loop = StepLoop(scheduler, steps, lambda: waited(all_in), overlap=overlap, check=check)
    loop.on_lost = lambda why, suspects: told.append((why, suspects))
    heard = submitted(loop, 3)
    all_in.set()
    loop._thread.join(PATIENCE)
    (why, suspects) = told[0]
    assert why == "DeviceLostError: lost"
    assert suspects
    assert suspects <= {"0", "1", "2"}
    assert [listener.events for listener in heard] == [[], [], []]
    assert died == []
    loop.close()


def test_a_row_that_loses_the_device_when_it_runs_alone_is_the_last(
    steps: Steps, scheduler: Scheduler, overlap: int, died: list[type[BaseException]]
) -> None:
    lost = False

    def before(plan: StepPlan) -> None:
        nonlocal lost
        lost |= len(plan.rows) == 1 and plan.rows[0].seq.request.id == "1"
        raise RuntimeError("CUDA error: unspecified launch failure")

    def check() -> None:
        if lost:
            raise DeviceLostError("lost")

    steps.before, all_in = before, threading.Event()
    loop = StepLoop(scheduler, steps, lambda: waited(all_in), overlap=overlap, check=check)
    heard = submitted(loop, 3)
    all_in.set()
    errors = [listener.wait().events[-1].error or "" for listener in heard]
    # Also of the first, whose own failure was never told.
    assert all(error.startswith("the engine failed: DeviceLostError") for error in errors)
    loop.close()
    assert died == [DeviceLostError]


@pytest.mark.parametrize(("told", "lost"), [(0, False), (1, False), (2, True)])
def test_an_error_that_repeats_means_a_lost_device(monkeypatch: pytest.MonkeyPatch, told: int, lost: bool) -> None:
    left = told

    def synchronize(device: torch.device) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise RuntimeError("CUDA error: device-side assert triggered\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    check_alive(torch.device("cpu"))
    if lost:
        with pytest.raises(
            DeviceLostError, match=r"cuda:0 does nothing more .*: RuntimeError: CUDA error: device-side"
        ):
            check_alive(CUDA)
    else:
        check_alive(CUDA)
