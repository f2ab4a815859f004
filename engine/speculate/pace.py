"""How long drafts should be: by how often tokens are right, and by what steps of each size were seen to take.

With chance a that a draft token is accepted if those before it are, a draft of k gives 1 + a + ... + a^k tokens a step
(Leviathan et al., arXiv 2211.17192). What a step of so many tokens takes is measured, and so is a pass of the proposer:
nothing is assumed of the machine. The length is the one with the most tokens a second, and 0 where that is best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Drafts must promise so much more than none: what is measured is not exact.
_MARGIN = 1.03
#: Steps after which a time that was not measured again is forgotten, and tried again.
_STALE = 1000
#: Times of one size before they are believed: the first has what is only done once.
_TRUSTED = 2
#: What a new time counts beside those before it, and how many times them at most: a step that was held up says little.
_FRESH, _MOST = 0.2, 2.0
#: Up to so many tokens each size is told apart; beyond, by an eighth or so.
_EXACT = 16


@dataclass(slots=True)
class _Time:
    seconds: float
    count: int
    taken: int


class Times:
    """What something takes by its size, as it was seen lately."""

    def __init__(self) -> None:
        self._times: dict[int, _Time] = {}
        self._now = 0

    def take(self, size: int, seconds: float) -> None:
        self._now += 1
        key = _key(size)
        found = self._times.get(key)
        if found is None or self._now - found.taken > _STALE:
            self._times[key] = _Time(seconds, 1, self._now)
            return
        if found.count < _TRUSTED:
            found.seconds = min(found.seconds, seconds)
        else:
            found.seconds += _FRESH * (min(seconds, _MOST * found.seconds) - found.seconds)
        found.count += 1
        found.taken = self._now

    def known(self, size: int) -> bool:
        found = self._times.get(_key(size))
        return found is not None and found.count >= _TRUSTED and self._now - found.taken <= _STALE

    def of(self, size: int) -> float:
        """Seconds; of a size that is not known those of the next smaller one that is, so that it is worth a try. 0.0
        where there is none."""
        key = _key(size)
        for smaller in range(key, -1, -1):
            found = self._times.get(smaller)
            if found is not None and found.count >= _TRUSTED and self._now - found.taken <= _STALE:
                return found.seconds
        return 0.0

    def expected(self, size: int, known: list[tuple[int, float]]) -> float:
        """Seconds; of a size that is not known as much more than the last of `known` smaller ones, (size, seconds), as
        is to be hoped: half of what each token made a step longer between the last two."""
        if self.known(size) or len(known) < 2:
            return self.of(size)
        (below, least), (last, most) = known[-2:]
        return most + max(0.0, most - least) / (last - below) * (size - last) / 2


def _key(size: int) -> int:
    return size if size <= _EXACT else _EXACT + int(8 * math.log2(size / _EXACT))


@dataclass(frozen=True, slots=True)
class Depth:
    """How long drafts may be in a step."""

    most: int
    """Tokens of each sequence."""
    least: float = 0.0
    """The chance that a token must have to be accepted, with all before it, to be worth computing."""
    hopeless: bool = False
    """True where no draft would pay even if all of it were right."""

    def of(self, share: float) -> int:
        """Tokens for a sequence of which a draft token is accepted with the chance `share`."""
        if self.least <= 0.0 or share >= 1.0:
            return self.most
        if share <= 0.0 or self.least >= 1.0:
            return 0
        return min(self.most, int(math.log(self.least) / math.log(share)))


class Pace:
    """Used by one thread."""

    def __init__(self, most: int) -> None:
        """`most`: tokens of a draft."""
        self._most = most
        self.steps = Times()
        """Of the target, by tokens computed in steps in which all decode."""
        self.passes = Times()
        """Of the proposer, for one token of so many sequences."""

    def choose(self, shares: Sequence[float]) -> Depth:
        """For a step in which sequences decode of which draft tokens are accepted with the chances `shares`."""
        count = len(shares)
        if not count or not self.steps.known(count):
            return Depth(0)  # to be compared with, it is measured first
        plain = self.steps.of(count)
        best, rate, hopeless = 0, count / plain, True
        powers, tokens = [1.0] * count, float(count)
        known = [(count, plain)]
        for length in range(1, self._most + 1):
            powers = [power * share for power, share in zip(powers, shares, strict=True)]
            tokens += sum(powers)
            size = count * (length + 1)
            step = max(plain, self.steps.expected(size, known))
            if self.steps.known(size):
                known.append((size, step))
            seconds = step + length * self.passes.of(count)
            if count * (length + 1) / seconds > _MARGIN * count / plain:
                hopeless = False
            if tokens / seconds > rate * (1.0 if best else _MARGIN):
                best, rate = length, tokens / seconds
        if not best:
            return Depth(0, hopeless=hopeless)
        more = max(0.0, self.steps.of(count * (best + 1)) - plain) / (count * best)
        return Depth(best, least=more * rate)
