"""A stand-in for the model under a step loop, and who listens to the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from engine.engine import Engine
from engine.execution.loop import StepLoop
from engine.params import SamplingParams
from engine.plan import Sampled, StepPlan
from engine.request import Event, Request
from engine.sequence import Sequence

#: Seconds after which a wait is for ever: a machine with much else to do may stop a thread for many.
PATIENCE = 60.0


class Steps:
    """An executor whose tokens count up from the prompt's last.

    `before` may hold a step up or fail it: as it is launched or, if that is `late`, as it is collected.
    """

    def __init__(self, late: bool) -> None:
        self.late = late
        self.before: Callable[[StepPlan], None] = lambda plan: None
        self.spoil: Callable[[StepPlan, list[Sampled]], list[Sampled]] = lambda plan, found: found
        self.plans: list[list[str]] = []
        self.copied: list[tuple[int, int, int]] = []
        self.ahead = 0
        """Launched and not collected."""
        self.most_ahead = 0
        self._last: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> tuple[StepPlan, list[Sampled]]:
        assert plan.copies == []
        if not self.late:
            self._begin(plan)
        found = []
        for row in plan.rows:
            before = self._last[row.seq.slot] if row.pending else row.seq.tokens[-1]
            if row.samples:
                self._last[row.seq.slot] = before + 1
                found.append(Sampled(before + 1))
        self.ahead += 1
        self.most_ahead = max(self.most_ahead, self.ahead)
        return plan, found

    def collect(self, launched: tuple[StepPlan, list[Sampled]]) -> list[Sampled]:
        self.ahead -= 1
        if self.late:
            self._begin(launched[0])
        return self.spoil(*launched)

    def _begin(self, plan: StepPlan) -> None:
        self.plans.append([row.seq.request.id for row in plan.rows])
        self.before(plan)

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        self.copied += copies

    def needs_token(self, sequence: Sequence) -> bool:
        return False

    def forget(self) -> None:
        pass


class Listener:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.done = threading.Event()
        self.heard = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self.heard.set()
        if event.done:
            self.done.set()

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    def wait(self) -> Listener:
        assert self.done.wait(PATIENCE), "the request did not end"
        return self


class Gate:
    """Holds one step up until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE)

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE), "no step began"

    def open(self) -> None:
        self._open.set()


def waited(event: threading.Event) -> None:
    assert event.wait(PATIENCE)


def until(holds: Callable[[], bool]) -> None:
    """Wait for what tells nobody that it has come."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < PATIENCE, "it did not come"
        time.sleep(0.001)


def together(engine: Engine, requests: int) -> None:
    """Let the engine take nobody in before so many are there: else the first may have ended before the last comes."""

    def read() -> bool:
        until(lambda: len(engine._tickets) >= requests)
        del engine._read_notes  # the class's own stands again
        return engine._read_notes()

    engine._read_notes = read


def submitted(loop: StepLoop, count: int, **how: Any) -> list[Listener]:
    """Requests "0", "1", ... whose tokens count up from 1, 101, 201, ..."""
    heard = [Listener() for _ in range(count)]
    for i, listener in enumerate(heard):
        loop.submit(request(str(i), first=100 * i, **how), listener)
    return heard


def request(name: str, first: int = 10, length: int = 3, max_tokens: int = 4, **params: Any) -> Request:
    return Request(name, [first] * length, SamplingParams(max_tokens=max_tokens, **params))
