"""Times of the engine's steps, and what they say of it: its knee, and the tokens per second there.

A task has P prompt tokens to be computed and G tokens to be generated. With n sequences at once, an engine whose decode
step takes t(n), makes g tokens per sequence in it, and needs p for a prompt's token, makes

    X(n) = (P + G) / (P p + G / g * t(m) / m)   tokens per second,   m = min(n, G / g * budget / P)

Of many sequences some compute their prompts: at most m decode at once where prompts fill the `budget` of each step.
X grows with n as long as sequences share what a step costs, and less and less so. The knee is the smallest n with
X(n) >= KNEE_SHARE * X(most), where `most` is what the engine holds at once: its slots, or its KV cache divided by the
tokens of a task.

t is measured for sizes that occurred, interpolated, and continued by its last slope. So a knee is found before load has
reached it. From fewer than SEEN sequences at once no slope is taken. Further sequences then count as free, so that the
knee is overestimated, and it is told only where even that is within what was seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.plan import StepWork
from workers.measure.curve import Curve, at

#: Share of the best throughput that the knee has.
KNEE_SHARE: Final = 0.85
#: Sequences at once that must have been seen before more are extrapolated.
SEEN: Final = 4
#: Share of each new step in the mean cost of a prompt's token, and in the tokens that a decode makes.
SMOOTHING: Final = 1 / 128


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
        """The most sequences at once of which enough steps were measured; 0 where there were none."""
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
        most = max(1, min(seqs, int(kv_tokens / mix.kept)))
        together = max(1.0, decodes * budget / mix.prompt) if mix.prompt else float(most)
        alone, mixed = self._decode.points(), self._mixed.points()
        return _knee(alone, tokens, decodes, prompt, together, most) or _knee(
            mixed, tokens, decodes, 0.0, together, most
        )


def _knee(
    points: list[tuple[float, float]], tokens: float, decodes: float, prompt: float, together: float, most: int
) -> Knee | None:
    """The knee of a decode's curve, for tasks of so many tokens, decodes, and seconds for their prompts."""
    if not points:
        return None
    seen = points[-1][0]
    unsure = seen < min(SEEN, most)
    if unsure:
        points = [*points, (float(most) + 1, points[-1][1])]
    rates: dict[int, float] = {}
    for n in _sizes(most):
        m = min(n, together)
        rates[n] = tokens / (decodes * at(points, m) / m + prompt)
    knee = next(n for n, rate in rates.items() if rate >= KNEE_SHARE * max(rates.values()))
    return None if unsure and knee > SEEN else Knee(knee, rates[knee])


def _sizes(most: int) -> list[int]:
    """1 to `most`: all of the small ones, then in steps of a sixteenth."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + max(1, sizes[-1] // 16)))
    return sizes
