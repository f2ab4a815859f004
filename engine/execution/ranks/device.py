"""Ranks of a model on devices: each has a DeviceRunner, whose steps the lead sends, and the device sums.

    lead: numbers of a step (device/inputs.py) -> exchange -> followers send them to their devices, and run or replay
          its last sampled tokens -> broadcast, in the step: only the lead samples
          hidden states -> broadcast -> each rank's logits -> gathered

Of several stages each is such ranks, and several steps are in flight, of disjoint sequences:

    launch: stage 0 computes, sends its hidden states -> stage 1 -> ... -> the last stage's logits
    collect: the lead waits for these logits, and samples

All ranks run the same operations in the same order, so that their sums meet. A step that fails on one ends the group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from engine.adapters import Adapter, AdapterRows, owners_of
from engine.config import EngineConfig
from engine.errors import EngineError, ErrorText
from engine.execution.device import DeviceRunner
from engine.execution.device.inputs import Shape, StepNumbers
from engine.execution.device.rehearsal import dummy_adapter
from engine.execution.device.runner import Forward
from engine.execution.ranks.runner import NOTHING, Kind, LeadModel, gather_free_bytes, packed, unpacked
from engine.kernels.collectives import Communicators
from engine.kernels.native.exchange import Exchange, Share
from engine.kv import KvSpace
from engine.layers import AdaptedRows, StepAdapters
from engine.models import Model
from engine.models.decoder import Decoder
from engine.plan import Sampled, ScheduledSeq, StepPlan
from engine.sequence import Sequence as TokenSequence

#: In a step's message, instead of the number of output rows: the step is a recorded one.
_RECORDED: Final = -1


def backend_of(config: EngineConfig, device: torch.device) -> str | None:
    """The library that sums over the ranks of `config` on `device`: "nccl" or "gloo". None: the native kernels of CPUs
    sum, or there is a single process. Raises EngineError if these ranks cannot compute on that device."""
    if config.ranks == 1 or (device.type == "cpu" and config.kernels not in ("ragged", "triton")):
        return None
    if device.type == "cpu":
        return "gloo"
    if config.kernels not in ("auto", "triton", "ragged") or (config.kernels == "auto" and not find_spec("triton")):
        raise EngineError(
            ErrorText.of(
                "{tensor_parallel}={} and {pipeline_parallel}={} on GPUs need {kernels}='triton': pip install "
                "'penstock[gpu]'",
                *(config.tensor_parallel, config.pipeline_parallel),
            )
        )
    gpus = torch.cuda.device_count()
    if config.own_ranks <= gpus:
        if not distributed.is_nccl_available():
            raise EngineError(ErrorText.of("{} ranks on GPUs need a torch with NCCL", config.ranks))
        return "nccl"
    if config.graphs:
        raise EngineError(
            ErrorText.of(
                "{tensor_parallel}={} by {pipeline_parallel}={} needs {} GPUs on this machine, and this process sees "
                "{}. To try ranks that share a GPU, with sums through the host: {graphs}=False and {kv_cache_bytes}",
                *(config.tensor_parallel, config.pipeline_parallel, config.own_ranks, gpus),
            )
        )
    return "gloo"


def device_of(kind: str, index: int) -> torch.device:
    """The device of a rank, by its `index` among the ranks of its machine. `kind`: "cpu" or "cuda". Ranks share GPUs if
    there are fewer."""
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", index % torch.cuda.device_count())


class DeviceLead(LeadModel):
    """The LeadModel of ranks on devices."""

    def __init__(self, share: Decoder, exchange: Exchange | None, communicators: Communicators) -> None:
        """`share`: the lead's. `exchange`: of all ranks, for messages alone. None: there are no others, as kernels are
        only compiled. `communicators`: the lead's, for what is computed."""
        super().__init__(share, exchange)
        self.communicators = communicators

    def logits(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """See Model. `hidden`: [rows, width]. Not of several stages. Raises DeviceLostError."""
        assert self.communicators.sums is not None
        self.send(packed(Kind.LOGITS, (len(hidden),), ()))
        return _gathered_logits(self.share, self.communicators, self.communicators.sums.broadcast(hidden.contiguous()))

    def fail(self) -> None:
        """End the ranks' work, for good: after an exception they may be at different steps. Any thread may call it."""
        if self.exchange is not None:
            self.exchange.fail()
        self.communicators.fail()


def _gathered_logits(share: Decoder, communicators: Communicators, hidden: Tensor) -> Tensor:
    """The logits of `hidden`, which all ranks of a stage have, [rows, vocabulary]."""
    logits = share.logits(hidden)
    if communicators.sums is None:
        return logits
    vocabulary, ranks = share.vocab_size, communicators.sums.share.ranks
    widths = [len(Share(rank, ranks).of(vocabulary)) for rank in range(ranks)]
    by_rank = communicators.sums.gather(torch.nn.functional.pad(logits, (0, max(widths) - logits.shape[1])))
    return torch.cat([by_rank[rank, :, :width] for rank, width in enumerate(widths)], 1)


class RanksDeviceRunner(DeviceRunner):
    """The lead's DeviceRunner: sends each step to the followers before it runs its own share."""

    def __init__(
        self,
        model: Model,
        *,
        spaces: Sequence[KvSpace],
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        graphs: bool = True,
    ) -> None:
        """`model`: a DeviceLead. For the rest see DeviceRunner. Waits until all ranks have made their KV caches. Raises
        DeviceLostError."""
        assert isinstance(model, DeviceLead)
        self._lead, self._sampled_rows = model, 0
        numbers = (block_size, max_num_seqs, max_num_batched_tokens, max_model_len, int(graphs))
        model.send(packed(Kind.CACHES, (*numbers, *(space.num_blocks for space in spaces)), ()))
        super().__init__(
            model,
            spaces=spaces,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            graphs=graphs,
        )
        model.gather_ready()

    def launch(self, plan: StepPlan) -> Any:
        """See DeviceRunner. After an exception the ranks have failed."""
        try:
            return super().launch(plan)
        except BaseException:
            self._lead.fail()
            raise

    def collect(self, launched: Any) -> Any:
        """See launch."""
        try:
            return super().collect(launched)
        except BaseException:
            self._lead.fail()
            raise

    def record_next(self, longest: int | None = None) -> bool:
        """See launch."""
        try:
            return super().record_next(longest)
        except BaseException:
            self._lead.fail()
            raise

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        """See DeviceRunner. All ranks copy."""
        if copies:
            self._lead.send(packed(Kind.COPIES, [number for copy in copies for number in copy], ()))
        super().copy_blocks(copies)

    def _send_to_ranks(
        self, rows: Sequence[ScheduledSeq], numbers: StepNumbers, shape: Shape, outputs: int | None
    ) -> None:
        adapters, owners = owners_of(rows)
        counts = np.fromiter((row.count for row in rows), np.int64, len(rows))
        self._lead.send(self._lead.packed_adapters(adapters, (owners, counts) if adapters else ()))
        self._sampled_rows = sum(1 + len(row.draft) for row in rows if row.samples)
        sizes = (
            _RECORDED if outputs is None else outputs,
            self._sampled_rows,
            numbers.end,
            numbers.more,
            numbers.changes,
            shape.rows,
            shape.tokens,
            shape.most_queries,
            shape.adapter_tiles,
        )
        arrays: list[NDArray[Any]] = [numbers.host, *numbers.separate]
        self._lead.send(packed(Kind.STEP, (*sizes, *shape.most_places, *numbers.widths), arrays))


@dataclass(frozen=True, slots=True)
class _Passing:
    """A step that passes through the stages."""

    logits: Forward
    """Its `hidden` is the logits of the rows from which tokens are sampled, [rows, vocabulary]."""
    arrived: Callable[[], None]
    """Lets the device wait for the logits."""
    sampling: list[ScheduledSeq]
    slots: list[int]
    """The slots of `sampling`, which may have lost them, or have others, when the logits arrive."""
    scored: list[tuple[ScheduledSeq, range]]
    """See Launched."""


class StagesDeviceRunner(RanksDeviceRunner):
    """The lead's runner of several stages: several plans may be launched before the first is collected, of sequences
    that do not wait for each other's tokens."""

    def __init__(self, model: Model, **settings: Any) -> None:
        """See RanksDeviceRunner. `model`: a DeviceLead of several stages."""
        self._arrived: Callable[[], None] = lambda: None
        super().__init__(model, **settings)
        assert self._lead.communicators.after is not None
        assert self._lead.communicators.back is not None
        self._after, self._back = self._lead.communicators.after, self._lead.communicators.back

    def needs_token(self, sequence: TokenSequence) -> bool:
        """Always: a token is known once its step has passed all stages."""
        return True

    @torch.inference_mode()
    def collect(self, launched: Any) -> list[Sampled]:
        """Wait for the last stage's logits, sample from them, and wait for the tokens. See RanksDeviceRunner."""
        passing: _Passing = launched
        sequences = [row.seq for row in passing.sampling]
        current = [sequence.slot for sequence in sequences]
        _assign(sequences, passing.slots)
        try:
            passing.arrived()
            sampled = super()._sampled(passing.logits, passing.sampling, passing.scored)
            if passing.scored:
                count = sum(len(span) for _, span in passing.scored)
                hidden = torch.empty(count, 0, device=self.device)
                sampled = replace(sampled, hidden=hidden, prompt_logits=self._prompt_logits)
            results: list[Sampled] = super().collect(sampled)
        except BaseException:
            self._lead.fail()
            raise
        finally:
            _assign(sequences, current)
        if passing.scored:
            self._lead.send(packed(Kind.LOGITS, (0, 0), ()))
        return results

    def _sampled(self, ended: Forward, sampling: list[ScheduledSeq], scored: list[tuple[ScheduledSeq, range]]) -> Any:
        return _Passing(ended, self._arrived, sampling, [row.seq.slot for row in sampling], scored)

    def _run(self, plan: StepPlan, shape: Shape, scored: list[tuple[ScheduledSeq, range]], step: Any) -> Forward:
        ended = super()._run(plan, shape, scored, step)
        self._after.broadcast(ended.hidden.contiguous())
        return self._passing(ended)

    def _run_recorded(self, shape: Shape) -> None:
        super()._run_recorded(shape)
        assert self._hidden is not None
        self._after.broadcast(self._hidden[: shape.rows])

    def _replay(self, plan: StepPlan, shape: Shape, step: Any) -> Forward:
        return self._passing(super()._replay(plan, shape, step))

    def _passing(self, ended: Forward) -> Forward:
        """The first stage's part of a step, with room for the last one's logits. These are received from now on: the
        last stage must never wait for a lead that waits for it."""
        logits = self._room(self._sampled_rows)
        self._arrived = self._back.begin_broadcast(logits) if self._sampled_rows else lambda: None
        return replace(ended, hidden=logits, slots=ended.slots.clone(), positions=ended.positions.clone())

    def _logits(self, hidden: Tensor, adapters: AdaptedRows | None) -> Tensor:
        return hidden

    def _prompt_logits(self, hidden: Tensor, start: int) -> Tensor:
        """The logits of a step's scored rows from `start` on, as many as `hidden` has, [rows, vocabulary]. The last
        stage keeps their hidden states."""
        self._lead.send(packed(Kind.LOGITS, (start, len(hidden)), ()))
        return self._back.broadcast(self._room(len(hidden)))

    def _room(self, rows: int) -> Tensor:
        """An empty tensor for logits, [rows, vocabulary]."""
        return torch.empty(rows, self.model.vocab_size, dtype=self.model.kernels.compute_dtype, device=self.device)


def _assign(sequences: list[TokenSequence], slots: list[int]) -> None:
    for sequence, slot in zip(sequences, slots, strict=True):
        sequence.slot = slot


class _Follower(DeviceRunner):
    """The runner of a rank other than the lead: has no sequences, samples nothing."""

    def __init__(
        self,
        model: Model,
        communicators: Communicators,
        loaded: dict[int, Adapter],
        *,
        max_num_batched_tokens: int,
        **settings: Any,
    ) -> None:
        """`loaded`: the loaded adapters by number, to which another thread adds some. For the rest see
        DeviceRunner."""
        super().__init__(model, max_num_batched_tokens=max_num_batched_tokens, **settings)
        self._communicators, self._loaded = communicators, loaded
        #: The next step's adapters, the index of each row's among them, and the tokens of each row.
        self._adapted: tuple[tuple[Adapter, ...], NDArray[np.int64], NDArray[np.int64]] | None = None
        #: The last hidden states of the scored rows of steps that the lead has not collected.
        self._scored: deque[Tensor] = deque()
        if communicators.before is not None:
            width = model.embedding()[1].shape[1]
            dtype = model.kernels.compute_dtype
            self._entering = torch.zeros(max_num_batched_tokens, width, dtype=dtype, device=self.device)

    def repeat(self, numbers: Sequence[int], arrays: list[NDArray[Any]]) -> None:
        """Run a step of the lead's. `numbers`, `arrays`: of its STEP message; see RanksDeviceRunner. Raises
        DeviceLostError."""
        outputs, sampled_rows, end, more, changes, rows, tokens, most_queries, tiles, *groups = numbers
        half = len(groups) // 2
        most_places, widths = tuple(groups[:half]), tuple(groups[half:])
        shape = Shape(rows, tokens, most_queries, most_places, tiles)
        self._rows.widen(widths)
        host, *separate = arrays
        sent = self._inputs.send(StepNumbers(self._inputs.lent(host), end, more, changes, widths, tuple(separate)))
        if self._communicators.before is not None:
            assert self._entering is not None
            self._communicators.before.broadcast(self._entering[:tokens])
        if outputs == _RECORDED:
            self._send_recorded_adapters(shape)
            self._run_recorded(shape)
            assert self._hidden is not None
            hidden, sampled = self._hidden[:rows], sent if more else slice(sampled_rows)
        else:
            adapters = self._step_adapters(host[end : end + outputs].astype(np.int64))
            _, hidden = self._compute(shape, sent[:outputs], adapters)
            sampled = slice(sampled_rows)
        if self._communicators.after is not None:
            self._communicators.after.broadcast(hidden.contiguous())
        elif self.model.staged:
            if sampled_rows:
                self._send_logits(hidden[sampled])
            if outputs > sampled_rows:
                self._scored.append(hidden[sampled_rows:])

    def take_adapters(self, numbers: Sequence[int], arrays: list[NDArray[Any]]) -> None:
        """Take the adapters of the next step, and forget those that the lead has freed. `numbers`, `arrays`: see
        LeadModel.packed_adapters; these are the owner of each row and its number of tokens, int64 [rows]."""
        count, *numbers = numbers
        if arrays:
            present = [
                dummy_adapter(self.model) if number == NOTHING else self._loaded[number] for number in numbers[:count]
            ]
            self._adapted = tuple(present), arrays[0], arrays[1]
        for number in numbers[count:]:
            self._loaded.pop(number, None)

    def _step_adapters(self, output_rows: NDArray[np.int64]) -> StepAdapters | None:
        """The adapters of a step that is not recorded; see DeviceAdapters.send."""
        if self._adapted is None:
            return None
        (adapters, owners, counts), self._adapted = self._adapted, None
        if self._adapters is None:
            rows = AdapterRows(adapters, owners.repeat(counts), self.device)
            return StepAdapters(rows, rows.select(output_rows))
        step = self._adapters.assigned(adapters, owners, decodes=bool((counts == 1).all()))
        return self._adapters.send(step, counts.tolist(), output_rows)

    def _send_recorded_adapters(self, shape: Shape) -> None:
        if self._adapters is None:
            return
        if self._adapted is None:
            self._adapters.clear(shape.rows, shape.adapter_tiles)
            return
        (adapters, owners, _), self._adapted = self._adapted, None
        step = self._adapters.assigned(adapters, owners, decodes=True)
        self._adapters.send_recorded(step, shape.rows, shape.adapter_tiles)

    def logits(self, start: int, rows: int) -> None:
        """Send the lead the logits of `rows` scored rows of its oldest step, from `start` on. 0: the step has been
        collected, and its hidden states are dropped. Raises DeviceLostError."""
        if self._communicators.after is not None:
            return
        if rows:
            self._send_logits(self._scored[0][start : start + rows])
        else:
            self._scored.popleft()

    def _send_logits(self, hidden: Tensor) -> None:
        assert isinstance(self.model, Decoder)
        logits = _gathered_logits(self.model, self._communicators, hidden).to(self.model.kernels.compute_dtype)
        if self._communicators.back is not None:
            self._communicators.back.broadcast(logits.contiguous())


@dataclass(slots=True)
class _Settings:
    """The settings of a DeviceRunner, in the order of a CACHES message."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    graphs: int


@torch.inference_mode()
def follow_on_device(
    share: Decoder, exchange: Exchange, communicators: Communicators, adapters: dict[int, Adapter]
) -> None:
    """Handle the lead's messages until DeviceLostError: a rank has failed. `share`: this rank's. `exchange`: of all
    ranks, by which messages come. `communicators`: this rank's. `adapters`: see _Follower's `loaded`."""
    runner: _Follower | None = None
    width = share.embedding()[1].shape[1]
    while True:
        kind, numbers, arrays = unpacked(exchange.receive())
        if kind == Kind.CACHES:
            runner = None
            torch.cuda.empty_cache()
            runner = _runner(share, communicators, adapters, _Settings(*numbers[:5]), numbers[5:])
            if share.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(share.device)
            exchange.gather(torch.zeros(1))
            continue
        if kind == Kind.MEMORY:
            step = numbers[0]
            if share.device.type == "cuda" and runner is not None:  # which has done the lead's largest steps
                beside, runner = runner.kv_bytes, None
                beside += torch.cuda.memory_allocated(share.device)
                step = max(step, torch.cuda.max_memory_allocated(share.device) - beside)
            gather_free_bytes(exchange, share.device, step, arrays)
            continue
        assert runner is not None
        if kind == Kind.STEP:
            runner.repeat(numbers, arrays)
        elif kind == Kind.COPIES:
            runner.copy_blocks(list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)))
        elif kind == Kind.ADAPTERS:
            runner.take_adapters(numbers, arrays)
        elif share.staged:
            runner.logits(*numbers)
        else:
            assert communicators.sums is not None
            hidden = torch.empty(numbers[0], width, dtype=share.kernels.compute_dtype, device=share.device)
            _gathered_logits(share, communicators, communicators.sums.broadcast(hidden))


def _runner(
    share: Decoder,
    communicators: Communicators,
    adapters: dict[int, Adapter],
    settings: _Settings,
    blocks: Sequence[int],
) -> _Follower:
    return _Follower(
        share,
        communicators,
        adapters,
        spaces=[KvSpace(count, group.window) for count, group in zip(blocks, share.kv_groups, strict=True)],
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        graphs=bool(settings.graphs),
    )
