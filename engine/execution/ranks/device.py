"""Ranks of a model on devices: each has a DeviceRunner, whose steps the lead sends, and the device sums.

    lead: numbers of a step (device/inputs.py) -> exchange -> followers send them to their devices, and run or replay
          its last sampled tokens -> broadcast, in the step: only the lead samples
          hidden states -> broadcast -> each rank's logits -> gathered

All ranks do the same in the same order, so that their sums meet. A step that fails on one ends the group.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from engine.config import EngineConfig
from engine.errors import EngineError, ErrorText
from engine.execution.device import DeviceRunner
from engine.execution.device.inputs import Shape, StepNumbers
from engine.execution.ranks.runner import Kind, LeadModel, packed, unpacked
from engine.kernels.collectives import Collectives
from engine.kernels.native.exchange import Exchange, Share
from engine.kv import KvSpace
from engine.layers import AdaptedRows
from engine.memory import GIB, free_bytes
from engine.models import Model
from engine.models.decoder import Decoder
from engine.plan import StepPlan

logger = logging.getLogger("penstock.engine")

#: In a step's message, instead of the number of output rows: the step is a recorded one.
_RECORDED: Final = -1


def backend_of(config: EngineConfig, device: torch.device) -> str | None:
    """What sums over the ranks of `config` on `device`: "nccl" or "gloo". None: the native kernels of CPUs, or a single
    process.

    Raises EngineError if these ranks cannot compute on that device.
    """
    if config.ranks == 1 or (device.type == "cpu" and config.kernels != "ragged"):
        return None
    if config.pipeline_parallel > 1:
        raise EngineError(
            ErrorText.of(
                "{pipeline_parallel}={} is for CPUs with native kernels, and the device is {} with {kernels}={}; use "
                "{tensor_parallel} alone",
                *(config.pipeline_parallel, device.type, repr(config.kernels)),
            )
        )
    if device.type == "cpu":
        return "gloo"
    if config.kernels not in ("auto", "triton", "ragged") or (config.kernels == "auto" and not find_spec("triton")):
        raise EngineError(
            ErrorText.of(
                "{tensor_parallel}={} on GPUs needs {kernels}='triton': pip install 'penstock[gpu]'",
                config.tensor_parallel,
            )
        )
    gpus = torch.cuda.device_count()
    if config.own_ranks <= gpus:
        if not distributed.is_nccl_available():
            raise EngineError(
                ErrorText.of("{tensor_parallel}={} on GPUs needs a torch with NCCL", config.tensor_parallel)
            )
        return "nccl"
    if config.graphs:
        raise EngineError(
            ErrorText.of(
                "{tensor_parallel}={} needs {} GPUs on this machine, and this process sees {}. To try ranks that share "
                "a GPU, with sums through the host: {graphs}=False and {kv_cache_bytes}",
                *(config.tensor_parallel, config.own_ranks, gpus),
            )
        )
    return "gloo"


def device_of(kind: str, index: int) -> torch.device:
    """The device of a rank, by its index among those of its machine."""
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", index % torch.cuda.device_count())


class DeviceLead(LeadModel):
    """The LeadModel of ranks on devices."""

    def __init__(self, share: Decoder, exchange: Exchange | None, collectives: Collectives) -> None:
        """`exchange`: for messages alone. None: there are no others, as kernels are only compiled."""
        super().__init__(share, exchange)
        self._collectives = collectives
        ranks = collectives.share.ranks
        self._own = [Share(rank, ranks).of(self.vocab_size) for rank in range(ranks)]

    def logits(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """See Model. No adapter is loaded."""
        self.send(packed(Kind.LOGITS, (len(hidden),), ()))
        every = _gathered_logits(self.share, self._collectives, hidden.contiguous())
        return torch.cat([every[rank, :, : len(own)] for rank, own in enumerate(self._own)], 1)

    def least_free_bytes(self, usable: float, step: int, share: float) -> int:
        """The bytes that each rank's KV cache may take: the least of all ranks. See free_bytes; `step`: of this rank,
        the only one that samples."""
        assert self.exchange is not None
        self.send(packed(Kind.MEMORY, (step,), [np.array([usable, share], np.float32)]))
        every = self.exchange.gather(torch.tensor([free_bytes(self.device, usable, step, share)]))
        assert every is not None
        sizes = every.flatten().tolist()
        least = min(sizes)
        if least < sizes[0]:
            logger.info(
                "rank %d has %.1f GiB for its KV cache, this one %.1f: all take the former",
                *(sizes.index(least), least / GIB, sizes[0] / GIB),
            )
        return int(least)

    def fail(self) -> None:
        """End the ranks' work: after an exception they are not at the same place any more."""
        if self.exchange is not None:
            self.exchange.fail()
        self._collectives.fail()


