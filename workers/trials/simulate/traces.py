"""Traces: the tasks that arrive, and when. They are recorded, or drawn from a seed.

A recorded trace is a CSV file. Its first line names the columns: `time` (seconds, or ISO 8601), `tier`,
`prompt_tokens`, `output_tokens`. Their order is free, and others are ignored. Lines may be in any order. Times count
from the earliest.

A drawn one is `Synthetic`. Priority, default and flex tasks follow a rate: the shape's curve, times bursts, times noise
from minute to minute (a gamma distribution with a coefficient of variation of 0.2). Batch tasks come in files, at any
time, each file's tasks within seconds. Prompts and outputs are lognormal (sigma 0.8), as in published traces of LLM
services.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import cos, exp, isfinite, pi
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from producers.contract import keys

COLUMNS: Final = ("time", "tier", "prompt_tokens", "output_tokens")
RANKS: Final = {tier: rank for tier, (rank, _) in keys.TIERS.items()}
TIERS: Final = tuple(sorted(RANKS, key=RANKS.__getitem__))
#: Most tokens of a prompt or an output.
MAX_TOKENS: Final = 10_000_000
#: Longest time (s) between two arrivals. A longer one is a mistake, and would take for ever.
LONGEST_S: Final = 366 * 86_400.0
#: Length (s) of the steps of the rate.
STEP: Final = 60.0
#: Shape of the gamma noise: its coefficient of variation is 1 / sqrt(25).
NOISE: Final = 25.0
#: Spread of lognormal lengths.
SIGMA: Final = 0.8
#: Longest prompt and output, in means of each.
LONGEST_IN_MEANS: Final = 8.0
#: Tasks of a batch file: mean, and how many a second are queued.
FILE, FILE_RATE = 500, 20.0
#: Bursts: length (s) and factor on the rate, both uniform.
BURST_S, BURST_FACTOR = (120.0, 600.0), (2.0, 4.0)


class Arrival(NamedTuple):
    """One task. `at`: seconds since the trace's start. `rank`: of its tier, 0 goes first."""

    at: float
    rank: int
    prompt: int
    output: int


def read(path: Path) -> list[Arrival]:
    """A recorded trace, in order of time. Raises OSError, or ValueError, which names the bad line."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            return parse(file, str(path))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is no CSV file in UTF-8: {error}") from error


def parse(lines: Iterable[str], name: str) -> list[Arrival]:
    """The same from lines. Raises ValueError."""
    rows = csv.DictReader(lines, skipinitialspace=True)
    missing = [column for column in COLUMNS if column not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(f"{name}, line 1: no column {', '.join(missing)}; the columns are {', '.join(COLUMNS)}")
    arrivals, clocks = [], set()
    for row in rows:
        try:
            at, clock = _time(row["time"])
            clocks.add(clock)
            arrivals.append(Arrival(at, _rank(row["tier"]), *(_tokens(row, column) for column in COLUMNS[2:])))
            if len(clocks) > 1:
                raise ValueError("time is in seconds on some lines and a date on others")
        except ValueError as error:
            raise ValueError(f"{name}, line {rows.line_num}: {error}") from None
    if not arrivals:
        raise ValueError(f"{name} has no task")
    start, end = min(arrival.at for arrival in arrivals), max(arrival.at for arrival in arrivals)
    if end - start > LONGEST_S:
        raise ValueError(f"{name}: {(end - start) / 86_400:,.0f} days from the first task to the last; at most 366")
    return sorted(arrival._replace(at=arrival.at - start) for arrival in arrivals)


def _time(value: str | None) -> tuple[float, str]:
    """Seconds, and which kind of time it was."""
    try:
        at = float(value or "")
        if isfinite(at):
            return at, "seconds"
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(value or "")
    except ValueError:
        raise ValueError(f"time is {value!r}; it must be seconds, or a date as 2026-11-23T09:30:00.5Z") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp(), "date"


def _rank(tier: str | None) -> int:
    if tier not in RANKS:
        raise ValueError(f"tier is {tier!r}; it must be {', '.join(RANKS)}")
    return RANKS[tier]


def _tokens(row: dict[str, str | None], column: str) -> int:
    try:
        tokens = int(row[column] or "")
    except (TypeError, ValueError):
        tokens = -1
    if not 0 <= tokens <= MAX_TOKENS:
        value = "missing" if row[column] is None else repr(row[column])
        raise ValueError(f"{column} is {value}; it must be a whole number from 0 to {MAX_TOKENS:,}")
    return tokens


def write(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Write a trace as it is read. Raises OSError."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows(
            (round(arrival.at, 3), TIERS[arrival.rank], arrival.prompt, arrival.output) for arrival in arrivals
        )


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
            raise ValueError(f"the peak is {self.peak:g}; it must be 1 to 2 times the mean")

    def arrivals(self) -> list[Arrival]:
        """The tasks, in order of time."""
        random = Random(self.seed)  # noqa: S311  a simulation's, no secret
        rates = self._rates(random)
        arrivals: list[Arrival] = []
        for tier, count in self._counts().items():
            times = self._files(random, count) if tier == "batch" else self._times(random, rates, count)
            arrivals += [Arrival(at, RANKS[tier], *self._lengths(random)) for at in times]
        return sorted(arrivals)

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
    return max(1, min(round(mean * exp(random.gauss(-SIGMA * SIGMA / 2, SIGMA))), round(LONGEST_IN_MEANS * mean)))


#: Shape -> its relative rate at a share of the trace. The day is quietest at its start and end, and busiest at noon.
SHAPES: Final[dict[str, Callable[[Synthetic, float], float]]] = {
    "diurnal": lambda trace, share: 1 - (trace.peak - 1) * cos(2 * pi * share),
    "burst": lambda trace, share: 1.0,
    "flat": lambda trace, share: 1.0,
}
