"""What one step computes: made by the scheduler, executed by the runner, handed back with what was sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.logprobs import ScoredPart, TokenLogprobs
from engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledSeq:
    """One sequence's part of a step: compute tokens[start : start + count] on top of the start tokens in cache.

    Behind its last token may come a draft: tokens that are guessed to follow. Those are computed too, and count in
    `count`; after each of them, as after the last token, the next is chosen.
    """

    seq: Sequence
    start: int
    count: int
    samples: bool
    """True where the last of these tokens is the last there is: its logits choose the next."""
    scored: ScoredPart | None = None
    """Set by the runner where the log probabilities of the prompt are wanted."""
    room: int = 0
    """For how many draft tokens the sequence has places."""
    draft: tuple[int, ...] = ()

    @property
    def known(self) -> int:
        """The end of the tokens that are certain: what is computed after them may prove wrong."""
        return self.start + self.count - len(self.draft)

    def computed(self) -> list[int]:
        """The tokens that are computed, the draft's included."""
        tokens = self.seq.tokens[self.start : self.start + self.count]
        return [*tokens, *self.draft] if self.draft else tokens

    @property
    def pending(self) -> bool:
        """True where the one token to compute is not known: the step in flight samples it, for the sequence's slot. Of
        meaning until the plan is launched."""
        return self.seq.pending

    def wanted(self) -> range:
        """Positions of this part whose logits score the prompt's next token; empty where nobody asked."""
        scores = self.seq.scores
        return range(0) if scores is None else scores.wanted(self.start, self.start + self.count)


@dataclass(slots=True)
class StepPlan:
    rows: list[ScheduledSeq] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """(KV group, source block, destination block), whole blocks, to be done before the forward pass. In a group no
    destination comes twice and no source is the destination of an earlier copy, so in order or all at once gives the
    same. A source may be written by a row of the same plan, and be the destination of a later copy: once written, the
    plan's copies cannot be made again."""
    num_tokens: int = 0
    """Computed by all rows, those of drafts included."""

    def guess(self, row: ScheduledSeq, draft: tuple[int, ...]) -> None:
        """Have a row compute a draft, at most as long as its `room`."""
        row.draft = draft
        row.count += len(draft)
        self.num_tokens += len(draft)


@dataclass(slots=True)
class Sampled:
    """What the runner found for a row that samples."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Set when this row alone failed, for instance on logits that are not finite; token_id is then ignored."""
    refused: bool = False
    """It failed for what its request asked for: trying again would not help."""
    then: tuple[Sampled, ...] = ()
    """What is chosen after it, one for each token of the row's draft that was accepted."""


def accepted(draft: tuple[int, ...], chosen: list[Sampled]) -> Sampled:
    """The result of a row from what was chosen after its last token and after each of its `draft`.

    A draft token is accepted if and only if it is what was chosen in its place: all that comes after it was then
    computed, and chosen, on the very tokens that it would have been without a draft.
    """
    right = 0
    while right < len(draft) and chosen[right].error is None and chosen[right].token_id == draft[right]:
        right += 1
    if right:
        chosen[0].then = tuple(chosen[1 : right + 1])
    return chosen[0]
