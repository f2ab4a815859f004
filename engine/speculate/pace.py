"""How long drafts should be: by how often tokens are right, and by what steps of each size were seen to take.

With chance a that a draft token is accepted if those before it are, the k-th token of a draft brings a^k tokens
(Leviathan et al., arXiv 2211.17192). So of all tokens that could be guessed for all sequences, the likeliest come
first; after each it is asked how many tokens a second come of it, by the measured times of the target's steps and of
the proposer's passes; the best place to stop is taken, which is before the first where drafts do not pay.

Times of steps are those of the whole engine, and stay from request to request. Steps become larger than any that was
seen little by little, while a larger one is to be hoped to give more: what that costs is known before it is much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculate.times import Curve, Times

#: Drafts must promise so much more than none: what is measured is not exact.
_MARGIN = 1.03
#: The largest step that was seen is gone beyond by one in so many of its tokens, or by one.
_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long drafts may be in a step."""

    each: tuple[int, ...]
    """Tokens of each sequence, in the order in which they were given."""
    hopeless: bool = False
    """True where no draft would pay even if all of it were right."""


class Pace:
    """Used by one thread."""

    def __init__(self, most: int) -> None:
        """`most`: tokens of a draft."""
        self._most = most
        self.steps = Times()
        """Of the target, by tokens computed in steps in which all decode."""
        self.passes = Times()
        """Of the proposer, for one token of so many sequences that it is not behind with."""

    def choose(self, shares: Sequence[float]) -> Lengths:
        """For a step in which sequences decode of which draft tokens are accepted with the chances `shares`."""
        count = len(shares)
        none = (0,) * count
        if not count or not self.steps.known(count):
            return Lengths(none)  # to be compared with, it is measured first
        steps = self.steps.curve(count, count * (1 + self._most))
        passes = self.passes.curve(1, count)
        if self._hopeless(count, steps, passes):
            return Lengths(none, hopeless=True)
        # A sequence's tokens stay in order: none is likelier than the one before it.
        guesses = sorted(
            (-(share**place), place, i) for i, share in enumerate(shares) for place in range(1, self._most + 1)
        )
        largest = steps.sizes[-1]
        guesses = guesses[: largest + max(1, largest // _GROWTH) - count]
        tokens, guessing = float(count), 0.0
        best, rate = 0, _MARGIN * count / steps.of(count)
        # Of each pass, for how many sequences it is.
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
        """By how many plain steps drafts of so many tokens make a step longer; None where that was not seen yet."""
        plain, longer = self.steps.mean(decoding), self.steps.mean(decoding + drafted)
        return longer / plain - 1 if plain and longer else None

    def _hopeless(self, count: int, steps: Curve, passes: Curve) -> bool:
        plain, one_pass = steps.of(count), passes.of(count)
        return not any(
            (1 + length) * plain > _MARGIN * (steps.of(count * (1 + length)) + length * one_pass)
            for length in range(1, self._most + 1)
        )
