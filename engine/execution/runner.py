"""Executes step plans on one device. Owns the KV cache and the sequences' permanent rows.

`BatchBuilder` builds the tensors of a step plan, one ragged batch for each KV group, and copies KV blocks before the
step.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Each
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters import step_adapters
from engine.kernels import Kernels, RaggedBatch
from engine.kernels.upload import upload
from engine.kv import KvSpace, Table
from engine.layers import AdaptedRows, StepAdapters
from engine.models import Model
from engine.plan import Sampled, ScheduledSeq, StepPlan, accepted
from engine.sampling import SamplingBatch, SamplingRows, chosen, sample, score_prompts
from engine.sequence import UNKNOWN, Sequence

Ints = NDArray[np.int64]

#: The arrays of a KV group, and those before them that all groups share.
_PER_GROUP, _SHARED = 4, 5
#: The bytes of blocks copied at one time.
_COPIED = 64 << 20


@dataclass(frozen=True, slots=True)
class StepBatch:
    tokens: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens], counted from each prompt's first token."""
    long: Tensor | None
    """bool [tokens]: whether the token's sequence is longer than the model's rope_switch. None if the model has
    none."""
    attention: tuple[RaggedBatch, ...]
    """One batch for each KV group. Tables are padded with the zero block."""
    output_rows: Tensor
    """int64: the token rows whose logits are wanted. First, for the sampling rows in the plan's order, the last token
    and each draft token. Then the scored positions of prompts, in the plan's order."""
    entered: tuple[Tensor | None, ...]
    """int64, for each KV group: the blocks that this step begins to fill but does not fill up. They are zeroed before
    the forward pass.

    Attention reads the rest of a sequence's last block as masked padding. But 0 x NaN is NaN, so NaNs that an earlier
    sequence left there would harm this one.
    """
    adapters: StepAdapters | None
    """The adapters of the rows. None if no row has one."""
    arrays: Each[NDArray[Any]]
    """The arrays of `BatchBuilder.batch`, of which all but the adapters is made."""


class BatchBuilder:
    def __init__(
        self,
        spaces: Each[KvSpace],
        slots: int,
        block_size: int,
        kernels: Kernels,
        device: torch.device,
        *,
        rope_switch: int | None = None,
    ) -> None:
        """`spaces`: the memory of each KV group. The block after a group's last one is always zero."""
        self._groups = [BlockRows(space, slots, block_size) for space in spaces]
        self._block_size = block_size
        self._kernels = kernels
        self._device = device
        self._rope_switch = rope_switch

    def build(self, plan: StepPlan) -> StepBatch:
        # Sets that pad put neighbours of one shape together. Native attention begins with the last, the longest.
        order = sorted(range(len(plan.rows)), key=lambda i: _shape(plan.rows[i]))
        rows = [plan.rows[i] for i in order]
        counts, starts, slots = (
            np.array(column, np.int64)
            for column in zip(*((row.count, row.start, row.seq.slot) for row in rows), strict=True)
        )
        ends: Ints = counts.cumsum()
        positions: Ints = np.arange(ends[-1]) + (starts - (ends - counts)).repeat(counts)
        last_row = np.empty(len(rows), np.int64)
        last_row[order] = ends - 1
        queries = np.zeros(len(rows) + 1, np.int32)
        queries[1:] = ends
        tokens = np.fromiter((token for row in rows for token in row.computed()), np.int64, len(positions))
        every = np.arange(len(rows), dtype=np.int32)
        output_rows = _output_rows(plan, last_row)
        arrays: list[NDArray[Any]] = [tokens, positions, output_rows, queries, every]
        for i, group in enumerate(self._groups):
            arrays += self._group_arrays(i, group, rows, slots, starts, counts, positions)
        if self._rope_switch is not None:
            totals = np.fromiter((len(row.seq.tokens) for row in rows), np.int64, len(rows))
            arrays.append((totals > self._rope_switch).repeat(counts))
        adapters = step_adapters(rows, output_rows, self._device)
        return self.batch(arrays, int(counts.max()), int((starts + counts).max()), adapters)

    @staticmethod
    def _group_arrays(
        i: int, group: BlockRows, rows: list[ScheduledSeq], slots: Ints, starts: Ints, counts: Ints, positions: Ints
    ) -> list[NDArray[Any]]:
        """The arrays of KV group `i`: cache slots, lengths, tables, and the blocks entered."""
        for row in rows:
            group.write(row.seq.slot, row.seq.tables[i])
        skipped = group.skipped(slots)
        lengths = starts + counts - skipped
        return [
            group.places(slots.repeat(counts), positions - skipped.repeat(counts)),
            lengths.astype(np.int32),
            group.tables(slots, lengths),
            group.entered(slots, starts - skipped, lengths),
        ]

    def batch(
        self, arrays: list[NDArray[Any]], most_queries: int, most_places: int, adapters: StepAdapters | None
    ) -> StepBatch:
        """The batch of a step's arrays, as `build` orders them. The others: see RaggedBatch and StepBatch."""
        sent = upload(arrays, self._device)
        tokens, positions, output_rows, queries, every = sent[:_SHARED]
        by_group = [sent[_SHARED + i * _PER_GROUP :][:_PER_GROUP] for i in range(len(self._groups))]
        batches = (
            RaggedBatch(
                slots=places,
                query_starts=queries,
                kv_lens=lengths,
                tables=tables,
                table_rows=every,
                most_queries=most_queries,
                most_places=most_places,
                window=group.window,
                positions=positions,
            )
            for group, (places, lengths, tables, _) in zip(self._groups, by_group, strict=True)
        )
        return StepBatch(
            tokens=tokens,
            positions=positions,
            output_rows=output_rows,
            long=None if self._rope_switch is None else sent[-1],
            attention=tuple(
                self._kernels.arrange(batch, self._block_size, group.zero_block)
                for batch, group in zip(batches, self._groups, strict=True)
            ),
            entered=tuple(entered if len(entered) else None for *_, entered in by_group),
            adapters=adapters,
            arrays=arrays,
        )


