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
        self._per_decode = 1.0
        self._prompt_seconds = 0.0
        self._prompt_tokens = 0.0

    def take(self, work: StepWork) -> None:
        """Enter one step."""
        self.steps += 1
        decodes = work.decodes
        if work.prompt_tokens:
            beside = self._decode.near(decodes) if decodes else 0.0
            if beside is not None:
                self._take_prompt(work.prompt_tokens, max(0.0, work.seconds - beside))
        elif decodes:
            self._decode.take(decodes, work.seconds)
            self._per_decode += SMOOTHING * (work.generated / decodes - self._per_decode)

    def _take_prompt(self, tokens: int, seconds: float) -> None:
        seconds = self._prompt.take(tokens, seconds)
        self._prompt_tokens += tokens - SMOOTHING * self._prompt_tokens
        self._prompt_seconds += seconds - SMOOTHING * self._prompt_seconds

    def knee(self, mix: Mix, seqs: int, kv_tokens: float, budget: int) -> Knee | None:
        """The knee for such tasks, with so many slots and KV tokens; None while it is unknown. `budget`: the tokens of
        one step."""
        points = self._decode.points()
        most = max(1, min(seqs, int(kv_tokens / mix.kept) if mix.kept else seqs))
        prompt = mix.prompt * self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else 0.0
        decodes = max(0.0, mix.generated - 1) / max(self._per_decode, 0.1)  # the first token comes with the prompt
        if not (points if decodes else prompt):
            return None
        points = points or [(1.0, 0.0)]
        seen = points[-1][0]
        if seen < min(SEEN, most):
            points.append((float(most) + 1, points[-1][1]))

        together = max(1.0, decodes * budget / mix.prompt) if mix.prompt else float(most)

        def throughput(n: int) -> float:
            m = min(n, together)
            return (mix.prompt + mix.generated) / (decodes * at(points, m) / m + prompt)

        sizes = _sizes(most)
        best = max(throughput(n) for n in sizes)
        knee = next(n for n in sizes if throughput(n) >= KNEE_SHARE * best)
        if seen < min(SEEN, most) and knee > SEEN and decodes:
            return None
        return Knee(knee, throughput(knee))


def _sizes(most: int) -> list[int]:
    """1 to `most`: all of the small ones, then in steps of a sixteenth."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + max(1, sizes[-1] // 16)))
    return sizes
