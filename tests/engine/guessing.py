"""Proposers that are right as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from engine.plan import ScheduledSeq
from engine.sequence import Sequence as Running

#: (sequence, its tokens and those guessed so far) -> the token that the target would choose next.
Right = Callable[[Running, list[int]], int]


class Guesser:
    """Guesses up to `max_draft` tokens of each row, each right with the chance `agreement`."""

    def __init__(self, right: Right, agreement: float, vocab_size: int, whole: bool = False) -> None:
        """`whole`: as many tokens as there is room for, in place of any number."""
        self._right = right
        self._agreement = agreement
        self._vocab_size = vocab_size
        self._whole = whole
        self._random = random.Random(1)

    def propose(self, rows: Sequence[ScheduledSeq]) -> list[tuple[int, ...]]:
        return [self._guess(row) for row in rows]

    def _guess(self, row: ScheduledSeq) -> tuple[int, ...]:
        tokens = list(row.seq.tokens)
        for _ in range(row.max_draft if self._whole else self._random.randint(0, row.max_draft)):
            token = self._right(row.seq, tokens)
            if self._random.random() >= self._agreement:
                token = (token + 1) % self._vocab_size
            tokens.append(token)
        return tuple(tokens[len(row.seq.tokens) :])

    def forget(self) -> None:
        pass
