"""Decides which sequences get drafts, has them made, and records their acceptance, for planner, pipeline and
scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Each
from typing import Protocol

from engine.errors import EngineError, ErrorText
from engine.plan import ScheduledSeq, StepPlan
from engine.sequence import Sequence
from engine.speculate.policy import Policy

logger = logging.getLogger("penstock.engine")

#: The proposer's failures in a row after which it is no longer used.
_PATIENCE = 3
#: The most and the fewest last tokens to search for. The search begins with the most.
_LONGEST, _SHORTEST = 4, 2
#: The largest vocabulary: tokens are kept as the characters of a text, which Python searches fast.
_MOST_TOKENS = 0x110000


class Proposer(Protocol):
    """The interface that makes drafts: any tokens, up to a row's `max_draft`. No draft ever changes an output."""

    def propose(self, rows: Each[ScheduledSeq]) -> list[tuple[int, ...]]:
        """Draft tokens for each row. No row's sequence has an UNKNOWN token."""

    def forget(self) -> None:
        """Discard all cached state after a failure."""


class Speculation:
    """Manages drafts. Used by the thread that runs steps; other threads may read the two counters."""

    def __init__(
        self,
        proposer: Proposer,
        *,
        max_tokens: int,
        adaptive: bool = True,
        rope_switch: int | None = None,
        barred: Callable[[Sequence], bool] = lambda seq: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_tokens`: the longest draft; if not `adaptive`, every draft may have that many tokens. `rope_switch`: no
        draft goes past this length, after which keys differ. `barred`: whether a sequence gets no drafts. `clock`:
        seconds, to time the proposer."""
        self._proposer = proposer
        self._max_tokens = max_tokens
        self._adaptive = adaptive
        self._rope_switch = rope_switch
        self._barred = barred
        self._clock = clock
        self._policy = Policy(max_tokens)
        # The chosen draft lengths, by serial.
        self._lengths: dict[int, int] = {}
        self._failures = 0
        #: The number of draft tokens computed, and of those accepted.
        self.drafted = self.accepted = 0

    # ---- planning

    def begin(self, decoding: Each[Sequence]) -> None:
        """Choose draft lengths for a step that is about to be planned, in which these sequences decode."""
        if self._adaptive and self._failures < _PATIENCE:
            may = [seq for seq in decoding if not (seq.guessed.barred or self._barred(seq))]
            self._lengths = self._policy.choose(len(decoding), may)

    def draft_limit(self, seq: Sequence) -> int:
        """The number of draft tokens that a decoding sequence should have in this step."""
        return 0 if seq.pending else self._draft_limit(seq, 1)

    def waits(self, seq: Sequence) -> bool:
        """Whether a sequence whose next token is being sampled should wait for that token, because it is to have a
        draft then."""
        guessed = seq.guessed
        if guessed.pause > 0:
            guessed.pause -= 1
            return False
        return self._draft_limit(seq, 2) > 0

    def bar(self, seq: Sequence) -> None:
        """Make no more drafts for this sequence: one may have caused its NaNs."""
        seq.guessed.barred = True

    def _draft_limit(self, seq: Sequence, ahead: int) -> int:
        """The draft length for a sequence. `ahead`: the number of tokens that the step samples before the draft."""
        remaining = seq.output.limit - seq.output.count - ahead
        if self._rope_switch is not None and len(seq.tokens) <= self._rope_switch:
            remaining = min(remaining, self._rope_switch + 1 - ahead - len(seq.tokens))
        if remaining <= 0 or self._failures >= _PATIENCE or self._barred(seq) or seq.guessed.barred:
            return 0
        if not self._adaptive:
            return min(remaining, self._max_tokens)
        return min(remaining, self._lengths.get(seq.serial, 0))

    # ---- a step

    def propose(self, plan: StepPlan) -> float:
        """Add drafts to the rows of a plan. Returns the seconds that this took.

        If the proposer fails, the step only lacks its drafts. After repeated failures the proposer is no longer used.
        """
        rows = [row for row in plan.rows if row.max_draft]
        if not rows:
            return 0.0
        began = self._clock()
        try:
            drafts = self._proposer.propose(rows)
        except Exception:
            self._failures += 1
            logger.exception(
                "no tokens could be guessed%s",
                "; they are not guessed any more" if self._failures >= _PATIENCE else "",
            )
            self._proposer.forget()
            return self._clock() - began
        self._failures = 0
        for row, draft in zip(rows, drafts, strict=True):
            if draft:
                plan.guess(row, draft)
        elapsed = self._clock() - began
        self._policy.proposed(rows, elapsed)
        return elapsed

    def record(self, plan: StepPlan, seconds: float, guessing: float) -> None:
        """Record the times of a step: `seconds` to run it, and `guessing` seconds to make its drafts."""
        self._policy.record(plan, seconds, guessing)

    def entered(self, row: ScheduledSeq, accepted: int) -> None:
        """Record how many draft tokens of a row were accepted. The row may have had an empty draft."""
        if not row.draft:
            row.seq.guessed.miss()
            return
        self._policy.entered(row.seq, len(row.draft), accepted)
        self.drafted += len(row.draft)
        self.accepted += accepted


class Lookup:
    """A Proposer that searches the sequence's own tokens, kept for each slot as characters of a text.

    It proposes the tokens that followed the same words earlier in prompt or output. That costs only a search, and is
    right if the output repeats its input: edited code, quotations, summaries, loops. (Saxena 2023, "Prompt Lookup
    Decoding"; Yang et al., arXiv 2304.04487.)
    """

    def __init__(self, slots: int, vocab_size: int) -> None:
        """Raises EngineError if the vocabulary has more tokens than Unicode has characters."""
        if vocab_size > _MOST_TOKENS:
            raise EngineError(
                ErrorText.of(
                    "{speculate}='lookup' is for vocabularies of up to {} tokens, and the model's has {}; use 'draft' "
                    "or 'none'",
                    _MOST_TOKENS,
                    vocab_size,
                )
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
