"""Who gets a draft, who makes it, and what became of it: what planner, pipeline and scheduler ask."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Each
from typing import Protocol

from engine.plan import ScheduledSeq, StepPlan
from engine.sequence import FADE_OF_ALL, Guessed, Sequence
from engine.speculate.balance import Balance
from engine.speculate.pace import Pace

logger = logging.getLogger("penstock.engine")

#: Sequences for which chosen lengths stay one step more: choosing takes time with each of them. Where drafts do not pay
#: this stays for so many steps at least.
_CHOOSE = 8
#: Turns between two drafts of a sequence within which the proposer is not behind with it.
_FOLLOWS = 2
#: Steps between tries with sequences whose tokens were last guessed badly: twice as many after each that fails, up to
#: the second. One sequence in so many then gets a draft of so many.
_TRY_EVERY, _TRY_SELDOM, _TRY_ONE_IN, _TRY_TOKENS = 32, 512, 8, 2
#: What is thought of a sequence before its first draft: as of all others, with the weight of so many trials; of all,
#: before their first.
_WEIGHT, _WEIGHT_OF_FIRST, _FIRST = 4.0, 2.0, 0.7
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`most`: tokens of a draft. Where it is not `adaptive`, every draft may have as many. A draft does not go
        across the `rope_switch`, after which other keys are wanted. Sequences that are `barred` get none. The proposer
        is timed by the `clock`, in seconds."""
        self._proposer = proposer
        self._most = most
        self._adaptive = adaptive
        self._rope_switch = rope_switch
        self._barred = barred
        self._clock = clock
        self._pace = Pace(most)
        self._all = Guessed(fade=FADE_OF_ALL)
        self._balance = Balance()
        # The lengths that were chosen, by serial.
        self._lengths: dict[int, int] = {}
        self._idle = self._hopeless = False
        self._turn = self._chosen = self._tried = 0
        self._trying: frozenset[int] = frozenset()
        self._try_every = _TRY_EVERY
        # Of the step that is entered: tokens that drafts have brought, sequences that the proposer began with, and the
        # seconds in which it caught up with them.
        self._brought = self._begun = 0
        self._behind = 0.0
        # What a plain step took on average when it was last seen.
        self._plain = 0.0
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
            self._lengths = {}
            return
        stays = len(decoding) // _CHOOSE + (_CHOOSE if self._idle else 0)
        if self._turn - self._chosen > stays or any(seq.serial not in self._lengths for seq in decoding):
            self._choose(decoding)
        due = self._turn - self._tried >= self._try_every
        # Of whom nothing is known, that others were guessed badly says less.
        if (due or (self._turn % _TRY_EVERY == 0 and self._balance.rich)) and not self._hopeless:
            self._try(decoding, due)

    def _choose(self, decoding: Each[Sequence]) -> None:
        self._chosen = self._turn
        shares = [self._share(seq) for seq in decoding]
        new = [i for i, seq in enumerate(decoding) if not self._follows(seq)]
        begins = self._balance.begins
        if len(new) > begins:
            new.sort(key=lambda i: -shares[i])
            for i in new[begins:]:
                shares[i] = 0.0
        lengths = self._pace.choose(shares)
        self._hopeless = lengths.hopeless
        self._idle = not any(lengths.each) and self._pace.steps.known(len(decoding))
        self._lengths = {seq.serial: length for seq, length in zip(decoding, lengths.each, strict=True)}

    def _try(self, decoding: Each[Sequence], due: bool) -> None:
        """Choose some that had no draft for long; unless that is `due`, those that never had one."""
        idle = [
            seq
            for seq in decoding
            if self._turn - self._of(seq).latest >= _TRY_EVERY
            and (due or not self._of(seq).tried)
            and not self._barred(seq)
        ]
        most = min(-(-len(decoding) // _TRY_ONE_IN), self._balance.begins)
        if not idle or not most or not self._pace.steps.known(len(decoding)):
            return
        if due:
            self._tried = self._turn
            # Until one is seen to be right.
            self._try_every = min(2 * self._try_every, _TRY_SELDOM)
        idle.sort(key=lambda seq: self._of(seq).latest)
        self._trying = frozenset(seq.serial for seq in idle[:most])

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
        length = self._lengths.get(seq.serial, 0)
        if seq.serial in self._trying:
            length = max(length, min(_TRY_TOKENS, self._most))
        return min(left, length)

    def _follows(self, seq: Sequence) -> bool:
        """Whether it had a draft so lately that the proposer is not behind with it."""
        return self._turn - self._of(seq).latest <= _FOLLOWS and self._of(seq).tried > 0

    def _of(self, seq: Sequence) -> Guessed:
        if seq.guessed is None:
            seq.guessed = Guessed(latest=self._turn)
        return seq.guessed

    def _share(self, seq: Sequence) -> float:
        return self._of(seq).share(self._all.share(_FIRST, _WEIGHT_OF_FIRST), _WEIGHT)

    # ---- a step

    def propose(self, plan: StepPlan) -> float:
        """Give the rows of a plan their drafts. Returns the seconds that it took. A proposer that fails costs the
        drafts and nothing else; one that fails again and again is not asked any more."""
        rows = [row for row in plan.rows if row.room]
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
        took = self._clock() - began
        longest = max(len(row.draft) for row in rows)
        count = sum(bool(row.draft) for row in rows)
        self._begun = sum(not self._follows(row.seq) for row in rows)
        if not self._begun:
            if longest:
                self._pace.passes.take(count, took / longest)
        else:
            self._behind = max(0.0, took - longest * self._pace.passes.curve(1, count).of(count))
        return took

    def took(self, plan: StepPlan, seconds: float, guessing: float) -> None:
        """A step has been entered that took so many seconds, and `guessing` more to have its drafts made."""
        brought, self._brought = self._brought, 0
        behind, self._behind = self._behind, 0.0
        begun, self._begun = self._begun, 0
        steps = self._pace.steps
        decoding = sum(row.samples and row.known - row.start == 1 for row in plan.rows)
        drafted = sum(len(row.draft) for row in plan.rows)
        whole = decoding == len(plan.rows)
        if whole:
            steps.take(plan.num_tokens, seconds)
        plain = self._plain = steps.mean(decoding) or self._plain
        if not plain:
            return
        self._balance.passed(seconds / plain)
        if begun:
            self._balance.begun(begun, behind / plain)
        if decoding and (drafted or guessing):
            more = self._pace.longer(decoding, drafted)
            if more is None:
                # What drafts cost a step in which there are prompts too is not to be told apart.
                more = seconds / plain - 1 if whole else 0.0
            self._balance.entered((guessing - behind) / plain + more, brought / decoding)

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
