"""Random histories with steps planned while others run, against an executor that does them in the order of launches."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from engine.execution.pipeline import Pipeline
from engine.plan import Sampled, StepPlan
from engine.scheduling.scheduler import Scheduler
from engine.sequence import UNKNOWN, Sequence
from tests.engine.paged_model import PagedModel
from tests.engine.test_scheduler_histories import WORLDS, Histories, run_in
from tests.exhaustive import few
from tests.histories import examples

CLOCK = SimpleNamespace(now=0.0, monotonic=lambda: CLOCK.now)


@dataclass
class Trouble:
    how: str
    """"logits", "launch" or "collect"."""
    culprit: Sequence | None
    """Every step with it fails; without one, the next step fails and its repetition does not."""
    memory: bool = False
    """For want of memory."""


class DeviceFault(Exception):
    pass


class OutOfMemory(DeviceFault):
    pass


@dataclass
class Launched:
    plan: StepPlan
    sampled: list[Sampled]
    written: list[tuple[int, int, int]]
    """(KV group, block, offset)."""


class Device(PagedModel):
    """Works launches off at once, in order, as a device would; what they sampled is told when they are collected."""

    def __init__(self, scheduler: Scheduler, machine: type[Overlapping]) -> None:
        super().__init__(machine.spaces, machine.block_size, machine.switch, copies_at_once=machine.caching)
        self.overlap = machine.overlap
        self.scheduler = scheduler
        self.trouble: Trouble | None = None
        self.queue: deque[Launched] = deque()
        self.ahead = 0
        """Steps that were launched before the results of the one before them were known."""
        self.last: dict[int, tuple[Sequence, int]] = {}
        """What was sampled last in each slot, and for whom."""
        self.wrong: Exception | None = None
        """What no plan may have; the pipeline takes it for a fault of the device."""

    def launch(self, plan: StepPlan) -> Launched:
        try:
            return self.begin(plan)
        except Exception as error:
            if not isinstance(error, DeviceFault):
                self.wrong = error
            raise

    def begin(self, plan: StepPlan) -> Launched:
        self.scheduler.check_integrity()
        assert len(self.queue) <= self.overlap
        self.ahead += len(self.queue)
        assert plan.copies == []
        pending = [row.seq for row in plan.rows if row.pending]
        for row in plan.rows:
            assert (row.seq.tokens[-1] == UNKNOWN) == row.pending
            assert UNKNOWN not in row.seq.tokens[:-1]
        for seq in pending:
            owner, token = self.last[seq.slot]
            assert self.queue
            assert owner is seq, "the token in a slot is another's"
            assert not self.needs_token(seq)
            seq.tokens[-1] = token
        written = [
            (g, *self.place(row.seq, g, i))
            for row in plan.rows
            for i in range(row.start, row.start + row.count)
            for g in range(len(self.groups))
        ]
        launched = Launched(plan, self.execute(plan), written)
        for row, one in zip((row for row in plan.rows if row.samples), launched.sampled, strict=True):
            self.last[row.seq.slot] = row.seq, [one, *one.then][-1].token_id
        for seq in pending:
            seq.tokens[-1] = UNKNOWN
        self.meet_trouble("launch", launched)
        self.spoil_logits(launched)
        self.queue.append(launched)
        return launched

    def collect(self, launched: Launched) -> list[Sampled]:
        assert launched is self.queue.popleft()
        self.meet_trouble("collect", launched)
        return launched.sampled

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        self.copy(copies)

    def needs_token(self, sequence: Sequence) -> bool:
        return sequence.seed == 3

    def forget(self) -> None:
        assert not self.queue
        self.last.clear()

    def meet_trouble(self, how: str, launched: Launched) -> None:
        trouble = self.trouble
        if trouble is None or trouble.how != how:
            return
        if trouble.culprit is None:
            self.trouble = None
        elif trouble.culprit not in [row.seq for row in launched.plan.rows]:
            return
        for g, block, offset in launched.written:
            self.groups[g][block][offset] = b"ruined!!"
        raise (OutOfMemory if trouble.memory else DeviceFault)(how)

    def spoil_logits(self, launched: Launched) -> None:
        if self.trouble is not None and self.trouble.how == "logits":
            sampling = [row.seq for row in launched.plan.rows if row.samples]
            if self.trouble.culprit in sampling:
                launched.sampled[sampling.index(self.trouble.culprit)] = Sampled(-1, error="not finite")
                self.trouble = None


class Overlapping(Histories):
    overlap = 1

    def build(self, agreement: float | None) -> None:
        super().build(agreement)
        self.pipeline = Pipeline(
            self.scheduler,
            self.model,
            threading.Lock(),
            self.take,
            self.overlap,
            release=lambda error: isinstance(error, OutOfMemory),
        )

    def needs_token(self, seq: Sequence) -> bool:
        return Device.needs_token(self.model, seq)

    def make_model(self) -> PagedModel:
        return Device(self.scheduler, type(self))

    def step(self) -> bool:
        CLOCK.now = self.now
        work = self.scheduler.has_work or self.pipeline.in_flight
        steps = self.scheduler.stats().steps
        assert self.pipeline.step() == work
        if self.model.wrong is not None:
            raise self.model.wrong
        # With steps in flight at most one more is entered, and only where its results were not planned upon.
        assert self.scheduler.stats().steps - steps <= self.overlap + 1
        return work

    @rule(
        data=st.data(),
        how=st.sampled_from(["logits", "launch", "collect"]),
        passing=st.booleans(),
        memory=st.sampled_from([False, False, True]),
    )
    def troubled_step(self, data, how, passing, memory):
        """A row fails by its logits or whenever it is computed, or a step fails once and for nobody's fault."""
        culprit = None
        if how == "logits" or not passing:
            running = self.scheduler._planner.running
            if not running:
                return
            culprit = data.draw(st.sampled_from(running))
            self.seen[culprit.request.id].faulty = True
        self.model.trouble = Trouble(how, culprit, memory)
        for _ in range(data.draw(st.integers(1, 4))):
            self.step()
        self.model.trouble = None

    @precondition(lambda self: self.scheduler._planner.running)
    @rule(data=st.data())
    def put_out(self, data):
        """As a lack of blocks would, while a step runs."""
        self.scheduler._planner.preempt(data.draw(st.sampled_from(self.scheduler._planner.running)), self.now)

    def teardown(self):
        super().teardown()
        assert not self.model.queue


class InStep(Overlapping):
    """The pipeline without an overlap."""

    overlap = 0

    def teardown(self):
        super().teardown()
        assert self.model.ahead == 0


class StageDevice(Device):
    def needs_token(self, sequence: Sequence) -> bool:
        return True


class Staged(Overlapping):
    """Four stages, with as many steps in flight."""

    overlap = 3
    hurry: ClassVar[dict[str, object]] = {"batches": 4}

    def make_model(self) -> PagedModel:
        return StageDevice(self.scheduler, type(self))


AHEAD = [(Overlapping, world) for world in WORLDS if "hurry" not in world]


@pytest.mark.parametrize(
    ("machine", "world"),
    few(
        [*AHEAD, (InStep, "plain"), *((Staged, world) for world in WORLDS if "hurry" not in world)],
        (Overlapping, "tight"),
        (Overlapping, "window"),
        (Overlapping, "switch"),
        (Staged, "runs"),
    ),
)
def test_every_history_gives_the_tokens_of_an_undisturbed_run(machine, world, monkeypatch):
    monkeypatch.setattr("engine.execution.pipeline.time", CLOCK)
    run_in(world, machine, examples(10, 30))
