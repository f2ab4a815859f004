"""Executes step plans on one device: owns the KV cache and the permanent rows."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import BatchBuilder
from engine.models import Model
from engine.plan import Sampled, StepPlan
from engine.request import Sequence
from engine.sampling import SamplingRows, sample, score_prompts
from engine.upload import upload


class Runner:
    """Used by one thread. `num_blocks` blocks are the scheduler's; one more, always zero, pads block tables."""

    def __init__(
        self, model: Model, *, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self._model = model
        self._caches = [
            torch.zeros(
                (group.layers, 2, num_blocks + 1, block_size, group.kv_heads, group.head_dim),
                dtype=model.kernels.compute_dtype,
                device=model.device,
            )
            for group in model.kv_groups
        ]
        self._builder = BatchBuilder(
            max_num_seqs,
            -(-max_model_len // block_size),
            block_size,
            num_blocks,
            model.kernels,
            model.device,
            windows=[group.window for group in model.kv_groups],
            rope_switch=model.rope_switch,
        )
        self._sampling = SamplingRows(max_num_seqs, model.vocab_size, model.device)
        self._owners: list[Sequence | None] = [None] * max_num_seqs

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled]:
        """Compute the plan's tokens into the cache; one result for each row that samples, in the plan's order.

        After an exception the plan's rows may be executed again, also one by one (then after `copy_blocks` and
        without the plan's copies): whatever was written is written again.
        """
        self.copy_blocks(plan.copies)
        sampling = [row.seq for row in plan.rows if row.samples]
        for sequence in sampling:
            if self._owners[sequence.slot] is not sequence:
                self._sampling.admit(sequence)
                self._owners[sequence.slot] = sequence
        batch = self._builder.build(plan)
        how = self._sampling.gather(sampling) if sampling else None
        if batch.entered is not None:
            for cache in self._caches:
                cache.index_fill_(2, batch.entered, 0)
        hidden = self._model.forward(
            batch.tokens, batch.positions, batch.long, batch.attention, self._caches, batch.wanted
        )
        if len(hidden) > len(sampling):
            scored = [row for row in plan.rows if row.wanted()]
            score_prompts(scored, hidden[len(sampling) :], self._model.logits, self._model.vocab_size)
            hidden = hidden[: len(sampling)]
        return [] if how is None else sample(self._model.logits(hidden), how)

    @torch.inference_mode()
    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks: (source, destination) pairs of a plan."""
        if copies:
            columns = [np.array(column, np.int64) for column in zip(*copies, strict=True)]
            sources, destinations = upload(columns, self._model.device)
            for cache in self._caches:
                cache[:, :, destinations] = cache[:, :, sources]


def block_bytes(model: Model, block_size: int) -> int:
    """Memory that one KV block takes, over all layers."""
    width = torch.empty(0, dtype=model.kernels.compute_dtype).element_size()
    return sum(group.layers * 2 * block_size * group.kv_heads * group.head_dim * width for group in model.kv_groups)
