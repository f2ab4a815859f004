"""Times the steps of an engine while requests decode together."""

from __future__ import annotations

import time
from typing import Any

from engine import Engine, Event
from engine.bench.load import Arrival, serve
from engine.bench.offline import Job


class Steps:
    """Runs requests at once, and records the end of each step in which all of them decode."""

    def __init__(self, engine: Engine, batch: int, output: int, stages: int = 1) -> None:
        """`stages`: of the model, each of which has a part of the requests in a step of its own."""
        self._engine, self._batch, self._output, self._stages = engine, batch, output, stages
        self._made = [0] * batch
        self._ends: list[tuple[float, int, int]] = []
        self.on_step: Any = None

    @property
    def decoding(self) -> bool:
        """Whether all requests are decoding now. Call it on the engine's thread."""
        return min(self._made) > 0 and max(self._made) < self._output

    def run(self, jobs: list[Job]) -> None:
        self._engine.on_step = self._ended
        try:
            plan = [Arrival(0.0, prompt, output) for prompt, output in jobs]
            serve(self._engine, plan, f"step-{id(self)}", self._heard)
        finally:
            self._engine.on_step = None

    def _heard(self, i: int, event: Event) -> None:
        self._made[i] += len(event.token_ids)

    def _ended(self) -> None:
        self._ends.append((time.perf_counter(), sum(self._made), self.decoding))
        if self.on_step is not None:
            self.on_step()

    def whole(self) -> tuple[list[float], list[float]]:
        """For each step, or as many as there are stages, in which every request made a token: its seconds, and the mean
        number of tokens made by then."""
        spans, made = [], []
        for (began, before, whole), (ended, after, _) in zip(self._ends, self._ends[self._stages :], strict=False):
            if whole and after - before == self._batch:
                spans.append(ended - began)
                made.append(after / self._batch)
        if not spans:
            raise RuntimeError("there was no step in which all decoded")
        return spans, made
