"""A budget for speculation: it may lose a small part of the time that steps take, and no more.

Times are counted in plain steps, which have no drafts. A step in which each sequence gets one more token than in a
plain step gains one. All elapsed time pays a little into the budget. Drafts that cost more than they gain take the
difference out. So the losses stay within the budget, however wrong the estimates are and however often a try fails.

Beginning with a sequence is an investment, because a draft model has to read its whole prompt. It has a budget of its
own, which gains pay back. That budget limits how many sequences begin at one time. Sequences with drafts keep them.
"""

from __future__ import annotations

#: The part of all time that is paid into each budget, and so may be lost in the long run.
_PART = 0.01
#: The initial budget, in plain steps, and the most that a budget holds.
_FIRST, _MOST = 2.0, 8.0
#: The budget from which drafts resume after it was used up, and unknown sequences are tried.
_AGAIN = 0.5
#: Limits of a single entry, because a delayed step tells little about drafts: of gains and losses, and of the longer
#: costs of beginning with a long prompt.
_LARGEST, _LONGEST = 2.0, 100.0
#: The least cost of one beginning.
_LEAST = 1e-3


class Balance:
    def __init__(self) -> None:
        self._left = self._to_begin = _FIRST
        self._spent = False
        # The latest cost of one beginning; 0.0 before the first.
        self._each = 0.0

    @property
    def allows(self) -> bool:
        """Whether the budget allows drafts."""
        return not self._spent

    @property
    def begins(self) -> int:
        """The number of sequences without a recent draft that may get one. It is 1 while the cost is unknown."""
        if self._to_begin <= 0.0:
            return 0
        return max(1, int(self._to_begin / self._each)) if self._each else 1

    @property
    def rich(self) -> bool:
        """Whether unknown sequences may be tried although drafts did not pay for others."""
        return self.allows and self._to_begin >= _AGAIN

    def passed(self, steps: float) -> None:
        """Pay in for elapsed time, in plain steps."""
        self._put(_PART * min(steps, _LONGEST), _PART * min(steps, _LONGEST))

    def entered(self, cost: float, gain: float) -> None:
        """Enter the cost and the gain of drafts, in plain steps."""
        net = min(max(gain - cost, -_LARGEST), _LARGEST)
        self._put(net, net)

    def begun(self, sequences: int, cost: float) -> None:
        """Enter the cost, in plain steps, of beginning with `sequences` sequences."""
        self._each = max(cost / sequences, _LEAST)
        self._put(0.0, -cost)

    def _put(self, steps: float, to_begin: float) -> None:
        self._left = min(max(self._left + steps, -_LARGEST), _MOST)
        self._to_begin = min(max(self._to_begin + to_begin, -_LONGEST), _MOST)
        self._spent = self._left < (_AGAIN if self._spent else 0.0)
