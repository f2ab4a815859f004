"""A smaller model guesses: it computes the same tokens, in blocks of its own that lie as the target's do.

Its K/V of a token are at the same place of the same block as the target's: one table says where both are, and what the
scheduler plans for a sequence holds for its draft. Whether they are there is another matter, for the draft model only
computes sequences that are to have a draft. What it lacks of one it catches up with, some tokens a step. Where it is
wrong about that (or about anything), its guesses are poor, and no output is another.

It chooses by the target's own rules and noise (penalties, temperature, filters, seed, position), so that it agrees not
only with the target's likeliest token but with the one that the target will draw.
"""

from __future__ import annotations

from collections.abc import Sequence as Each
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.plan import Sampled, ScheduledSeq, StepPlan
from engine.sequence import Sequence


class Executor(Protocol):
    """What runs the draft model: a runner over blocks of its own."""

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """One result for each row that samples."""

    def forget(self) -> None:
        """Nothing that was kept of sequences is to be trusted."""


@dataclass(slots=True, eq=False)
class _Shadow:
    """A sequence of the target as the draft model has it."""

    owner: Sequence
    seq: Sequence
    """Its tokens end in those that were guessed last."""
    known: int
    """How many of them the owner had."""
    computed: int
    """Leading tokens whose K/V are there."""
    room: int = 0
    """Tokens that may be guessed now."""
    guessed: list[int] = field(default_factory=list)


class DraftModel:
    """A Proposer. Slot by slot, the sequence that runs there."""

    def __init__(
        self,
        executor: Executor,
        *,
        slots: int,
        groups: int,
        table: int,
        block_size: int,
        step_tokens: int,
        context_length: int,
    ) -> None:
        """`groups`: the draft model's KV groups, whose blocks all lie as those of the target's group `table`, which has
        no window. `step_tokens`: the most to be computed at a time, a block at least. Sequences beyond `context_length`
        get no draft."""
        self._executor = executor
        self._shadows: list[_Shadow | None] = [None] * slots
        self._groups = groups
        self._table = table
        self._size = block_size
        self._step_tokens = step_tokens
        self._context = context_length
        # Of each full block, the hash of the tokens whose K/V the draft model has written there.
        self._written: dict[int, bytes] = {}

    def propose(self, rows: Each[ScheduledSeq]) -> list[tuple[int, ...]]:
        """As many tokens as there is room for; none for a sequence that is not caught up with yet."""
        shadows = [self._shadow(row) for row in rows]
        left = self._step_tokens
        parts = []
        # Whoever lacks least gets its draft; the others catch up with what is left of the step.
        for one in sorted((one for one in shadows if one.room > 0), key=_lacking):
            count = min(_lacking(one), left)
            if count < _lacking(one):
                # Up to the end of a block: others may have the same one, and the runner clears what it only begins.
                count = max(0, (one.computed + count) // self._size * self._size - one.computed)
            left -= count
            if count:
                parts.append((one, count))
        while parts:
            going = self._run(parts)
            parts = [(one, 1) for one in going if len(one.guessed) < one.room]
        return [tuple(one.guessed) for one in shadows]

    def forget(self) -> None:
        """See Proposer."""
        self._shadows = [None] * len(self._shadows)
        self._written.clear()
        self._executor.forget()

    def _shadow(self, row: ScheduledSeq) -> _Shadow:
        """That of a row's sequence, with the tokens that this has now: of those that were guessed, the wrong ones are
        gone, and the others' K/V are kept."""
        owner = row.seq
        table = owner.tables[self._table]
        found = self._shadows[owner.slot]
        if found is None or found.owner is not owner or found.seq.tables[0] is not table:
            # A sequence that was put out and let in again has other blocks.
            found = self._shadows[owner.slot] = self._begun(owner)
        tokens, right = found.seq.tokens, found.known
        while right < min(len(tokens), len(owner.tokens)) and tokens[right] == owner.tokens[right]:
            right += 1
        del tokens[right:]
        tokens += owner.tokens[right:]
        found.known = len(tokens)
        found.computed = min(found.computed, right, len(tokens) - 1)
        found.room = min(row.room, self._context - len(tokens))
        found.guessed = []
        if _penalised(owner):
            # The sampler counts a sequence's tokens one by one as they come: those that went are not taken off.
            found.seq = replace(found.seq)
        return found

    def _begun(self, owner: Sequence) -> _Shadow:
        """With the K/V of the leading blocks that the draft model has computed, for whomever."""
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
            guessed=None,
        )
        return _Shadow(owner, seq, len(seq.tokens), shared * self._size)

    def _run(self, parts: list[tuple[_Shadow, int]]) -> list[_Shadow]:
        """Compute so many tokens of each; those that have got to their last one have one more then."""
        plan = StepPlan(num_tokens=sum(count for _, count in parts))
        for one, count in parts:
            samples = count == _lacking(one)
            plan.rows.append(ScheduledSeq(one.seq, one.computed, count, samples))
        chosen = iter(self._executor.execute(plan))
        going = []
        for (one, count), row in zip(parts, plan.rows, strict=True):
            self._note(one, one.computed, count)
            one.computed += count
            result = next(chosen) if row.samples else None
            if result is not None and result.error is None:
                one.seq.tokens.append(result.token_id)
                one.guessed.append(result.token_id)
                going.append(one)
        return going

    def _note(self, one: _Shadow, start: int, count: int) -> None:
        """The K/V of these tokens have been written."""
        blocks, names = one.seq.tables[0].blocks, one.owner.hashes
        end = start + count
        for index in range(start // self._size, -(-end // self._size)):
            if index < len(names) and end >= (index + 1) * self._size:
                self._written[blocks[index]] = names[index]
            else:
                self._written.pop(blocks[index], None)


def _lacking(one: _Shadow) -> int:
    return len(one.seq.tokens) - one.computed


def _penalised(seq: Sequence) -> bool:
    params = seq.request.params
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
