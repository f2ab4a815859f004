"""Prompt lookup: proposes the tokens that followed the same words earlier in the sequence's prompt or output.

It costs only a search of the text, and is right if the output repeats its input: edited code, quotations, summaries,
loops. (Saxena 2023, "Prompt Lookup Decoding"; Yang et al., arXiv 2304.04487.)
"""

from __future__ import annotations

from collections.abc import Sequence as Each

from engine.errors import EngineError
from engine.plan import ScheduledSeq
from engine.sequence import Sequence

#: The most and the fewest last tokens to search for. The search begins with the most.
_LONGEST, _SHORTEST = 4, 2
#: The largest vocabulary: tokens are kept as the characters of a text, which Python searches fast.
_MOST_TOKENS = 0x110000


class Lookup:
    """A Proposer that searches the sequence's own tokens, kept for each slot as characters of a text."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        """Raises EngineError if the vocabulary has more tokens than Unicode has characters."""
        if vocab_size > _MOST_TOKENS:
            raise EngineError(
                f"speculate='lookup' is for vocabularies of up to {_MOST_TOKENS} tokens, and the model's has "
                f"{vocab_size}; use 'draft' or 'none'"
            )
        self._owners: list[Sequence | None] = [None] * slots
        self._texts = [""] * slots

    def propose(self, rows: Each[ScheduledSeq]) -> list[tuple[int, ...]]:
        """The tokens after the latest earlier occurrence of the longest matching end. Empty if there is none."""
        return [self._after(self._text(row.seq), row.max_draft) for row in rows]

    def forget(self) -> None:
        """Does nothing: all kept state follows from the sequences' tokens."""

    def _text(self, seq: Sequence) -> str:
        slot = seq.slot
        if self._owners[slot] is not seq:
            self._owners[slot], self._texts[slot] = seq, ""
        # A sequence's tokens are only ever appended to.
        self._texts[slot] += "".join(map(chr, seq.tokens[len(self._texts[slot]) :]))
        return self._texts[slot]

    @staticmethod
    def _after(text: str, limit: int) -> tuple[int, ...]:
        for size in range(min(_LONGEST, len(text) - 1), _SHORTEST - 1, -1):
            start = text.rfind(text[-size:], 0, len(text) - 1)
            if start >= 0:
                # If fewer than `limit` tokens follow the occurrence, the text has begun to repeat itself.
                following = text[start + size :]
                return tuple(map(ord, (following * -(-limit // len(following)))[:limit]))
        return ()
