"""Decides which sequences get drafts, has them made, and records their acceptance, for planner, pipeline and
scheduler."""

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

#: Chosen draft lengths stay one more step for every 8 sequences, because choosing takes time for each sequence. If
#: drafts do not pay, the choice stays for at least 8 steps.
_CHOOSE = 8
#: The most turns between two drafts of a sequence after which the proposer is still up to date with it.
_FOLLOWS = 2
#: The steps between tries with sequences whose drafts were rejected lately. They double after each failed try, from the
#: first number up to the second. One in _TRY_ONE_IN sequences then gets a draft of _TRY_TOKENS tokens.
_TRY_EVERY, _TRY_SELDOM, _TRY_ONE_IN, _TRY_TOKENS = 32, 512, 8, 2
#: Priors of the acceptance rate. A sequence begins with the rate of all sequences, weighed as _WEIGHT trials. All
#: sequences begin with _FIRST, weighed as _WEIGHT_OF_FIRST trials.
_WEIGHT, _WEIGHT_OF_FIRST, _FIRST = 4.0, 2.0, 0.7
#: The proposer's failures in a row after which it is no longer used.
_PATIENCE = 3


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
        most: int,
        adaptive: bool = True,
        rope_switch: int | None = None,
        barred: Callable[[Sequence], bool] = lambda seq: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`most`: the most tokens of a draft; if not `adaptive`, every draft may have that many. `rope_switch`: no
        draft goes past this length, after which keys differ. `barred`: whether a sequence gets no drafts. `clock`:
        seconds, to time the proposer."""
        self._proposer = proposer
        self._most = most
        self._adaptive = adaptive
        self._rope_switch = rope_switch
        self._barred = barred
        self._clock = clock
        self._pace = Pace(most)
        self._all = Guessed(fade=FADE_OF_ALL)
        self._balance = Balance()
        # The chosen draft lengths, by serial.
        self._lengths: dict[int, int] = {}
        self._idle = self._hopeless = False
        self._turn = self._chosen = self._tried = 0
        self._trying: frozenset[int] = frozenset()
        self._try_every = _TRY_EVERY
        # For the current step: the accepted draft tokens, the sequences that the proposer began with, and the seconds
        # that it took to catch up with them.
        self._brought = self._begun = 0
        self._behind = 0.0
        # The last known mean duration of a plain step, in seconds.
        self._plain = 0.0
        self._failures = 0
        #: The number of draft tokens computed, and of those accepted.
        self.drafted = self.accepted = 0

    # ---- planning

    def begin(self, decoding: Each[Sequence]) -> None:
        """Choose draft lengths for a step that is about to be planned, in which these sequences decode."""
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
        # The rejected drafts of other sequences say little about unknown ones.
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
        """Choose some sequences without a recent draft to try. Unless a try is `due`, only those that never had one."""
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
            # Reset once a draft token is accepted.
            self._try_every = min(2 * self._try_every, _TRY_SELDOM)
        idle.sort(key=lambda seq: self._of(seq).latest)
        self._trying = frozenset(seq.serial for seq in idle[:most])

    def wanted(self, seq: Sequence) -> int:
        """The number of draft tokens that a decoding sequence should have in this step."""
        return 0 if seq.pending else self._wanted(seq, 1)

    def waits(self, seq: Sequence) -> bool:
        """Whether a sequence whose next token is being sampled should wait for that token, because it is to have a
        draft then."""
        guessed = self._of(seq)
        if guessed.rest > 0:
            guessed.rest -= 1
            return False
        return self._wanted(seq, 2) > 0

    def bar(self, seq: Sequence) -> None:
        """Make no more drafts for this sequence: one may have caused its NaNs."""
        self._of(seq).barred = True

    def _wanted(self, seq: Sequence, ahead: int) -> int:
        """The draft length for a sequence. `ahead`: the number of tokens that the step samples before the draft."""
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
        """Whether the sequence's last draft is so recent that the proposer is up to date with it."""
        return self._turn - self._of(seq).latest <= _FOLLOWS and self._of(seq).tried > 0

    def _of(self, seq: Sequence) -> Guessed:
        if seq.guessed is None:
            seq.guessed = Guessed(latest=self._turn)
        return seq.guessed

    def _share(self, seq: Sequence) -> float:
        return self._of(seq).share(self._all.share(_FIRST, _WEIGHT_OF_FIRST), _WEIGHT)

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
        """Record the times of a step: `seconds` to run it, and `guessing` seconds to make its drafts."""
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
                # In a step with prompts, the cost of drafts cannot be separated, and counts as 0.
                more = seconds / plain - 1 if whole else 0.0
            self._balance.entered((guessing - behind) / plain + more, brought / decoding)

    def entered(self, row: ScheduledSeq, accepted: int) -> None:
        """Record how many draft tokens of a row were accepted. The row may have had an empty draft."""
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
