"""Executes step plans on one device. Owns the KV cache and the sequences' permanent rows."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from itertools import islice

import torch
from torch import Tensor

from engine.execution.batch import BatchBuilder, copy_blocks, logits_from
from engine.kv import KvSpace
from engine.layers import AdaptedRows
from engine.models import Model
from engine.plan import Sampled, StepPlan, accepted
from engine.sampling import SamplingBatch, SamplingRows, chosen, sample, score_prompts
from engine.sequence import UNKNOWN, Sequence


class Runner:
    """Executes step plans. Used by one thread. `spaces` are the scheduler's; one more block per group, always zero,
    pads block tables."""

    def __init__(self, model: Model, *, spaces: Sequence_[KvSpace], block_size: int, max_num_seqs: int) -> None:
        self._model = model
        self._caches = [
            model.kernels.kv_cache(group, space.num_blocks + 1, block_size, model.device)
            for group, space in zip(model.kv_groups, spaces, strict=True)
        ]
        self._builder = BatchBuilder(
            spaces, max_num_seqs, block_size, model.kernels, model.device, rope_switch=model.rope_switch
        )
        self._sampling = SamplingRows(max_num_seqs, model.vocab_size, model.device)
        self._owners: list[Sequence | None] = [None] * max_num_seqs
        self._last = [UNKNOWN] * max_num_seqs

    def launch(self, plan: StepPlan) -> list[Sampled]:
        """Execute a plan at once. UNKNOWN tokens are replaced by the tokens sampled last for their slots."""
        pending = [row.seq for row in plan.rows if row.pending]
        for sequence in pending:
            sequence.tokens[-1] = self._last[sequence.slot]
        try:
            sampled = self.execute(plan)
        finally:
            for sequence in pending:
                sequence.tokens[-1] = UNKNOWN
        for row, result in zip((row for row in plan.rows if row.samples), sampled, strict=True):
            self._last[row.seq.slot] = result.token_id
        return sampled

    def collect(self, launched: list[Sampled]) -> list[Sampled]:
        """Return a launched plan's results."""
        return launched

    def needs_token(self, sequence: Sequence) -> bool:
        """Always False: penalties and bad words are looked up at launch."""
        return False

    def forget(self) -> None:
        """Read sequences' sampling parameters, and count their tokens, again."""
        self._owners = [None] * len(self._owners)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled]:
        """Compute the plan's tokens into the KV cache. Returns one result for each sampling row, in the plan's order.

        After an exception the plan's rows may be executed again, also one by one: all writes are then repeated. The
        copies must not be repeated, because a row may have written a block that they read.
        """
        self.copy_blocks(plan.copies)
        sampling = [row for row in plan.rows if row.samples]
        for sequence in (row.seq for row in sampling):
            if self._owners[sequence.slot] is not sequence:
                self._sampling.admit(sequence)
                self._owners[sequence.slot] = sequence
        batch = self._builder.build(plan)
        # One entry for the last token of each row, and one for each of its draft tokens.
        chosen = [row.seq for row in sampling for _ in range(1 + len(row.draft))]
        before = [row.draft[:i] for row in sampling for i in range(1 + len(row.draft))]
        how = self._sampling.gather(chosen, before if len(chosen) > len(sampling) else None) if sampling else None
        for cache, entered in zip(self._caches, batch.entered, strict=True):
            if entered is not None:
                cache.index_fill_(2, entered, 0)
        hidden = self._model.forward(
            batch.tokens,
            batch.positions,
            batch.long,
            batch.attention,
            self._caches,
            batch.output_rows,
            batch.adapters,
        )
        self._model.kernels.settle()
        adapters = None if batch.adapters is None else batch.adapters.outputs
        if len(hidden) > len(chosen):
            scored = [(row, span) for row in plan.rows if (span := row.scored_span())]
            logits = logits_from(self._model, adapters, len(chosen))
            score_prompts(scored, hidden[len(chosen) :], logits, self._model.vocab_size)
            hidden = hidden[: len(chosen)]
        if how is None:
            return []
        sampled = self._sample(hidden, how, adapters)
        if len(chosen) == len(sampling):
            return sampled
        each = iter(sampled)
        return [accepted(row.draft, list(islice(each, 1 + len(row.draft)))) for row in sampling]

    def _sample(self, hidden: Tensor, how: SamplingBatch, adapters: AdaptedRows | None) -> list[Sampled]:
        own_heads = adapters is not None and adapters.changes_head
        peaks = self._model.peaks(hidden) if how.plain and not own_heads else None
        if peaks:
            return chosen(*peaks)
        logits = logits_from(self._model, adapters)(hidden, 0)
        return sample(logits, how, self._model.kernels.candidates)

    @torch.inference_mode()
    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        """Copy whole blocks: (KV group, source, destination) of a plan."""
        copy_blocks(self._caches, copies)
