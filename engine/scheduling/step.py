"""The state of a step while it is planned: what is in it, and how many tokens of its budget are left for whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.plan import ScheduledSeq, StepPlan
from engine.scheduling.policy import TIERS, is_priority
from engine.sequence import Sequence


@dataclass(slots=True)
class Step:
    """The state of a step while it is planned."""

    now: float
    budget: int
    """The tokens left in the step."""
    decodes: list[int]
    """The number of running decodes not yet visited, by effective tier."""
    decode_share: int
    """The number of those decodes that keep their token however many prompts there are."""
    reserved: int
    """The number of tokens reserved for prompts of requests of the best tier."""
    may_exclude: bool
    """Whether a prompt of the best tier excludes all worse tiers from this step."""
    has_priority_prompt: bool = False
    """Whether the plan has a prompt of the best tier."""
    plan: StepPlan = field(default_factory=StepPlan)
    admitted: set[int] = field(default_factory=set)
    """The serials of the sequences admitted in this step. Their new blocks hold no K/V yet."""

    @property
    def to_come(self) -> int:
        """The number of decodes not yet visited, each of which may need a block."""
        return sum(self.decodes)

    def budget_for(self, seq: Sequence, tier: int, *, displacing: bool = False) -> int:
        """The tokens that a prompt in effective tier `tier` may take.

        Decodes of that tier and better ones keep their tokens. A few decodes of worse tiers keep theirs too, so that a
        stream of prompts cannot stall them. Decodes worse than the request's own tier keep none if the prompt is
        `displacing` them or excludes them from the step.
        """
        worst = seq.request.tier if displacing or self._excludes(seq) else TIERS - 1
        worse = sum(self.decodes[tier + 1 : worst + 1])
        budget = self.budget if is_priority(seq) else self.unreserved
        return budget - sum(self.decodes[: tier + 1]) - min(worse, self.decode_share)

    @property
    def unreserved(self) -> int:
        """The tokens left for all but prompts of the best tier. In a step with such a prompt, decodes may use more."""
        return self.budget - self.reserved

    def put(self, seq: Sequence, count: int, max_draft: int = 0) -> None:
        """Add `count` tokens of a sequence to the plan, and take `max_draft` more from the budget for draft tokens."""
        end = seq.computed + count
        if end > seq.paid and seq.account is not None:  # a token that was generated
            seq.account.served += (end - seq.paid) / seq.request.weight
            seq.paid = end
        self.budget -= count + max_draft
        self.plan.num_tokens += count
        samples = seq.computed + count == len(seq.tokens)
        self.plan.rows.append(ScheduledSeq(seq, seq.computed, count, samples, max_draft=max_draft))

    def put_prompt(self, seq: Sequence, count: int) -> None:
        self.put(seq, count)
        self.plan.prompts += 1
        self.plan.prompt_tokens += count
        self.has_priority_prompt |= count > 0 and is_priority(seq)

    def _excludes(self, seq: Sequence) -> bool:
        return self.may_exclude and is_priority(seq)
