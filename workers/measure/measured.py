"""All that a worker measures of itself while it serves, and the profile that it makes of that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engine.plan import StepWork
from producers.contract.profile import Profile
from workers.measure.duty import Duty
from workers.measure.steps import Knee, StepTimes
from workers.measure.tasks import FirstTokens, TaskSizes


class Measured:
    """`first_token` is called with the time of each task's claim (monotonic) when its first token is published, `work`
    with each step's work on the engine's thread."""

    def __init__(
        self,
        engine: Any,
        first_token: Callable[[float], None] = lambda claimed_at: None,
        work: Callable[[StepWork], None] = lambda work: None,
    ) -> None:
        self._engine = engine
        self._first_token = first_token
        self._work = work
        self._steps = StepTimes()
        self._tasks = TaskSizes()
        self._ttft = FirstTokens()
        self._duty = Duty(time.monotonic())
        self._last: StepWork | None = None

    @property
    def evidence(self) -> tuple[int, int]:
        """Numbers of steps and of ended tasks: what a knee is known from."""
        return self._steps.steps, self._tasks.ended

    def on_step(self) -> None:
        """The engine's thread, after each step."""
        work: StepWork | None = self._engine.last_work
        if work is not None and work is not self._last:
            self._last = work
            self._steps.take(work)
            self._duty.take(work.ended, work.seconds)
            self._work(work)

    def on_first_token(self, claimed_at: float) -> None:
        """A task's first token was published, which was claimed then (monotonic). One thread."""
        now = time.monotonic()
        self._ttft.take(now, now - claimed_at)
        self._first_token(claimed_at)

    def on_end(self, prompt: int, cached: int, generated: int) -> None:
        """A task has ended with so many tokens. One thread."""
        self._tasks.take(prompt, cached, generated)

    def profile(self, cold_start: dict[str, float]) -> Profile:
        """The figures now. `cold_start`: its phases (s). Any thread."""
        now, mix, knee = time.monotonic(), self._tasks.mix, self._knee()
        stepping, _ = self._engine.stepping()
        ttft = self._ttft.p95(now)
        return Profile(
            knee=None if knee is None else float(knee.concurrency),
            reached=float(self._steps.reached) or None,
            tokens_per_s=None if knee is None else round(knee.tokens_per_s, 1),
            tokens_per_task=None if mix is None else round(mix.prompt + mix.generated, 1),
            ttft_p95=None if ttft is None else round(ttft, 4),
            duty=round(self._duty.share(now, stepping), 3),
            kv_capacity=float(self._engine.kv_capacity),
            cold_start=cold_start,
        )

    def _knee(self) -> Knee | None:
        engine, mix = self._engine, self._tasks.mix
        if mix is None:
            return None
        return self._steps.knee(mix, engine.max_num_seqs, engine.kv_tokens_total, engine.step_tokens)
