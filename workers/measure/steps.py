"""Times of the engine's steps by their size, and what they say of it: its knee, and the tokens per second there.

A task has P prompt tokens to be computed and G tokens to be generated. With n sequences at once, an engine whose decode
step takes t(n), makes g tokens per sequence in it, and needs p for a prompt's token, makes

    X(n) = (P + G) / (P p + G / g * t(m) / m)   tokens per second,   m = min(n, G / g * budget / P)

Of many sequences some compute their prompts: at most m decode at once where prompts fill the `budget` of each step.
X grows with n as long as sequences share what a step costs, and less and less so. The knee is the smallest n with
X(n) >= KNEE_SHARE * X(capacity), where `capacity` is what the engine holds at once: its slots, or its KV cache divided
by the tokens of a task.

t is measured for sizes that occurred (`Curve`: smoothed, for a few sizes that span a wide range), interpolated, and
continued by its last slope. So a knee is found before load has reached it. From fewer than MIN_MEASURED sequences at
once no slope is taken. Further sequences then count as free, so that the knee is overestimated, and given only
if even that is within what was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from engine.plan import StepWork

#: One bucket for each power of two: sizes 1, 2-3, 4-7, ...
BUCKETS: Final = 21
#: Steps after which a bucket is believed.
TRUSTED: Final = 32
#: Steps over which a bucket is smoothed.
MEMORY: Final = 128
#: A step counts as at most so many times the mean of its bucket: what took longer was the machine's doing.
OUTLIER: Final = 4.0
#: The slope beyond the largest size is that of the sizes from this share of it on.
NEAR: Final = 1 / 8
#: Share of the best throughput that the knee has.
KNEE_SHARE: Final = 0.85
#: Sequences at once that must have been seen before more are extrapolated.
MIN_MEASURED: Final = 4
#: Share of each new step in the mean cost of a prompt's token, and in the tokens that a decode makes.
SMOOTHING: Final = 1 / 128


class Curve:
    """Written by one thread; others read it, a step early or late."""

    def __init__(self) -> None:
        self._sizes = [0.0] * BUCKETS
        self._seconds = [0.0] * BUCKETS
        self._count = [0] * BUCKETS

    def take(self, size: int, seconds: float) -> float:
        """Enter one step. Returns the seconds that it counts as."""
        bucket = min(size.bit_length(), BUCKETS) - 1
        count = self._count[bucket]
        mean = self._seconds[bucket]
        if count and seconds > OUTLIER * mean:
            seconds = OUTLIER * mean
        elif count < TRUSTED and OUTLIER * seconds < mean:
            count = 0  # those before were the outliers
        share = 1.0 / (count + 1) if count < MEMORY else 1.0 / MEMORY
        self._seconds[bucket] = mean + share * (seconds - mean)
        self._sizes[bucket] += share * (size - self._sizes[bucket])
        self._count[bucket] = count + 1
        return seconds

    def near(self, size: int) -> float | None:
        """The mean of the size's bucket; None until that is believed. Quick, for every step."""
        bucket = min(size.bit_length(), BUCKETS) - 1
        return self._seconds[bucket] if self._count[bucket] >= TRUSTED else None

    def points(self) -> list[tuple[float, float]]:
        """(size, seconds) of the believed buckets. Seconds do not fall with size: buckets that say so share their mean,
        each by its number of steps, as far as these are remembered."""
        sizes: list[float] = []
        runs: list[tuple[float, int, int]] = []
        for size, seconds, count in zip(self._sizes, self._seconds, self._count, strict=True):
            if count < TRUSTED:
                continue
            sizes.append(size)
            run = (seconds, min(count, MEMORY), 1)
            while runs and runs[-1][0] > run[0]:
                run = _joined(runs.pop(), run)
            runs.append(run)
        level = [seconds for seconds, _, buckets in runs for _ in range(buckets)]
        return list(zip(sizes, level, strict=True))


def _joined(left_run: tuple[float, int, int], right_run: tuple[float, int, int]) -> tuple[float, int, int]:
    """Two neighbouring runs of buckets as one: (mean seconds, steps, buckets)."""
    steps = left_run[1] + right_run[1]
    return (left_run[0] * left_run[1] + right_run[0] * right_run[1]) / steps, steps, left_run[2] + right_run[2]


def at(points: list[tuple[float, float]], size: float) -> float:
    """Seconds of a step of this size: between points by interpolation, beyond the last by its slope."""
    index = bisect_left(points, (size, 0.0))
    if index == len(points):
        last, seconds = points[-1]
        return seconds + slope(points) * (size - last)
    if index == 0:
        return points[0][1]
    (before, lower), (after, upper) = points[index - 1], points[index]
    return lower + (upper - lower) * (size - before) / (after - before)


