"""An engine on paper: its steps take known times, so that its knee is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import ceil

from engine.plan import StepWork
from workers.measure import KNEE_SHARE

#: Tokens of one step at most.
BUDGET = 512


@dataclass(frozen=True, slots=True)
class Machine:
    """`decode`: seconds of a step by its decodes (0 for none); `prompt`: seconds of a prompt's token. `apart`: decodes
    wait while prompts are computed, as on a CPU."""

    decode: Callable[[int], float]
    prompt: float
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of each task."""

    prompt: int
    generated: int


def steps(machine: Machine, shape: Shape, at_once: int, tasks: int) -> list[StepWork]:
    """The steps of so many tasks, of which `at_once` run until the last have begun."""
    waiting, running, found = tasks, [], []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append([shape.prompt, shape.generated])
            waiting -= 1
        budget, prompts = BUDGET, [one for one in running if one[0]]
        decodes = [] if machine.apart and prompts else [one for one in running if not one[0]]
        budget -= len(decodes)
        computed = generated = 0
        for one in prompts:
            part = min(budget, one[0])
            one[0], budget, computed = one[0] - part, budget - part, computed + part
            if part and not one[0]:
                one[1], generated = one[1] - 1, generated + 1
        for one in decodes:
            one[1], generated = one[1] - 1, generated + 1
        running = [one for one in running if one[1]]
        seconds = machine.decode(len(decodes)) + computed * machine.prompt
        found.append(StepWork(0.0, seconds, len(decodes), computed, generated))
    return found


def throughput(machine: Machine, shape: Shape, at_once: int) -> float:
    """Tokens a second with so many sequences at any time: the tasks' starts are spread, as they are under load."""
    tasks = 5 * at_once
    works = steps(machine, shape, at_once, tasks)
    # The last tasks run with fewer beside them.
    works = works[: ceil(0.8 * len(works))]
    return sum(work.prompt_tokens + work.generated for work in works) / sum(work.seconds for work in works)


@cache
def true_knee(machine: Machine, shape: Shape, most: int) -> tuple[int, float]:
    """(sequences, tokens a second), by trying."""
    sizes = sorted({*range(1, min(most, 12) + 1), *(round(most * share / 24) for share in range(2, 25))})
    found = {size: throughput(machine, shape, size) for size in sizes}
    knee = next(size for size in sizes if found[size] >= KNEE_SHARE * max(found.values()))
    return knee, found[knee]


def noisy(works: list[StepWork], seed: int = 1) -> list[StepWork]:
    """The same on a busy machine: each step a tenth longer or shorter, one in fifty many times as long."""
    rng = random.Random(seed)
    return [
        StepWork(
            work.ended,
            work.seconds * rng.uniform(0.9, 1.1) * (rng.uniform(5, 50) if rng.random() < 0.02 else 1.0),
            work.decodes,
            work.prompt_tokens,
            work.generated,
        )
        for work in works
    ]
