"""Who gets a draft, who makes it, and what became of it: what planner, pipeline and scheduler ask."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Each
from typing import Protocol

from engine.plan import ScheduledSeq, StepPlan
from engine.request import Sequence
from engine.speculate.balance import Balance
from engine.speculate.guessed import FADE_OF_ALL, Guessed
from engine.speculate.pace import Depth, Pace

logger = logging.getLogger("penstock.engine")

#: Steps for which a chosen length stays, unless the number of sequences changes.
_TURNS = 8
#: Steps between tries with sequences whose tokens were last guessed badly: twice as many after each that fails, up to
#: the second. One sequence in so many then gets a draft of so many.
_TRY_EVERY, _TRY_SELDOM, _TRY_ONE_IN, _TRY_TOKENS = 32, 512, 8, 2
#: What is thought of a sequence before its first draft: as of all others, with the weight of so many trials.
_WEIGHT, _FIRST = 2.0, 0.7
#: Failures of the proposer in a row after which it is not asked any more.
_PATIENCE = 3


class Proposer(Protocol):
    """Guesses tokens: any, in any number up to a row's `room`. Nothing it does changes an output."""

    def propose(self, rows: Each[ScheduledSeq]) -> list[tuple[int, ...]]:
        """For each row, whose sequence has all of its tokens, what may follow them."""

    def forget(self) -> None:
        """After a failure: what is kept from step to step may be anything."""


class Speculation:
    """Used by the thread that steps, but for the two counters."""

    def __init__(
        self,
        proposer: Proposer,
        *,
        most: int,
        adaptive: bool = True,
        rope_switch: int | None = None,
        barred: Callable[[Sequence], bool] = lambda seq: False,
    ) -> None:
        """`most`: tokens of a draft. Where it is not `adaptive`, every draft may have as many. A draft does not go
        across the `rope_switch`, after which other keys are wanted. Sequences that are `barred` get none."""
        self._proposer = proposer
        self._most = most
        self._adaptive = adaptive
        self._rope_switch = rope_switch
        self._barred = barred
        self._pace = Pace(most)
        self._all = Guessed(fade=FADE_OF_ALL)
        self._balance = Balance()
        self._depth = Depth(0 if adaptive else most)
        self._decoding = -1
        self._turn = self._tried = 0
        self._trying: frozenset[int] = frozenset()
        self._try_every = _TRY_EVERY
        # Of the step that is entered: tokens that drafts have brought.
        self._brought = 0
        self._failures = 0
        #: Tokens that were guessed and computed, and those of them that were accepted.
        self.drafted = self.accepted = 0

    # ---- planning

    def begin(self, decoding: Each[Sequence]) -> None:
        """A step is about to be planned in which these sequences decode."""
        self._turn += 1
        self._trying = frozenset()
        if not self._adaptive or self._failures >= _PATIENCE:
            return
        if not self._balance.allows:
            self._depth, self._decoding = Depth(0), -1
            return
        if len(decoding) != self._decoding or self._turn % _TURNS == 0:
            self._decoding = len(decoding)
            self._depth = self._pace.choose([self._share(seq) for seq in decoding])
        if self._turn - self._tried >= self._try_every and not self._depth.hopeless:
            idle = [
                seq for seq in decoding if self._turn - self._of(seq).latest >= _TRY_EVERY and not self._barred(seq)
            ]
            if idle and self._pace.steps.known(len(decoding)):
                self._tried = self._turn
                # Until one is seen to be right.
                self._try_every = min(2 * self._try_every, _TRY_SELDOM)
                idle.sort(key=lambda seq: self._of(seq).latest)
                self._trying = frozenset(seq.serial for seq in idle[: -(-len(decoding) // _TRY_ONE_IN)])

    def wanted(self, seq: Sequence) -> int:
        """Tokens of the draft that a decoding sequence should have in this step."""
        return 0 if seq.pending else self._wanted(seq, 1)

    def waits(self, seq: Sequence) -> bool:
        """Whether a sequence whose next token is being sampled should not be planned before that is known, because it
        is to have a draft then."""
        guessed = self._of(seq)
        if guessed.rest > 0:
            guessed.rest -= 1
            return False
        return self._wanted(seq, 2) > 0

    def bar(self, seq: Sequence) -> None:
        """No draft for this sequence any more: one may have spoilt its numbers."""
        self._of(seq).barred = True

    def _wanted(self, seq: Sequence, ahead: int) -> int:
        """`ahead`: tokens that come without a draft until its last one does."""
        left = seq.output.limit - seq.output.count - ahead
        if self._rope_switch is not None and len(seq.tokens) <= self._rope_switch:
            left = min(left, self._rope_switch + 1 - ahead - len(seq.tokens))
        if left <= 0 or self._failures >= _PATIENCE or self._barred(seq) or self._of(seq).barred:
            return 0
        if not self._adaptive:
            return min(left, self._most)
        length = self._depth.of(self._share(seq)) if self._depth.most else 0
        if seq.serial in self._trying:
            length = max(length, min(_TRY_TOKENS, self._most))
        return min(left, length)

    def _of(self, seq: Sequence) -> Guessed:
        if seq.guessed is None:
            seq.guessed = Guessed(latest=self._turn)
        return seq.guessed

    def _share(self, seq: Sequence) -> float:
        return self._of(seq).share(self._all.share(_FIRST, _WEIGHT), _WEIGHT)

    # ---- a step

    def propose(self, plan: StepPlan) -> float:
        """Give the rows of a plan their drafts. Returns the seconds that it took. A proposer that fails costs the
        drafts and nothing else; one that fails again and again is not asked any more."""
        rows = [row for row in plan.rows if row.room]
        if not rows:
            return 0.0
        began = time.perf_counter()
        try:
            drafts = self._proposer.propose(rows)
        except Exception:
            self._failures += 1
            logger.exception(
                "no tokens could be guessed%s",
                "; they are not guessed any more" if self._failures >= _PATIENCE else "",
            )
            self._proposer.forget()
            return time.perf_counter() - began
        self._failures = 0
        for row, draft in zip(rows, drafts, strict=True):
            if draft:
                plan.guess(row, draft)
        took = time.perf_counter() - began
        self._pace.passes.take(len(rows), took / max(row.room for row in rows))
        return took

    def took(self, plan: StepPlan, seconds: float, guessing: float) -> None:
        """A step has been entered that took so many seconds, and `guessing` more to have its drafts made."""
        brought, self._brought = self._brought, 0
        self._balance.passed()
        decoding = sum(row.samples and row.known - row.start == 1 for row in plan.rows)
        whole = decoding == len(plan.rows)
        plain = self._pace.steps.of(decoding) if decoding else 0.0
        if plain and (guessing or any(row.draft for row in plan.rows)):
            # What drafts cost a step in which there are prompts too is not to be told apart.
            more = seconds - plain if whole else 0.0
            self._balance.entered((guessing + more) / plain, brought / decoding)
        if whole:
            self._pace.steps.take(plan.num_tokens, seconds)

    def entered(self, row: ScheduledSeq, accepted: int) -> None:
        """Of a row with room for a draft, how many tokens of it were accepted."""
        guessed = self._of(row.seq)
        if not row.draft:
            guessed.miss()
            return
        guessed.latest = self._turn
        guessed.take(len(row.draft), accepted)
        self._all.take(len(row.draft), accepted)
        self.drafted += len(row.draft)
        self.accepted += accepted
        self._brought += accepted
        if accepted:
            self._try_every = _TRY_EVERY