def slope(points: list[tuple[float, float]]) -> float:
    """Seconds per size at the end of the curve: a line through the last points, each as exact as it is large. Not
    negative; 0 with one point."""
    last = points[-1][0]
    near = [(size, seconds, 1 / seconds**2) for size, seconds in points if size >= NEAR * last and seconds > 0]
    total = sum(weight for _, _, weight in near)
    if len(near) < 2:
        return 0.0
    middle = sum(size * weight for size, _, weight in near) / total
    level = sum(seconds * weight for _, seconds, weight in near) / total
    spread = sum(weight * (size - middle) ** 2 for size, _, weight in near)
    return max(0.0, sum(weight * (size - middle) * (seconds - level) for size, seconds, weight in near) / spread)


@dataclass(frozen=True, slots=True)
class Mix:
    """Means over tasks. `prompt`: prompt tokens that were computed; `generated`: of all choices; `kept`: KV tokens."""

    prompt: float
    generated: float
    kept: float


@dataclass(frozen=True, slots=True)
class Knee:
    concurrency: int
    tokens_per_s: float


class StepTimes:
    """Written by the engine's thread; any thread reads."""

    def __init__(self) -> None:
        self.steps = 0
        self._decode = Curve()
        self._prompt = Curve()
        #: Decodes beside prompts. Where tasks generate few tokens, hardly a step is without a prompt: then each decode
        #: has its share of them beside it, and their time is in this curve.
        self._mixed = Curve()
        self._per_decode = 1.0
        self._prompt_seconds = 0.0
        self._prompt_tokens = 0.0

    def take(self, work: StepWork) -> None:
        """Enter one step."""
        self.steps += 1
        decodes = work.decodes
        if not work.prompt_tokens:
            if decodes:
                self._decode.take(decodes, work.seconds)
                self._per_decode += SMOOTHING * (work.generated / decodes - self._per_decode)
        elif decodes == 0:
            self._take_prompt(work.prompt_tokens, work.seconds)
        elif (beside := self._decode.near(decodes)) is not None:
            self._take_prompt(work.prompt_tokens, max(0.0, work.seconds - beside))
        else:
            self._mixed.take(decodes, work.seconds)

    @property
    def reached(self) -> int:
        """The most sequences at once of which enough steps were measured; 0 without any."""
        return round(
            max((points[-1][0] for curve in (self._decode, self._mixed) if (points := curve.points())), default=0)
        )

    def _take_prompt(self, tokens: int, seconds: float) -> None:
        seconds = self._prompt.take(tokens, seconds)
        self._prompt_tokens += tokens - SMOOTHING * self._prompt_tokens
        self._prompt_seconds += seconds - SMOOTHING * self._prompt_seconds

    def knee(self, mix: Mix, seqs: int, kv_tokens: float, budget: int) -> Knee | None:
        """The knee for such tasks, with so many slots and KV tokens; None while it is unknown. `budget`: the tokens of
        one step."""
        tokens = mix.prompt + mix.generated
        prompt = mix.prompt * self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else 0.0
        decodes = max(0.0, mix.generated - 1) / max(self._per_decode, 0.1)  # the first token comes with the prompt
        if not decodes:
            return Knee(1, tokens / prompt) if prompt else None
        capacity = max(1, min(seqs, int(kv_tokens / mix.kept)))
        together = max(1.0, decodes * budget / mix.prompt) if mix.prompt else float(capacity)
        alone, mixed = self._decode.points(), self._mixed.points()
        return _knee(alone, tokens, decodes, prompt, together, capacity) or _knee(
            mixed, tokens, decodes, 0.0, together, capacity
        )


def _knee(
    points: list[tuple[float, float]], tokens: float, decodes: float, prompt: float, together: float, capacity: int
) -> Knee | None:
    """The knee of a decode's curve, for tasks of so many tokens, decodes, and seconds for their prompts."""
    if not points:
        return None
    largest = points[-1][0]
    unsure = largest < min(MIN_MEASURED, capacity)
    if unsure:
        points = [*points, (float(capacity) + 1, points[-1][1])]
    rates: dict[int, float] = {}
    for n in _sizes(capacity):
        m = min(n, together)
        rates[n] = tokens / (decodes * at(points, m) / m + prompt)
    knee = next(n for n, rate in rates.items() if rate >= KNEE_SHARE * max(rates.values()))
    return None if unsure and knee > MIN_MEASURED else Knee(knee, rates[knee])


def _sizes(limit: int) -> list[int]:
    """1 to `limit`: all of the small ones, then in steps of a sixteenth."""
    sizes = [1]
    while sizes[-1] < limit:
        sizes.append(min(limit, sizes[-1] + max(1, sizes[-1] // 16)))
    return sizes
