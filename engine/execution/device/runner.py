"""Executes step plans on an accelerator: launches them without waiting, and collects the sampled tokens later."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.adapters import AdapterRows, step_adapters
from engine.execution.device.adapters import AdaptedStep, DeviceAdapters
from engine.execution.device.graphs import DecodeGraphs, Record, recorder
from engine.execution.device.inputs import InputMaker, PinnedRing, Shape, StepInputs, StepNumbers, shape_of
from engine.execution.device.rows import DeviceRows
from engine.execution.device.sampler import DeviceSampler, Drawn, needs_host_token
from engine.execution.runner import copy_blocks, logits_from
from engine.kernels.sampling_state import Features
from engine.kernels.upload import upload
from engine.kv import KvSpace
from engine.layers import AdaptedRows, StepAdapters
from engine.models import Model
from engine.plan import Sampled, ScheduledSeq, StepPlan, accepted
from engine.sampling import score_prompts
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight."""

    drawn: list[Drawn]
    """One pass for the last tokens of the sampling rows; then one for rows with one or more draft tokens, with
    two..."""
    sampling: list[ScheduledSeq]
    scored: list[tuple[ScheduledSeq, range]]
    """The rows whose prompts are scored, with the positions."""
    hidden: Tensor | None
    """The last hidden states of the scored positions, [positions scored, width]."""
    prompt_logits: Callable[[Tensor, int], Tensor]
    """See score_prompts."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The results of a step's forward pass, on the device."""

    hidden: Tensor
    """Last hidden states [rows, width]: of the sampling sequences, then of their draft tokens, sequence after sequence,
    then of the scored positions. After a replay, the next step overwrites this memory."""
    slots: Tensor
    """Integers [sampling sequences]."""
    positions: Tensor
    """The positions of their last tokens, int64 [sampling sequences]."""
    adapters: AdaptedRows | None = None
    """The adapters of the rows of `hidden`. None if no row has one."""


