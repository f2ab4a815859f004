"""What guessing has gained and lost so far: it may lose a small part of the time that steps take, and no more.

Times are counted in plain steps, those in which nothing is guessed: one in which each sequence gets a token more than
that gains one. Every step pays in a little; what drafts cost beyond what they bring is taken out. Whatever lengths and
chances were believed, and however often a try fails, the losses stay within what was paid in.
"""

from __future__ import annotations

#: What each step pays in: the part of the time that may be lost in the long run.
_PART = 0.01
#: What may be lost at once, before anything was paid in or gained; and the most that is kept.
_FIRST, _MOST = 3.0, 8.0
#: From where on drafts are made again after all was lost.
_AGAIN = 0.5
#: A step that was held up tells little about drafts.
_LARGEST = 2.0


class Balance:
    def __init__(self) -> None:
        self._left = _FIRST
        self._spent = False

    @property
    def allows(self) -> bool:
        """Whether drafts may be made."""
        return not self._spent

    def passed(self) -> None:
        """A step has passed."""
        self._put(_PART)

    def entered(self, cost: float, gain: float) -> None:
        """Drafts have cost so many plain steps, and saved so many."""
        self._put(min(max(gain - cost, -_LARGEST), _LARGEST))

    def _put(self, steps: float) -> None:
        self._left = min(max(self._left + steps, -_LARGEST), _MOST)
        self._spent = self._left < (_AGAIN if self._spent else 0.0)
