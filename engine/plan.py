"""What one step computes: made by the scheduler, executed by the runner, handed back with what was sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.prompt_scores import ScoredPart
from engine.request import Sequence, TokenLogprobs


@dataclass(slots=True)
class ScheduledSeq:
    """One sequence's part of a step: compute tokens[start : start + count] on top of the start tokens in cache."""

    seq: Sequence
    start: int
    count: int
    samples: bool
    """True where the last of these tokens is the last there is: its logits choose the next."""
    scored: ScoredPart | None = None
    """Set by the runner where the log probabilities of the prompt are wanted."""

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


@dataclass(slots=True)
class Sampled:
    """What the runner found for a row that samples."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Set when this row alone failed, for instance on logits that are not finite; token_id is then ignored."""
    refused: bool = False
    """It failed for what its request asked for: trying again would not help."""
