"""A machine that is not there: steps and passes take what a test says, drafts are right as often as it says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.plan import ScheduledSeq, StepPlan
from engine.sequence import Sequence as Running
from engine.sequence import Status
from engine.speculate import Speculation
from tests.engine.sampling.sequences import sequence


@dataclass
class Machine:
    """A step of so many tokens takes step(tokens) seconds; a token of a draft of so many sequences one_pass(rows), and
    each of those that had none lately `catching_up` more. `held`: how many times as long a step takes by chance."""

    step: Callable[[int], float]
    one_pass: Callable[[int], float] = lambda rows: 0.0
    catching_up: float = 0.0
    most: int = 5
    held: Callable[[random.Random], float] = lambda source: 1.0
    output: int = 128
    seed: int = 1
    now: float = 0.0
    speculation: Speculation = field(init=False)
    lengths: list[list[int]] = field(default_factory=list)
    """Of each step, the drafts' lengths."""

    def __post_init__(self) -> None:
        self.speculation = Speculation(self, max_tokens=self.most, clock=lambda: self.now)
        self._source = random.Random(self.seed)
        self._held_on_average = sum(self.held(self._source) for _ in range(2000)) / 2000
        self._known: set[int] = set()

    def propose(self, rows: Sequence[ScheduledSeq]) -> list[tuple[int, ...]]:
        fresh = [row.seq.serial for row in rows if row.seq.serial not in self._known]
        self._known.update(fresh)
        took = len(fresh) * self.catching_up
        for place in range(max(row.max_draft for row in rows)):
            took += self.one_pass(sum(row.max_draft > place for row in rows))
        self.now += took * self.held(self._source)
        return [(7,) * row.max_draft for row in rows]

    def forget(self) -> None:
        self._known.clear()

    def serve(self, agreements: Sequence[float]) -> float:
        """Generate for so many sequences at once, of which a guess is right with these chances. Returns how many times
        as fast that was as without drafts, which the same chance would hold up as much."""
        seqs = [running(slot, self.output) for slot in range(len(agreements))]
        chances = {seq.serial: agreement for seq, agreement in zip(seqs, agreements, strict=True)}
        began = self.now
        while live := [seq for seq in seqs if seq.output.count < seq.output.limit]:
            self._step(live, chances)
        plain = self.output * self.step(len(seqs)) * self._held_on_average
        return plain / (self.now - began)

    def _step(self, live: list[Running], chances: dict[int, float]) -> None:
        guessing = self.speculation
        guessing.begin(live)
        plan = StepPlan(num_tokens=len(live))
        plan.rows += [
            ScheduledSeq(seq, len(seq.tokens) - 1, 1, True, max_draft=guessing.draft_limit(seq)) for seq in live
        ]
        took = guessing.propose(plan)
        self.lengths.append([len(row.draft) for row in plan.rows])
        seconds = self.step(plan.num_tokens) * self.held(self._source)
        self.now += seconds
        for row in plan.rows:
            right = 0
            while right < len(row.draft) and self._source.random() < chances[row.seq.serial]:
                right += 1
            if row.max_draft:
                guessing.entered(row, right)
            row.seq.output.count += 1 + right
            row.seq.tokens += [7] * (1 + right)
        guessing.record(plan, seconds, took)


_serials = iter(range(1_000_000, 2_000_000))


def running(slot: int, limit: int) -> Running:
    one = sequence(slot, length=3)
    one.serial = next(_serials)
    one.status = Status.RUNNING
    one.output.limit = limit
    return one


def best(step: Callable[[int], float], one_pass: float, agreement: float, count: int, most: int) -> tuple[int, float]:
    """The length that is best for all of `count` sequences, and how many times as fast as none it is."""
    tokens = [sum(agreement**place for place in range(1 + length)) for length in range(1 + most)]
    rates = [
        tokens[length] * step(count) / (step(count * (1 + length)) + length * one_pass) for length in range(1 + most)
    ]
    return max(range(1 + most), key=rates.__getitem__), max(rates)