class DeviceRunner:
    """Executes step plans on a device. Used by one thread. `spaces` are the scheduler's.

    The model's kernels must read ragged batches (engine.kernels.ragged). Sequences in them end at kv_lens, so the
    leftovers of an earlier sequence in the rest of a block are never read.
    """

    def __init__(
        self,
        model: Model,
        *,
        spaces: Sequence_[KvSpace],
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        record: Record | None = None,
        ring: PinnedRing | None = None,
        graphs: bool = True,
    ) -> None:
        """`graphs`: whether decode steps are recorded and replayed. `record`, `ring`: the device's own, unless a test
        passes others."""
        self.model = model
        self.spaces = tuple(spaces)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.longest = min(max_model_len, *(space.tokens_of_one(block_size) for space in spaces))
        """The tokens of the longest sequence."""
        self.device = device = model.device
        self._caches = [
            model.kernels.kv_cache(group, space.num_blocks, block_size, device)
            for group, space in zip(model.kv_groups, spaces, strict=True)
        ]
        self._rows = DeviceRows(spaces, slots=max_num_seqs, block_size=block_size, length=max_model_len, device=device)
        self._inputs = InputMaker(
            self._rows, most_tokens=max_num_batched_tokens, device=device, rope_switch=model.rope_switch, ring=ring
        )
        self._sampler = DeviceSampler(max_num_seqs, model.vocab_size, device, last_tokens=self._rows.last_tokens)
        self._adapters = (
            DeviceAdapters(model, slots=max_num_seqs, most_tokens=max_num_batched_tokens, device=device)
            if model.kernels.tabled
            else None
        )
        self._every = torch.arange(max_num_seqs, device=device)
        self._hidden: Tensor | None = None
        #: What the stage before this one sends, [most tokens, width]. None: this is the first, or the only one.
        self._entering: Tensor | None = None
        # Waiting during a CUDA graph's recording makes it fail and leaves torch's allocator in recording mode.
        recordable = record is not None or device.type != "cuda" or model.kernels.recordable
        self.graphs = (
            DecodeGraphs(
                record or recorder(device),
                slots=max_num_seqs,
                most_places=max_model_len,
                device=device,
                alone=model.kernels.collectives is None,
            )
            if graphs and recordable
            else None
        )

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """Launch a plan and collect its results."""
        return self.collect(self.launch(plan))

    @property
    def kv_bytes(self) -> int:
        """The memory of the KV cache, in bytes."""
        return sum(cache.nbytes for cache in self._caches)

    @property
    def tabled(self) -> bool:
        """Whether steps find their adapters in tables on the device."""
        return self._adapters is not None

    def needs_token(self, sequence: Sequence) -> bool:
        """Whether the host must know the last token of `sequence` before a step with it is launched."""
        return needs_host_token(sequence)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Queue all work of a plan on the device: computing its tokens into the KV cache, and sampling.

        A row may be pending: its last token is then the one that the step launched before samples in that slot. After
        an exception the plan's rows may be launched again, also one by one (then after `copy_blocks` and without the
        plan's copies), with all their tokens: all writes are then repeated.
        """
        try:
            return self._launch(plan)
        except BaseException:
            # It is unknown how much of the rows' state has reached the device.
            self.forget()
            raise

    def forget(self) -> None:
        """Send all state of the sequences again with their next step, from the tokens that they then have."""
        self._rows.forget()
        self._sampler.forget()
        if self._adapters is not None:
            self._adapters.forget()

    def _launch(self, plan: StepPlan) -> Launched:
        self.copy_blocks(plan.copies)
        sampling = [row for row in plan.rows if row.samples]
        scored = [(row, span) for row in plan.rows if (span := row.scored_span())]
        shape = shape_of(plan, self._rows.windows, self.block_size)
        adapted = any(row.seq.adapter is not None for row in plan.rows)
        step = None if self._adapters is None or not adapted else self._adapters.of(plan.rows)
        if step is not None:
            shape = replace(shape, adapter_tiles=step.tiles)
        recordable = not adapted or (step is not None and step.recordable)
        padded = None if self.graphs is None or scored or not recordable else self.graphs.padded(shape)
        ended = self._run(plan, shape, scored, step) if padded is None else self._replay(plan, padded, step)
        return self._sampled(ended, sampling, scored)

    def _sampled(
        self, ended: Forward, sampling: list[ScheduledSeq], scored: list[tuple[ScheduledSeq, range]]
    ) -> Launched:
        """Queue the sampling of a step whose forward pass is queued."""
        chosen = sum(1 + len(row.draft) for row in sampling)
        prompt_states = ended.hidden[chosen:] if scored else None
        drawn = self._draw(ended, sampling, self._sampler.admit([row.seq for row in sampling])) if sampling else []
        return Launched(drawn, sampling, scored, prompt_states, logits_from(self.model, ended.adapters, chosen))

    def _logits(self, hidden: Tensor, adapters: AdaptedRows | None) -> Tensor:
        """The logits of some rows of `Forward.hidden`."""
        return logits_from(self.model, adapters)(hidden, 0)

    def _draw(self, ended: Forward, sampling: list[ScheduledSeq], features: Features) -> list[Drawn]:
        """Sample the token after each row's last token. Then sample after the first draft token for rows whose draft
        was right, and so on.

        There is one pass for each token of the longest draft, and none waits for the host. After a rejected draft token
        a row samples nothing more, so its slot's counts and last token are those of the accepted tokens.
        """
        logits = self._logits(ended.hidden[: len(sampling)], ended.adapters)
        chosen = self._sampler.launch(logits, ended.slots, ended.positions, features)
        drawn = [self._sampler.fetch(logits, [row.seq for row in sampling])]
        longest = max(len(row.draft) for row in sampling)
        slots, positions, before, first = ended.slots.long(), ended.positions, sampling, len(sampling)
        for depth in range(longest):
            rows = [row for row in before if len(row.draft) > depth]
            kept = [i for i, row in enumerate(before) if len(row.draft) > depth]
            places = np.cumsum([len(row.draft) for row in sampling]) - [len(row.draft) for row in sampling]
            draft_rows = [
                int(offset) + first + depth
                for offset, row in zip(places, sampling, strict=True)
                if len(row.draft) > depth
            ]
            guessed = [row.draft[depth] for row in rows]
            which, hidden, tokens = upload(
                [np.array(indexes, np.int64) for indexes in (kept, draft_rows, guessed)], self.model.device
            )
            right = (chosen[0][which] == tokens) & (chosen[1][which] == 0)
            slots = torch.where(right, slots[which], -1)
            positions, before = positions[which] + 1, rows
            adapters = None if ended.adapters is None else ended.adapters.select(np.array(draft_rows, np.int64))
            logits = self._logits(ended.hidden[hidden], adapters)
            chosen = self._sampler.launch(logits, slots, positions, features)
            drawn.append(self._sampler.fetch(logits, [row.seq for row in rows]))
        return drawn

    def _run(
        self, plan: StepPlan, shape: Shape, scored: list[tuple[ScheduledSeq, range]], step: AdaptedStep | None
    ) -> Forward:
        output_rows: list[int] = []
        begins: dict[int, int] = {}
        end = 0
        for row in plan.rows:
            begins[id(row)] = end - row.start
            end += row.count
            if row.samples:
                output_rows.append(end - 1 - len(row.draft))
        sampling = len(output_rows)
        for row in plan.rows:
            output_rows += [begins[id(row)] + row.known_tokens + i for i in range(len(row.draft))]
        for row, span in scored:
            output_rows += [begins[id(row)] + position for position in span]
        more = [*output_rows, *(row.seq.slot for row in plan.rows if row.samples)]
        sent = self._enter(plan.rows, shape, more, len(output_rows))
        places = sent[: len(output_rows)]
        outputs_at = np.array(output_rows, np.int64)
        if step is not None and self._adapters is not None:
            adapters: StepAdapters | None = self._adapters.send(step, [row.count for row in plan.rows], outputs_at)
        else:
            adapters = step_adapters(plan.rows, outputs_at, self.device)
        inputs, hidden = self._compute(shape, places, adapters)
        outputs = None if adapters is None else adapters.outputs
        return Forward(hidden, sent[len(output_rows) :], inputs.positions[places[:sampling]], outputs)

    def _enter(
        self, rows: Sequence_[ScheduledSeq], shape: Shape, more: Sequence_[int] = (), outputs: int | None = None
    ) -> Tensor:
        """Send a step's numbers. `outputs`: how many of `more` are output rows; None: the step is a recorded one."""
        numbers = self._inputs.numbers(rows, shape, more)
        self._send_to_ranks(rows, numbers, shape, outputs)
        return self._inputs.send(numbers)

    def _send_to_ranks(
        self, rows: Sequence_[ScheduledSeq], numbers: StepNumbers, shape: Shape, outputs: int | None
    ) -> None:
        """Send a step to the model's other ranks, if there are some; see _enter."""

    def _make(self, shape: Shape) -> StepInputs:
        """Make the inputs of the sent step."""
        collectives = self.model.kernels.collectives
        # Only the first rank samples. Of several stages no token is pending: see needs_token.
        if collectives is not None and not self.model.staged:
            collectives.broadcast(self._rows.last_tokens)
        self._inputs.make(shape)
        return self._inputs.view(shape)

    def _compute(self, shape: Shape, places: Tensor, adapters: StepAdapters | None) -> tuple[StepInputs, Tensor]:
        """The inputs of the sent step, and its last hidden states of the token rows `places`."""
        inputs = self._make(shape)
        return inputs, self.model.forward(
            *(inputs.tokens, inputs.positions, inputs.long, inputs.attention, self._caches, places, adapters),
            None if self._entering is None else self._entering[: shape.tokens],
        )

    def _run_recorded(self, shape: Shape) -> None:
        if self.graphs is not None:
            self.graphs.run(shape, self._recorded_version, self._decode)

    def _replay(self, plan: StepPlan, shape: Shape, step: AdaptedStep | None) -> Forward:
        chosen = [i for i, row in enumerate(plan.rows) if row.samples]
        count = len(plan.rows)
        sent = self._enter(plan.rows, shape, chosen if len(chosen) < count else ())
        adapters = None
        if step is not None and self._adapters is not None:
            self._adapters.send_recorded(step, shape.rows, shape.adapter_tiles)
            adapters = AdapterRows(step.adapters, step.owners[chosen], self.device)
        self._run_recorded(shape)
        inputs, hidden = self._inputs.view(shape), self._hidden
        assert hidden is not None
        last = Forward(hidden[:count], inputs.attention[0].table_rows[:count], inputs.positions[:count], adapters)
        if len(chosen) == count:
            return last
        # Not all rows sample: a prefill chunk may be of one token, too.
        return Forward(last.hidden[sent], last.slots[sent], last.positions[sent], adapters)

    @property
    def _recorded_version(self) -> int:
        """Changes, never back, when recordings become invalid."""
        return self._rows.version + (0 if self._adapters is None else self._adapters.version)

    @torch.inference_mode()
    def record_next(self, longest: int | None = None) -> bool:
        """Record one more decode step, while no step is in flight. Returns False if none is left to record.

        `longest`: the most tokens of the contexts to record; None is any possible one. The step has no sequences and
        writes into no block.
        """
        if self.graphs is None:
            return False
        length = self.longest if longest is None else min(longest, self.longest)
        version, adapters = self._recorded_version, self._adapters is not None and self._adapters.used
        shape = self.graphs.unrecorded(self._rows.windows, self.block_size, length, version, adapters=adapters)
        if shape is None:
            return False
        self._enter((), shape)
        if self._adapters is not None:
            self._adapters.clear(shape.rows, shape.adapter_tiles)
        self._run_recorded(shape)
        return True

    def _decode(self, shape: Shape) -> None:
        """A decode step from the sent numbers to the hidden states, always in the same memory."""
        adapters = None if self._adapters is None else self._adapters.recorded(shape.rows, shape.adapter_tiles)
        _, hidden = self._compute(shape, self._every[: shape.rows], adapters)
        if self._hidden is None:
            self._hidden = hidden.new_zeros(len(self._every), hidden.shape[1])
        self._hidden[: shape.rows] = hidden

    @torch.inference_mode()
    def collect(self, launched: Launched) -> list[Sampled]:
        """Wait for a launched step. Returns one result for each sampling row, in the plan's order."""
        if launched.hidden is not None:
            score_prompts(launched.scored, launched.hidden, launched.prompt_logits, self.model.vocab_size)
        if not launched.drawn:
            return []
        passes = [self._sampler.collect(drawn) for drawn in launched.drawn]
        if len(passes) == 1:
            return passes[0]
        return self._put_together(launched.sampling, passes)

    def _put_together(self, sampling: list[ScheduledSeq], passes: list[list[Sampled]]) -> list[Sampled]:
        """One result for each row, from the tokens that each pass sampled for the rows in it."""
        each: list[list[Sampled]] = [[] for _ in sampling]
        for depth, results_at_depth in enumerate(passes):
            into = [tokens for tokens, row in zip(each, sampling, strict=True) if len(row.draft) >= depth]
            for tokens, result in zip(into, results_at_depth, strict=True):
                tokens.append(result)
        results = [accepted(row.draft, chosen) for row, chosen in zip(sampling, each, strict=True)]
        for row, result in zip(sampling, results, strict=True):
            self._sampler.counted(row.seq, len(result.then))
        return results

    @torch.inference_mode()
    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        """Copy whole blocks: (KV group, source, destination) of a plan."""
        copy_blocks(self._caches, copies)
