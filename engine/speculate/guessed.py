"""How well the tokens of one sequence, or of all, were guessed lately."""

from __future__ import annotations

from dataclasses import dataclass

#: What a trial counts less with each draft after it: of one sequence the last sixteen matter, of all the last fifty.
_FADE = 0.94
FADE_OF_ALL = 0.98
#: The longest that a sequence for which nothing was guessed is planned ahead again, in tokens.
_LONGEST_REST = 32


@dataclass(slots=True)
class Guessed:
    right: float = 0.0
    """Draft tokens that were accepted, of late."""
    tried: float = 0.0
    """These, and the first of each draft that was not."""
    latest: int = 0
    """The turn of its latest draft (Speculation.begin)."""
    rest: int = 0
    """For so many steps the sequence need not wait for a draft, because there was none."""
    missed: int = 0
    """Times in a row that there was none."""
    barred: bool = False
    """Whether there is to be none any more."""
    fade: float = _FADE

    def take(self, drafted: int, accepted: int) -> None:
        """Enter a draft of so many tokens. What comes after the first wrong one was not tried."""
        self.right = self.right * self.fade + accepted
        self.tried = self.tried * self.fade + accepted + (accepted < drafted)
        self.missed = self.rest = 0

    def miss(self) -> None:
        """Nothing was guessed."""
        self.missed += 1
        self.rest = min(1 << min(self.missed, 6), _LONGEST_REST)

    def share(self, before: float, weight: float) -> float:
        """The chance that a token is accepted, where `before` was thought so with the `weight` of so many trials."""
        return (self.right + before * weight) / (self.tried + weight)