def _gathered_logits(share: Decoder, collectives: Collectives, hidden: Tensor) -> Tensor:
    """Each rank's logits, [ranks, rows, the most tokens of a rank], of rank 0's `hidden`, which is overwritten on the
    others."""
    logits = share.logits(collectives.broadcast(hidden))
    most = -(-share.vocab_size // collectives.share.ranks)
    return collectives.gather(torch.nn.functional.pad(logits, (0, most - logits.shape[1])))


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
        """`model`: a DeviceLead."""
        assert isinstance(model, DeviceLead)
        self._lead = model
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
        if copies:
            self._lead.send(packed(Kind.COPIES, [number for copy in copies for number in copy], ()))
        super().copy_blocks(copies)

    def _tell(self, numbers: StepNumbers, shape: Shape, outputs: int | None) -> None:
        kind = _RECORDED if outputs is None else outputs
        sizes = (kind, numbers.end, numbers.more, numbers.changes, shape.rows, shape.tokens, shape.most_queries)
        arrays: list[NDArray[Any]] = [numbers.host, *numbers.separate]
        self._lead.send(packed(Kind.STEP, (*sizes, *shape.most_places, *numbers.widths), arrays))


class _Follower(DeviceRunner):
    """The runner of another rank: has no sequences, samples nothing."""

    def repeat(self, numbers: Sequence[int], arrays: list[NDArray[Any]]) -> None:
        """Run a step of the lead's."""
        outputs, end, more, changes, rows, tokens, most_queries, *groups = numbers
        half = len(groups) // 2
        most_places, widths = tuple(groups[:half]), tuple(groups[half:])
        shape = Shape(rows, tokens, most_queries, most_places)
        self._rows.widen(widths)
        host, *separate = arrays
        sent = self._inputs.send(StepNumbers(self._inputs.lent(host), end, more, changes, widths, tuple(separate)))
        if outputs == _RECORDED:
            self._run_recorded(shape)
        else:
            self._compute(shape, sent[:outputs], None)


@dataclass(slots=True)
class _Settings:
    """Of a runner, as Kind.CACHES has them."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    graphs: int


@torch.inference_mode()
def follow_on_device(share: Decoder, exchange: Exchange, collectives: Collectives) -> None:
    """Do what the lead sends, until DeviceLostError: a rank has failed."""
    runner: _Follower | None = None
    width = share.embedding()[1].shape[1]
    while True:
        kind, numbers, arrays = unpacked(exchange.receive())
        if kind == Kind.CACHES:
            runner = None
            torch.cuda.empty_cache()
            runner = _runner(share, _Settings(*numbers[:5]), numbers[5:])
            exchange.gather(torch.zeros(1))
        elif kind == Kind.LOGITS:
            hidden = torch.empty(numbers[0], width, dtype=share.kernels.compute_dtype, device=share.device)
            _gathered_logits(share, collectives, hidden)
        elif kind == Kind.MEMORY:
            runner = None  # of the steps by which memory was measured
            usable, part = arrays[0].tolist()
            exchange.gather(torch.tensor([free_bytes(share.device, usable, numbers[0], part)]))
        else:
            assert runner is not None
            if kind == Kind.STEP:
                runner.repeat(numbers, arrays)
            else:
                runner.copy_blocks(list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)))


def _runner(share: Decoder, settings: _Settings, blocks: Sequence[int]) -> _Follower:
    return _Follower(
        share,
        spaces=[KvSpace(count, group.window) for count, group in zip(blocks, share.kv_groups, strict=True)],
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        graphs=bool(settings.graphs),
    )
