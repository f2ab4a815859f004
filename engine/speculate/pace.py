"""Chooses draft lengths from the acceptance rates and the measured times of steps of each size.

If a draft token is accepted with probability a, given that the tokens before it are, the k-th token of a draft gains
a^k tokens (Leviathan et al., arXiv 2211.17192). So of all tokens that could be drafted for all sequences, the most
likely come first. After each, the expected tokens per second follow from the measured times of the target's steps and
of the proposer's passes. The best point to stop is chosen; if drafts do not pay, that is before the first token.

Step times are those of the whole engine, and outlive requests. Steps grow beyond the largest one measured little by
little, while a larger one is expected to gain more. So the cost of larger steps is known before it is high.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculate.times import Curve, Times

#: The factor by which drafts must be expected to gain over none, because measurements are not exact.
_MARGIN = 1.03
#: A step may exceed the largest measured one by this fraction (one in this many) of its tokens, or by one token.
_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Lengths:
    """The draft lengths of a step."""

    each: tuple[int, ...]
    """The most draft tokens of each sequence, in the order in which the sequences were given."""
    hopeless: bool = False
    """Whether no draft would pay even if all its tokens were accepted."""


class Pace:
    """Chooses draft lengths. Used by one thread."""

    def __init__(self, most: int) -> None:
        """`most`: the most tokens of a draft."""
        self._most = most
        self.steps = Times()
        """The target's times of pure decode steps, by the tokens computed."""
        self.passes = Times()
        """The proposer's times of one token each, by the number of sequences. The proposer is up to date with them."""

    def choose(self, shares: Sequence[float]) -> Lengths:
        """The draft lengths of a step. `shares`: the acceptance probability of each decoding sequence's draft
        tokens."""
        count = len(shares)
        none = (0,) * count
        if not count or not self.steps.known(count):
            return Lengths(none)  # measure plain steps of this size first, to compare with
        steps = self.steps.curve(count, count * (1 + self._most))
        passes = self.passes.curve(1, count)
        if self._hopeless(count, steps, passes):
            return Lengths(none, hopeless=True)
        # A sequence's draft tokens stay in order, because none is more likely than the one before it.
        guesses = sorted(
            (-(share**place), place, i) for i, share in enumerate(shares) for place in range(1, self._most + 1)
        )
        largest = steps.sizes[-1]
        guesses = guesses[: largest + max(1, largest // _GROWTH) - count]
        tokens, guessing = float(count), 0.0
        best, rate = 0, _MARGIN * count / steps.of(count)
        # The number of sequences in each of the proposer's passes.
        width = [0] * (1 + self._most)
        for guessed, (chance, place, _) in enumerate(guesses, 1):
            tokens -= chance
            width[place] += 1
            guessing += passes.of(width[place]) - (passes.of(width[place] - 1) if width[place] > 1 else 0.0)
            found = tokens / (steps.of(count + guessed) + guessing)
            if found > rate:
                best, rate = guessed, found
        each = [0] * count
        for _, _, i in guesses[:best]:
            each[i] += 1
        return Lengths(tuple(each))

    def longer(self, decoding: int, drafted: int) -> float | None:
        """The time that `drafted` draft tokens add to a step, in plain steps. None if that was not measured yet."""
        plain, longer = self.steps.mean(decoding), self.steps.mean(decoding + drafted)
        return longer / plain - 1 if plain and longer else None

    def _hopeless(self, count: int, steps: Curve, passes: Curve) -> bool:
        plain, one_pass = steps.of(count), passes.of(count)
        return not any(
            (1 + length) * plain > _MARGIN * (steps.of(count * (1 + length)) + length * one_pass)
            for length in range(1, self._most + 1)
        )
