"""Draft tokens from a smaller model, which computes the same tokens in its own KV blocks.

Its blocks have the same numbers as the target model's: one block table locates the K/V of both, and the scheduler's
plans hold for both. But the draft model only computes sequences that are to have a draft. If it lacks tokens of such a
sequence, it catches up, some tokens a step. If its record of the K/V it has is wrong, its drafts are poor, but no
output changes.

It samples with the target's own parameters and noise (penalties, filters, seed, position). So it agrees
not only with the target's most likely token but also with the one that the target will draw.
"""

from __future__ import annotations

from collections.abc import Sequence as Each
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.kv import Capacity
from engine.plan import Sampled, ScheduledSeq, StepPlan
from engine.sequence import Sequence


class Executor(Protocol):
    """The interface of the draft model's runner, which has its own blocks."""

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """Execute a plan. Returns one result for each sampling row."""

    def forget(self) -> None:
        """Discard all cached state of sequences."""


@dataclass(slots=True, eq=False)
class _Shadow:
    """The draft model's copy of a target sequence."""

    owner: Sequence
    seq: Sequence
    """The copy. Its tokens end in the latest draft."""
    matching: int
    """The number of leading tokens that are the owner's."""
    computed: int
    """The number of leading tokens whose K/V the draft model has."""
    room: int = 0
    """The most draft tokens in this step."""
    guessed: list[int] = field(default_factory=list)


class DraftModel:
    """A Proposer that runs a draft model. It keeps one copy of a sequence for each slot."""

    def __init__(
        self,
        executor: Executor,
        capacity: Capacity,
        *,
        table: int,
        context_length: int,
    ) -> None:
        """`capacity`: the executor's; a step holds at least a block. All its KV groups use the block tables of the
        target's group `table`, which has no window. Sequences longer than `context_length` get no draft."""
        self._executor = executor
        self._shadows: list[_Shadow | None] = [None] * capacity.max_num_seqs
        self._groups = len(capacity.spaces)
        self._table = table
        self._size = capacity.block_size
        self._step_tokens = capacity.max_num_batched_tokens
        self._context = context_length
        # For each full block, the hash of the tokens whose K/V the draft model has written there.
        self._written: dict[int, bytes] = {}

    def propose(self, rows: Each[ScheduledSeq]) -> list[tuple[int, ...]]:
        """Draft tokens for each row, up to its limit. None for a sequence that the draft model has yet to catch up
        with."""
        shadows = [self._shadow(row) for row in rows]
        remaining = self._step_tokens
        parts = []
        # The sequences that lack least get their drafts. The others catch up with the rest of the step.
        for shadow in sorted((shadow for shadow in shadows if shadow.room > 0), key=_lacking):
            count = min(_lacking(shadow), remaining)
            if count < _lacking(shadow):
                # Stop at the end of a block: other sequences may share it, and the runner clears blocks it only begins.
                count = max(0, (shadow.computed + count) // self._size * self._size - shadow.computed)
            remaining -= count
            if count:
                parts.append((shadow, count))
        while parts:
            going = self._run(parts)
            parts = [(shadow, 1) for shadow in going if len(shadow.guessed) < shadow.room]
        return [tuple(shadow.guessed) for shadow in shadows]

    def forget(self) -> None:
        """See Proposer."""
        self._shadows = [None] * len(self._shadows)
        self._written.clear()
        self._executor.forget()

    def _shadow(self, row: ScheduledSeq) -> _Shadow:
        """The copy of a row's sequence, updated to its tokens. Rejected draft tokens are removed, and the K/V of
        accepted ones are kept."""
        owner = row.seq
        table = owner.tables[self._table]
        shadow = self._shadows[owner.slot]
        if shadow is None or shadow.owner is not owner or shadow.seq.tables[0] is not table:
            # A sequence that was preempted and admitted again has other blocks.
            shadow = self._shadows[owner.slot] = self._begun(owner)
        tokens, right = shadow.seq.tokens, shadow.matching
        while right < min(len(tokens), len(owner.tokens)) and tokens[right] == owner.tokens[right]:
            right += 1
        del tokens[right:]
        tokens += owner.tokens[right:]
        shadow.matching = len(tokens)
        shadow.computed = min(shadow.computed, right, len(tokens) - 1)
        shadow.room = min(row.max_draft, self._context - len(tokens))
        shadow.guessed = []
        if owner.request.params.penalises:
            # The sampler counts tokens as they come and never removes any, so it must see a new sequence.
            shadow.seq = replace(shadow.seq)
        return shadow

    def _begun(self, owner: Sequence) -> _Shadow:
        """A new copy. It shares the leading blocks whose K/V the draft model has computed for any sequence."""
        table = owner.tables[self._table]
        shared = 0
        for block, name in zip(table.blocks, owner.hashes, strict=False):
            if self._written.get(block) != name:
                break
            shared += 1
        params = replace(owner.request.params, logprobs=None, prompt_logprobs=None, n=1, best_of=None)
        seq = replace(
            owner,
            request=replace(owner.request, params=params),
            tokens=list(owner.tokens),
            tables=[table] * self._groups,
            scores=None,
            adapter=None,
        )
        return _Shadow(owner, seq, len(seq.tokens), shared * self._size)

    def _run(self, parts: list[tuple[_Shadow, int]]) -> list[_Shadow]:
        """Compute `count` tokens of each copy. Copies that reach their last token sample one more and are returned."""
        plan = StepPlan(num_tokens=sum(count for _, count in parts))
        for shadow, count in parts:
            samples = count == _lacking(shadow)
            plan.rows.append(ScheduledSeq(shadow.seq, shadow.computed, count, samples))
        chosen = iter(self._executor.execute(plan))
        going = []
        for (shadow, count), row in zip(parts, plan.rows, strict=True):
            self._note(shadow, shadow.computed, count)
            shadow.computed += count
            result = next(chosen) if row.samples else None
            if result is not None and result.error is None:
                shadow.seq.tokens.append(result.token_id)
                shadow.guessed.append(result.token_id)
                going.append(shadow)
        return going

    def _note(self, shadow: _Shadow, start: int, count: int) -> None:
        """Record that the K/V of these tokens have been written."""
        blocks, names = shadow.seq.tables[0].blocks, shadow.owner.hashes
        end = start + count
        for index in range(start // self._size, -(-end // self._size)):
            if index < len(names) and end >= (index + 1) * self._size:
                self._written[blocks[index]] = names[index]
            else:
                self._written.pop(blocks[index], None)


def _lacking(shadow: _Shadow) -> int:
    return len(shadow.seq.tokens) - shadow.computed