def _output_rows(plan: StepPlan, last_row: Ints) -> Ints:
    """StepBatch.output_rows. `last_row`: the token row of each row's last token."""
    sampling = [i for i, row in enumerate(plan.rows) if row.samples]
    output_rows: Ints = last_row[sampling]
    if any(row.draft for row in plan.rows):
        drafted = np.fromiter((len(plan.rows[i].draft) for i in sampling), np.int64, len(sampling))
        ends: Ints = (drafted + 1).cumsum()
        output_rows = np.arange(ends[-1]) + (output_rows + 1 - ends).repeat(drafted + 1)
    spans = [
        np.arange(span.start, span.stop) + (last_row[i] + 1 - row.count - row.start)
        for i, row in enumerate(plan.rows)
        if row.seq.scores is not None and (span := row.scored_span())
    ]
    return np.concatenate((output_rows, *spans)) if spans else output_rows


def _shape(row: ScheduledSeq) -> tuple[int, int]:
    return row.count, row.start + row.count


class BlockRows:
    """The block tables of one KV group's running sequences as permanent rows: row `slot` is the table of the sequence
    with that slot, from the first block it still holds. Only changed tables are written again."""

    def __init__(self, space: KvSpace, slots: int, block_size: int) -> None:
        self.window = space.window
        self._size = block_size
        #: The number of the block after the last one. That block is always zero.
        self.zero_block = space.num_blocks
        # The rows are as wide as the longest table so far, because a context of millions of tokens is seldom used.
        self._rows = np.full((slots, 8), self.zero_block, np.int32)
        self._firsts = np.zeros(slots, np.int64)
        self._written: list[list[int]] = [[] for _ in range(slots)]

    def write(self, slot: int, table: Table) -> None:
        if self.window is not None:
            self._firsts[slot] = table.first
        written, blocks = self._written[slot], table.blocks
        if written == blocks:
            return
        if len(blocks) > self._rows.shape[1]:
            wider = np.full((len(self._rows), 2 * len(blocks)), self.zero_block, np.int32)
            wider[:, : self._rows.shape[1]] = self._rows
            self._rows = wider
        row = self._rows[slot]
        row[: len(blocks)] = blocks
        row[len(blocks) : len(written)] = self.zero_block
        self._written[slot] = blocks.copy()

    def skipped(self, slots: Ints) -> Ints:
        """The number of tokens of each sequence before its table begins."""
        return self._firsts[slots] * self._size

    def places(self, slots: Ints, positions: Ints) -> Ints:
        """The KV slots, block * block_size + offset, of tokens at `positions` in the tables of `slots`."""
        blocks: Ints = self._rows[slots, positions // self._size].astype(np.int64)
        return blocks * self._size + positions % self._size

    def tables(self, slots: Ints, ends: Ints) -> NDArray[np.int32]:
        """Tables that hold `ends` tokens, [sequences, blocks of the longest], padded with the zero block."""
        return self._rows[slots, : -(-int(ends.max()) // self._size)]

    def entered(self, slots: Ints, starts: Ints, ends: Ints) -> Ints:
        """The blocks that tokens from `starts` to `ends` begin to fill but do not fill up."""
        last = (ends - 1) // self._size
        chosen = (last * self._size >= starts) & (ends % self._size != 0)
        blocks: Ints = self._rows[slots[chosen], last[chosen]].astype(np.int64)
        return blocks


def logits_from(model: Model, adapters: AdaptedRows | None, first: int = 0) -> Callable[[Tensor, int], Tensor]:
    """A function from a slice of a step's last hidden states, and the index of its first row, to logits.

    `adapters`: those of the step's output rows. `first`: the output row from which those indexes count.
    """
    if adapters is None or not adapters.changes_head:
        return lambda hidden, start: model.logits(hidden)
    return lambda hidden, start: model.logits(
        hidden, adapters.select(slice(first + start, first + start + len(hidden)))
    )


def copy_blocks(caches: Each[Tensor], copies: Each[tuple[int, int, int]]) -> None:
    """Copies whole blocks of the KV cache, as a plan asks before its step.

    `caches`: of each KV group, [layers, 2, blocks, ...]. `copies`: (KV group, source block, destination block).
    """
    for group in {group for group, _, _ in copies}:
        pairs = [(source, destination) for of, source, destination in copies if of == group]
        columns = [np.array(column, np.int64) for column in zip(*pairs, strict=True)]
        cache = caches[group]
        if not len(cache):  # a stage has none of the group's layers
            continue
        sources, destinations = upload(columns, cache.device)
        # Copy a few at a time, because a copy needs memory beside the cache.
        size = max(1, _COPIED * len(cache[0, 0]) // cache.nbytes)
        for some in range(0, len(pairs), size):
            cache[:, :, destinations[some : some + size]] = cache[:, :, sources[some : some + size]]


def run_step(model: Model, caches: Each[Tensor], batch: StepBatch, entering: Tensor | None = None) -> Tensor:
    """Compute a step's tokens into the caches. Returns the last hidden states of its output rows. `entering`: see
    Model.forward."""
    for cache, entered in zip(caches, batch.entered, strict=True):
        if entered is not None:
            cache.index_fill_(2, entered, 0)
    hidden = model.forward(
        batch.tokens, batch.positions, batch.long, batch.attention, caches, batch.output_rows, batch.adapters, entering
    )
    model.kernels.settle()
    return hidden


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A plan whose batch is made and whose ways to sample are looked up."""

    plan: StepPlan
    batch: StepBatch
    chosen: int
    """The output rows from which tokens are sampled, the first of all."""
    how: SamplingBatch | None
    """None if there are none."""

    @property
    def greedy(self) -> int:
        """The output rows, the first, of which the peaks are wanted."""
        return self.chosen if self.how is not None and self.how.plain else 0


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
        step = self._prepare(plan)
        return self._results(step, self._forward(step.batch, step.greedy))

    def _prepare(self, plan: StepPlan) -> PreparedStep:
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
        return PreparedStep(plan, batch, len(chosen), how)

    def _results(self, step: PreparedStep, hidden: Tensor) -> list[Sampled]:
        """The results of a plan. `hidden`: the last hidden states of its output rows."""
        plan, how, chosen = step.plan, step.how, step.chosen
        adapters = None if step.batch.adapters is None else step.batch.adapters.outputs
        if len(hidden) > chosen:
            scored = [(row, span) for row in plan.rows if (span := row.scored_span())]
            logits = logits_from(self._model, adapters, chosen)
            score_prompts(scored, hidden[chosen:], logits, self._model.vocab_size)
            hidden = hidden[:chosen]
        if how is None:
            return []
        sampled = self._sample(hidden, how, adapters)
        sampling = [row for row in plan.rows if row.samples]
        if chosen == len(sampling):
            return sampled
        each = iter(sampled)
        return [accepted(row.draft, list(islice(each, 1 + len(row.draft)))) for row in sampling]

    def _forward(self, batch: StepBatch, greedy: int) -> Tensor:
        """The last hidden states of a step's output rows. `greedy`: of so many, the first, `_sample` wants the peaks
        if no adapter changes the head."""
        return run_step(self._model, self._caches, batch)

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
