"""What guessing has gained and lost so far: it may lose a small part of the time that steps take, and no more.

Times are counted in plain steps, those in which nothing is guessed: one in which each sequence gets a token more than
that gains one. All time that passes pays in a little; what drafts cost beyond what they bring is taken out. Whatever
lengths and chances were believed, and however often a try fails, the losses stay within what was paid in.

To begin with a sequence (a draft model has its whole prompt to read) is an investment: it has an account of its own,
which gains pay back. As many are begun with at a time as it covers; those who have drafts keep them.
"""

from __future__ import annotations

#: What all time pays into each account: the part of it that may be lost in the long run.
_PART = 0.01
#: What may be lost at once, before anything was paid in or gained; and the most that is kept.
_FIRST, _MOST = 2.0, 8.0
#: From where on drafts are made again after all was lost, and sequences tried that nobody asked about.
_AGAIN, _RICH = 0.5, 1.0
#: A step that was held up tells little about drafts. Beginning takes long with a long prompt; what is more was a stall.
_LARGEST, _LONGEST = 2.0, 100.0
#: What the latest beginning counts in what one is thought to cost; and the least that it is thought to.
_FRESH, _LEAST = 0.3, 1e-3


class Balance:
    def __init__(self) -> None:
        self._left = self._to_begin = _FIRST
        self._spent = False
        # What a beginning costs; 0.0 before the first.
        self._each = 0.0

    @property
    def allows(self) -> bool:
        """Whether drafts may be made."""
        return not self._spent

    @property
    def begins(self) -> int:
        """For how many sequences that had none lately drafts may be made: one, before it was seen what that costs."""
        if self._to_begin <= 0.0:
            return 0
        return max(1, int(self._to_begin / self._each)) if self._each else 1

    @property
    def rich(self) -> bool:
        """Whether sequences may be tried that nothing is known of, though others were not worth it."""
        return self.allows and self._to_begin >= _RICH

    def passed(self, steps: float) -> None:
        """So many plain steps' time has passed."""
        self._put(_PART * min(steps, _LONGEST), _PART * min(steps, _LONGEST))

    def entered(self, cost: float, gain: float) -> None:
        """Drafts have cost so many plain steps, and saved so many."""
        net = min(max(gain - cost, -_LARGEST), _LARGEST)
        self._put(net, net)

    def begun(self, sequences: int, cost: float) -> None:
        """So many plain steps were spent on getting to know so many sequences."""
        each = max(cost / sequences, _LEAST)
        self._each += (each - self._each) * (_FRESH if self._each else 1.0)
        self._put(0.0, -cost)

    def _put(self, steps: float, to_begin: float) -> None:
        self._left = min(max(self._left + steps, -_LARGEST), _MOST)
        self._to_begin = min(max(self._to_begin + to_begin, -_LONGEST), _MOST)
        self._spent = self._left < (_AGAIN if self._spent else 0.0)
