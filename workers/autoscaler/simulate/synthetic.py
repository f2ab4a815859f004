"""Synthetic traces, drawn from a seed.

Priority, default and flex tasks follow a rate: the shape's curve, times bursts, times noise from minute to minute (a
gamma distribution with a coefficient of variation of 0.2). Batch tasks come in files, at any time, each file's tasks
within seconds. Prompts and outputs are lognormal (sigma 0.8), as in published traces of LLM services.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import cos, exp, pi
from random import Random
from typing import Final

from workers.autoscaler.simulate.trace import RANKS, Arrival

#: Length (s) of the steps of the rate.
STEP: Final = 60.0
#: Shape of the gamma noise: its coefficient of variation is 1 / sqrt(25).
NOISE: Final = 25.0
#: Spread of lognormal lengths.
SIGMA: Final = 0.8
#: Longest prompt and output, in means.
LONGEST: Final = 8.0
#: Tasks of a batch file: mean, and how many a second are queued.
FILE, FILE_RATE = 500, 20.0
#: Bursts: length (s) and factor on the rate, both uniform.
BURST_S, BURST_FACTOR = (120.0, 600.0), (2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Settings of a synthetic trace. Times are seconds."""

    shape: str = "diurnal"
    tasks: int = 100_000
    duration: float = 86_400.0
    peak: float = 1.75
    """The busiest hour's rate, in means. `diurnal` only."""
    bursts: int = 12
    """Times at which the rate is two to four times as high for two to ten minutes. None in `flat`."""
    mix: dict[str, float] = field(
        default_factory=lambda: {"priority": 20.0, "default": 40.0, "flex": 15.0, "batch": 25.0}
    )
    """Weight of each tier among the tasks."""
    prompt_tokens: int = 1200
    output_tokens: int = 1500
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"no shape {self.shape!r}; there are {', '.join(SHAPES)}")
        if not 1 <= self.peak <= 2:
            raise ValueError(f"the peak is {self.peak:g}; it must be 1 to 2 means")

    def arrivals(self) -> list[Arrival]:
        """The tasks, in order of time."""
        random = Random(self.seed)  # noqa: S311  a simulation's, no secret
        rates = self._rates(random)
        found: list[Arrival] = []
        for tier, count in self._counts().items():
            times = self._files(random, count) if tier == "batch" else self._times(random, rates, count)
            found += [Arrival(at, RANKS[tier], *self._lengths(random)) for at in times]
        return sorted(found)

    def _counts(self) -> dict[str, int]:
        """Tasks of each tier; the heaviest has what is left over."""
        total = sum(self.mix.values())
        counts = {tier: int(self.tasks * weight / total) for tier, weight in self.mix.items()}
        counts[max(self.mix, key=self.mix.__getitem__)] += self.tasks - sum(counts.values())
        return counts

    def _rates(self, random: Random) -> list[float]:
        """The relative rate of each step."""
        steps = max(1, round(self.duration / STEP))
        rates = [
            SHAPES[self.shape](self, step / steps) * random.gammavariate(NOISE, 1 / NOISE) for step in range(steps)
        ]
        factors = [1.0] * steps
        for _ in range(0 if self.shape == "flat" else self.bursts):
            first, length = random.random() * steps, random.uniform(*BURST_S) / STEP
            factor = random.uniform(*BURST_FACTOR)
            for step in range(int(first), min(steps, int(first + length))):
                factors[step] = max(factors[step], factor)
        return [rate * factor for rate, factor in zip(rates, factors, strict=True)]

    def _times(self, random: Random, rates: list[float], count: int) -> list[float]:
        length = self.duration / len(rates)
        return [(step + random.random()) * length for step in random.choices(range(len(rates)), rates, k=count)]

    def _files(self, random: Random, count: int) -> list[float]:
        times: list[float] = []
        while len(times) < count:
            size = min(count - len(times), max(1, round(random.expovariate(1 / FILE))))
            start = random.random() * max(0.0, self.duration - size / FILE_RATE)
            times += [start + k / FILE_RATE for k in range(size)]
        return times

    def _lengths(self, random: Random) -> tuple[int, int]:
        return _lognormal(random, self.prompt_tokens), _lognormal(random, self.output_tokens)


def _lognormal(random: Random, mean: int) -> int:
    return max(1, min(round(mean * exp(random.gauss(-SIGMA * SIGMA / 2, SIGMA))), round(LONGEST * mean)))


#: Shape -> its relative rate at a share of the trace. The day is quietest at its start and end, and busiest at noon.
SHAPES: Final[dict[str, Callable[[Synthetic, float], float]]] = {
    "diurnal": lambda trace, share: 1 - (trace.peak - 1) * cos(2 * pi * share),
    "burst": lambda trace, share: 1.0,
    "flat": lambda trace, share: 1.0,
}
