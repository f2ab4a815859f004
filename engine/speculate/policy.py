"""Decides how many tokens are drafted for each sequence: as many as are expected to give the most tokens a second.

If a draft token is accepted with probability a, given that the tokens before it are, the k-th token of a draft gains
a^k tokens (Leviathan et al., arXiv 2211.17192). So of all tokens that could be drafted for all sequences, the most
likely come first. After each, the expected tokens per second follow from the measured times of the target's steps and
of the proposer's passes. The best point to stop is chosen; if drafts do not pay, that is before the first token.

To begin with a sequence costs more: a draft model reads its whole text first. Only sequences that it follows get drafts
at will. Others begin as far as `credit` covers, which drafts fill with what they gain. Beside that, some are tried:
as many as are expected to pay, within two steps' time, else one with one token. The next try comes when its loss is a
hundredth of the time since then. So a proposer that is never right costs little.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Each
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.plan import ScheduledSeq, StepPlan
from engine.sequence import Sequence

#: The part of all time that tries may cost.
_PART = 0.01
#: The most plain steps that a try may cost, and the most that credit holds.
_MAX_CREDIT = 2.0
#: The weight of the latest draft token in the estimated acceptance.
_LATEST = 1 / 16
#: The number of durations kept for one size. The estimate is their median, so that single delays do not count.
_KEPT = 31
#: The number of durations of one size before the estimate is used. The first includes one-time work.
_TRUSTED = 2
#: The number of later measurements after which a size not measured again is forgotten.
_STALE = 1000
#: The most turns between two drafts of a sequence after which the proposer is still up to date with it.
_FOLLOWS = 2


class Policy:
    """Chooses draft lengths. Used by one thread."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: the most tokens of a draft."""
        self._max_tokens = max_tokens
        self.steps = Times()
        """The target's times of pure decode steps, by the tokens computed."""
        self.passes = Times()
        """The proposer's times of one token each, by the number of sequences. The proposer is up to date with them."""
        # The acceptance of all sequences: certain until drafts are seen to be wrong.
        self._all = 1.0
        self._turn = 0
        # All in seconds. `debt`: what tries have cost that time has not paid back yet. `each`: the latest cost of
        # beginning with one sequence.
        self._credit = self._debt = 0.0
        self._each = math.inf
        self._accepted = 0  # in this step

    def choose(self, count: int, may: Each[Sequence]) -> dict[int, int]:
        """The draft lengths of a step in which `count` sequences decode, by serial. Only those that `may` have drafts
        get some."""
        self._turn += 1
        if not may or not self.steps.is_known(count):
            return {}  # measure plain steps of this size first, to compare with
        new = [seq for seq in may if not self.follows(seq)]
        new.sort(key=lambda seq: (-self._share(seq), seq.guessed.latest))
        tries = self._debt <= 0.0
        cover = self._credit + _MAX_CREDIT * self.steps.of([count])[0] * tries
        begun = new[: int(cover / self._each)] if self._each else new
        worth = [seq for seq in may if self.follows(seq)] + begun
        lengths = dict(zip((seq.serial for seq in worth), self._best(count, worth), strict=True))
        if tries and new and not any(lengths.get(seq.serial) for seq in new):
            lengths[min(new, key=lambda seq: (seq.guessed.missed, seq.guessed.latest)).serial] = 1
        return lengths

    def follows(self, seq: Sequence) -> bool:
        """Whether the sequence's last draft is so recent that the proposer is up to date with it."""
        return self._turn - seq.guessed.latest <= _FOLLOWS

    def _share(self, seq: Sequence) -> float:
        return self._all if seq.guessed.share is None else seq.guessed.share

    def _best(self, count: int, worth: list[Sequence]) -> list[int]:
        """The draft length of each sequence that gives the most tokens a second."""
        if not worth:
            return []
        places = np.arange(1, 1 + self._max_tokens)
        chances = np.array([self._share(seq) for seq in worth]) ** places[:, None]
        # A sequence's draft tokens stay in order, because none is more likely than the one before it.
        order = np.argsort(-chances, axis=None, kind="stable")
        # Larger steps are measured one doubling at a time.
        order = order[: 2 * self.steps.largest - count]
        depth, sequence = np.divmod(order, len(worth))
        tokens = count + np.cumsum(chances.ravel()[order])
        # The number of sequences in each of the proposer's passes.
        widths = np.cumsum(depth[:, None] + 1 == places, axis=0)
        plain, *longer = self._steps_from(count, len(order))
        rates = np.append(count / plain, tokens / (longer + self.passes.of(widths).sum(axis=1)))
        return list(map(int, np.bincount(sequence[: np.argmax(rates)], minlength=len(worth))))

    def _steps_from(self, count: int, more: int) -> NDArray[np.float64]:
        """The seconds of steps of `count` tokens and up to `more` further ones. Beyond the largest known size they rise
        as from `count` to there. None is faster than a smaller one, as it may have been when it was measured."""
        sizes, largest = count + np.arange(1 + more), self.steps.largest
        plain, top = self.steps.of([count, largest])
        rise = float(top - plain) / max(1, largest - count)
        return np.maximum.accumulate(self.steps.of(sizes) + rise * np.maximum(sizes - largest, 0))

    def proposed(self, rows: Each[ScheduledSeq], seconds: float) -> None:
        """Record how long it took to make these rows' drafts."""
        rows = [row for row in rows if row.draft]
        begun = sum(not self.follows(row.seq) for row in rows)
        if begun:
            self._each = max(0.0, seconds - self._passes(rows)) / begun
        elif rows:
            self.passes.take(len(rows), seconds / max(len(row.draft) for row in rows))

    def record(self, plan: StepPlan, seconds: float, guessing: float) -> None:
        """Record a step, after what was `entered`: `seconds` to run it, and `guessing` seconds to make its drafts."""
        accepted, self._accepted = self._accepted, 0
        decoding = sum(row.samples and row.known_tokens - row.start == 1 for row in plan.rows)
        if decoding == len(plan.rows):
            self.steps.take(plan.num_tokens, seconds)
        self._debt = max(0.0, self._debt - _PART * (seconds + guessing))
        if not decoding or not self.steps.is_known(decoding):
            return
        drafted = sum(len(row.draft) for row in plan.rows)
        plain, longer = self.steps.of([decoding, decoding + drafted])
        net = accepted / decoding * plain - max(longer - plain, 0.0) - guessing
        if self._debt <= 0.0:
            self._debt = max(-net, 0.0)
            net = max(net, 0.0)
        self._credit = min(max(self._credit + net, 0.0), max(_MAX_CREDIT * plain, self._each))

    def _passes(self, rows: Each[ScheduledSeq]) -> float:
        """The expected seconds of the proposer's passes for these drafts."""
        return float(
            self.passes.of([sum(len(row.draft) > depth for row in rows) for depth in range(self._max_tokens)]).sum()
        )

    def entered(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Record how many of a sequence's draft tokens were accepted."""
        guessed = seq.guessed
        guessed.share = _learned(self._share(seq), drafted, accepted)
        guessed.latest = self._turn
        guessed.missed = guessed.pause = 0
        self._all = _learned(self._all, drafted, accepted)
        self._accepted += accepted


def _learned(share: float, drafted: int, accepted: int) -> float:
    """The acceptance after one more draft. The tokens after the first rejected one do not count."""
    share += (1 - (1 - _LATEST) ** accepted) * (1 - share)
    return share - _LATEST * share * (accepted < drafted)


@dataclass(slots=True)
class _Recent:
    """The latest durations of a group of sizes. Their mean size has the median of their seconds."""

    taken_at: int = 0
    size: float = 0.0
    estimate: float = 0.0
    sizes: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def take(self, size: int, seconds: float) -> None:
        self.sizes.append(size)
        self.seconds.append(seconds)
        self.size = sum(self.sizes) / len(self.sizes)
        self.estimate = sorted(self.seconds)[(len(self.seconds) - 1) // 2]


class Times:
    """Durations by size. Used by one thread."""

    def __init__(self) -> None:
        self._recent: dict[int, _Recent] = {}
        self._now = 0

    def take(self, size: int, seconds: float) -> None:
        """Record that something of this size took so long."""
        self._now += 1
        recent = self._recent.get(_key(size))
        if recent is None or self._now - recent.taken_at > _STALE:
            recent = self._recent[_key(size)] = _Recent()
        recent.taken_at = self._now
        recent.take(size, seconds)

    def is_known(self, size: int) -> bool:
        recent = self._recent.get(_key(size))
        return recent is not None and self._is_trusted(recent)

    @property
    def largest(self) -> int:
        """The largest known size, rounded up; 0 if there is none."""
        return max((math.ceil(recent.size) for recent in self._recent.values() if self._is_trusted(recent)), default=0)

    def of(self, sizes: NDArray[np.int64] | list[int]) -> NDArray[np.float64]:
        """The seconds of each size: measured, on a line between known sizes, or those of the largest known one."""
        estimates = sorted(
            (recent.size, recent.estimate) for recent in self._recent.values() if self._is_trusted(recent)
        )
        return np.interp(sizes, [0, *(size for size, _ in estimates)], [0.0, *(seconds for _, seconds in estimates)])

    def _is_trusted(self, recent: _Recent) -> bool:
        return len(recent.seconds) >= _TRUSTED and self._now - recent.taken_at <= _STALE


def _key(size: int) -> int:
    """The group of a size, an eighth of a doubling. Sizes up to 16 are alone in theirs."""
    return int(8 * math.log2(size))
