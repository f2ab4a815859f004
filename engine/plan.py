"""The plan of one step: made by the scheduler, executed by the runner, returned with the sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.beams import Continuation
from engine.errors import TextError
from engine.request import ScoredPart, TextRow, TokenLogprobs
from engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledSeq:
    """One sequence's part of a step: compute tokens[start : start + count] after the `start` tokens in the KV cache.

    Draft tokens may follow its last token. They are computed too and are included in `count`. After each of them, as
    after the last token, a next token is sampled.
    """

    seq: Sequence
    start: int
    count: int
    samples: bool
    """Whether this part includes the sequence's last token, whose logits choose the next token."""
    scored: ScoredPart | None = None
    """The prompt's log probabilities, set by the runner if they are wanted."""
    max_draft: int = 0
    """The number of draft tokens for which the sequence has KV slots."""
    draft: tuple[int, ...] = ()

    @property
    def known_tokens(self) -> int:
        """The end of the tokens that are certain. The draft tokens after them may be rejected."""
        return self.start + self.count - len(self.draft)

    def computed(self) -> list[int]:
        """The tokens that are computed, draft tokens included."""
        tokens = self.seq.tokens[self.start : self.start + self.count]
        return [*tokens, *self.draft] if self.draft else tokens

    @property
    def pending(self) -> bool:
        """Whether the one token to compute is not known yet, because the step in flight samples it for this sequence's
        slot. Only meaningful until the plan is launched."""
        return self.seq.pending

    def scored_span(self) -> range:
        """Positions of this part whose logits score the prompt's next token. Empty unless the request asked for
        them."""
        scores = self.seq.scores
        return range(0) if scores is None else scores.span_in(self.start, self.start + self.count)


@dataclass(slots=True)
class StepPlan:
    rows: list[ScheduledSeq] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """(KV group, source block, destination block): whole blocks to copy before the forward pass. In a group, no
    destination occurs twice and no source is the destination of an earlier copy, so the order of copies is free. A row
    of the same plan may write a source block, and a later copy may overwrite it, so the copies cannot be repeated after
    the forward pass."""
    num_tokens: int = 0
    """The tokens that all rows compute, draft tokens included."""
    prompts: int = 0
    """The rows that compute more than a decode does: prompts, and what a preempted sequence computes again."""
    prompt_tokens: int = 0
    """The tokens of those rows."""

    def guess(self, row: ScheduledSeq, draft: tuple[int, ...]) -> None:
        """Add draft tokens to a row, at most its `max_draft`."""
        row.draft = draft
        row.count += len(draft)
        self.num_tokens += len(draft)


@dataclass(frozen=True, slots=True)
class StepWork:
    """A step's work, and the time that it took from the loop."""

    ended: float
    """When its results were entered (monotonic)."""
    seconds: float
    """Since the step before it, or since its planning if the engine had no work before. The sum over steps is the time
    in which the engine had work."""
    decodes: int
    """Sequences that decoded."""
    prompt_tokens: int
    """See StepPlan."""
    generated: int
    """Tokens that were sampled and kept."""
    tokens: int = 0
    """Tokens that were computed, draft tokens included."""
    context: int = 0
    """KV tokens of all sequences together, with those that the step computed."""
    prompts: int = 0
    """See StepPlan."""


@dataclass(slots=True)
class Sampled:
    """The runner's result for a row that samples."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Set if this row alone failed, for instance because its logits are not finite. token_id is then ignored."""
    refused: bool = False
    """Whether the request itself caused the failure, so that a retry would not help."""
    row: TextRow | TextError | None = None
    """The result for a text of a request with `pooling`, or its error where that fails nothing else. token_id is then
    ignored."""
    continuations: tuple[Continuation, ...] = ()
    """Of a beam, its likeliest next tokens, likeliest first. token_id is then ignored."""
    then: tuple[Sampled, ...] = ()
    """The tokens that follow it, one for each accepted draft token of the row."""


def accepted(draft: tuple[int, ...], chosen: list[Sampled]) -> Sampled:
    """The result of a row, from the tokens sampled after its last token and after each of its `draft` tokens.

    A draft token is accepted if and only if it equals the token sampled in its place. Everything after it was then
    computed and sampled from the same tokens as without a draft.
    """
    right = 0
    while right < len(draft) and chosen[right].error is None and chosen[right].token_id == draft[right]:
        right += 1
    if right:
        chosen[0].then = tuple(chosen[1 : right + 1])
    return chosen[0]
