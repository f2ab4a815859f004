"""Prompt lookup: what comes next is what came after the same words before, in the prompt or in the output.

Costs nothing but a search of the text, and is right where output repeats its input: code that is edited, quotations,
summaries, loops. (Saxena 2023, "Prompt Lookup Decoding"; Yang et al., arXiv 2304.04487.)
"""

from __future__ import annotations

from collections.abc import Sequence as Each

from engine.errors import EngineError
from engine.plan import ScheduledSeq
from engine.sequence import Sequence

#: Tokens at the end that must have stood together before: the most are looked for first.
_LONGEST, _SHORTEST = 4, 2
#: A sequence's tokens are kept as the characters of a text, which Python searches fast: as many as there are.
_MOST_TOKENS = 0x110000


class Lookup:
    """A Proposer. Slot by slot, the tokens of the sequence that runs there, as characters."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        """Raises EngineError for a vocabulary of more tokens than there are characters."""
        if vocab_size > _MOST_TOKENS:
            raise EngineError(
                f"speculate='lookup' is for vocabularies of up to {_MOST_TOKENS} tokens, and the model's has "
                f"{vocab_size}; use 'draft' or 'none'"
            )
        self._owners: list[Sequence | None] = [None] * slots
        self._texts = [""] * slots

    def propose(self, rows: Each[ScheduledSeq]) -> list[tuple[int, ...]]:
        """What followed the latest place where the longest end stood before; nothing where none did."""
        return [self._after(self._text(row.seq), row.room) for row in rows]

    def forget(self) -> None:
        """Nothing is kept that the sequences do not say."""

    def _text(self, seq: Sequence) -> str:
        slot = seq.slot
        if self._owners[slot] is not seq:
            self._owners[slot], self._texts[slot] = seq, ""
        # A sequence's tokens only ever become more.
        self._texts[slot] += "".join(map(chr, seq.tokens[len(self._texts[slot]) :]))
        return self._texts[slot]

    @staticmethod
    def _after(text: str, most: int) -> tuple[int, ...]:
        for size in range(min(_LONGEST, len(text) - 1), _SHORTEST - 1, -1):
            place = text.rfind(text[-size:], 0, len(text) - 1)
            if place >= 0:
                # Where the end stood so lately that less than `most` follows, it has begun to repeat itself.
                following = text[place + size :]
                return tuple(map(ord, (following * -(-most // len(following)))[:most]))
        return ()
