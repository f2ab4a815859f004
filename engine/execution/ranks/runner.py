"""The runner and model of a stage's first rank, and the loop of the stage's other ranks (`follow`).

    first rank                                   other ranks
    CACHES   blocks of each KV group        ->   make their KV caches; all wait for all
    COPIES   of KV blocks                   ->   copy
    ADAPTERS of the next step's rows        ->   kept for the step
    STEP     arrays of BatchBuilder.batch   ->   run their share of it; the products' sums go through the exchange
             tokens with the highest logits <-   of each rank's part of the vocabulary, for greedy rows
    LOGITS   hidden states                  ->   their part of the vocabulary
                                            <-   logits
    MEMORY   before the KV caches are made  ->   measure what they have left
                                            <-   free bytes

A message is bytes: int64 kind, numbers and shapes of arrays, then the arrays (`packed`, `unpacked`).
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters import Adapter, AdapterRows
from engine.execution.runner import BatchBuilder, Runner, StepBatch, copy_blocks, run_step
from engine.kernels.native.exchange import Exchange, Share
from engine.kv import KvSpace
from engine.layers import AdaptedRows, StepAdapters
from engine.memory import GIB, free_bytes
from engine.models import Model
from engine.models.decoder import Decoder
from engine.plan import Sampled, StepPlan

logger = logging.getLogger("penstock.engine")

#: The bytes of messages that are no step: new KV caches, copies of blocks, adapters that are gone.
OTHER_BYTES = 1 << 26
#: The index of the output rows among a step's arrays.
_OUTPUT_ROWS = 2
#: The data types of arrays. A message holds their indexes.
_TYPES = tuple(np.dtype(name) for name in ("int64", "int32", "float32", "bool"))
_CODES = {kind: i for i, kind in enumerate(_TYPES)}


#: The number of an adapter that changes nothing.
NOTHING: Final = -1


class Kind(IntEnum):
    """The kinds of messages."""

    CACHES = 0
    COPIES = 1
    STEP = 2
    LOGITS = 3
    ADAPTERS = 4
    MEMORY = 5


class LeadModel:
    """A Model: the share of a stage's first rank, with the logits of all ranks of the stage."""

    def __init__(self, share: Decoder, exchange: Exchange | None) -> None:
        """`exchange`: this rank's end; None if it is the stage's only rank."""
        self.share, self.exchange = share, exchange
        self.kernels, self.device, self.dtype = share.kernels, share.device, share.dtype
        self.vocab_size, self.context_length = share.vocab_size, share.context_length
        self.kv_groups, self.rope_switch, self.staged = share.kv_groups, share.rope_switch, share.staged
        self.linears, self.embedding, self.weights = share.linears, share.embedding, share.weights
        self.canonical, self.pack, self.forward = share.canonical, share.pack, share.forward
        self.cut, self.elsewhere = share.cut, share.elsewhere
        self._peaks: tuple[Tensor, Tensor] | None = None
        # An adapter's number, by which the followers know it until it is freed here.
        self._numbers: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()
        self._unloaded: deque[int] = deque()
        ranks = 1 if exchange is None else exchange.share.ranks
        self._vocabularies = [Share(rank, ranks).of(self.vocab_size) for rank in range(ranks)]

    def number(self, adapter: Adapter, number: int) -> None:
        """Note that the followers have loaded `adapter` as `number`. When it is freed here, they free it."""
        self._numbers[adapter] = number
        weakref.finalize(adapter, self._unloaded.append, number)

    def adapters_message(self, rows: StepAdapters | None) -> bytes:
        """A message with the adapters of the next step's rows, and those that are freed. Empty if there are neither."""
        if rows is None:
            return self.packed_adapters((), ())
        assert isinstance(rows.tokens, AdapterRows)
        return self.packed_adapters(rows.tokens.adapters, [rows.tokens.owners])

    def packed_adapters(self, adapters: Sequence[Adapter], arrays: Sequence[NDArray[np.int64]]) -> bytes:
        """See `adapters_message`. `arrays`: tell which rows have which. An adapter that the followers have not loaded
        is NOTHING: it is rehearsal's."""
        unloaded = [self._unloaded.popleft() for _ in range(len(self._unloaded))]
        if not adapters and not unloaded:
            return b""
        present = [self._numbers.get(adapter, NOTHING) for adapter in adapters]
        return packed(Kind.ADAPTERS, (len(present), *present, *unloaded), arrays)

    def send(self, message: bytes | memoryview) -> None:
        """Send a message of `packed` to the stage's followers. Raises DeviceLostError."""
        if self.exchange is not None and message:
            self.exchange.send(message)

    def gather_ready(self) -> None:
        """Wait until all followers have handled all messages. Raises DeviceLostError."""
        if self.exchange is not None:
            self.exchange.gather(torch.zeros(1))

    def least_free_bytes(self, usable: float, step: int, share: float) -> int:
        """The bytes that the KV cache may take on each device and machine: the least of all ranks. See free_bytes.
        Raises DeviceLostError."""
        sizes = self.free_bytes_by_rank(usable, step, share)
        least, own = min(sizes), sizes[0]
        if f"{least / GIB:.1f}" != f"{own / GIB:.1f}":
            logger.info(
                "rank %d has %.1f GiB for its KV cache, this one %.1f: all take the former",
                *(sizes.index(least), least / GIB, own / GIB),
            )
        return least

    def free_bytes_by_rank(self, usable: float, step: int, share: float) -> list[int]:
        """The bytes that the KV cache may take on each rank of the stage, in their order. A rank whose steps turn out
        larger than this one's of `step` bytes subtracts its own."""
        own = free_bytes(self.device, usable, step, share)
        if self.exchange is None:
            return [own]
        self.send(packed(Kind.MEMORY, (step,), [np.array([usable, share], np.float32)]))
        by_rank = self.exchange.gather(torch.tensor([own]))
        assert by_rank is not None
        sizes: list[int] = by_rank.flatten().tolist()
        return sizes

    def logits(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """See Model. No adapter changes the head."""
        if self.exchange is None:
            return self.share.logits(hidden)
        self.exchange.send(packed(Kind.LOGITS, (), [hidden.numpy()]))
        by_rank = self.exchange.gather(_share_logits(self.share, hidden))
        assert by_rank is not None
        return torch.cat([by_rank[rank, :, : len(vocabulary)] for rank, vocabulary in enumerate(self._vocabularies)], 1)

    def peaks(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """See Model. Those of several ranks are found within the step."""
        return self.share.peaks(hidden) if self.exchange is None else self._peaks

    def step(
        self, batch: StepBatch, greedy: int, caches: Sequence[Tensor], entering: NDArray[np.float32] | None = None
    ) -> Tensor:
        """Send a step to the followers and compute this rank's share of it. Returns the hidden states of the output
        rows, [output rows, width]; of the last stage's first `greedy` rows, `peaks` then has the result.

        `caches`: one for each KV group. `entering`: the hidden states that the stage before returned, fp32
        [tokens, width]. Raises DeviceLostError.
        """
        if self.exchange is not None:
            first = batch.attention[0]
            arrays = [*batch.arrays, *(() if entering is None else (entering,))]
            self.exchange.send(packed(Kind.STEP, (greedy, first.most_queries, first.most_places), arrays))
        hidden = run_step(self.share, caches, batch, None if entering is None else torch.from_numpy(entering))
        self._peaks = None
        if self.exchange is not None and greedy:
            self._peaks = self.share.peaks(hidden[:greedy])
        return hidden


def types_of(share: Decoder) -> str:
    """A description of a rank's data types, kernels and kind of GPU, which must be equal on all ranks of a model."""
    weights, computed = (str(dtype).removeprefix("torch.") for dtype in (share.dtype, share.kernels.compute_dtype))
    described = f"{weights}, computed in {computed} by {share.kernels.identity}"
    if share.device.type == "cuda":
        described += " for sm_{}{}".format(*torch.cuda.get_device_capability(share.device))
    return described


def _share_logits(share: Decoder, hidden: Tensor) -> Tensor:
    """This rank's logits, fp32 [rows, tokens of the largest share of the vocabulary], zeros at the end."""
    exchange = share.kernels.exchange
    assert exchange is not None
    logits = share.logits(hidden).float()
    width = -(-share.vocab_size // exchange.share.ranks)
    return torch.nn.functional.pad(logits, (0, width - logits.shape[1]))


class RanksRunner(Runner):
    """The lead's Runner: sends each step to the followers before it computes its own share."""

    def __init__(self, model: Model, *, spaces: Sequence[KvSpace], block_size: int, max_num_seqs: int) -> None:
        """`model`: a LeadModel."""
        assert isinstance(model, LeadModel)
        self._lead = model
        self._send(packed(Kind.CACHES, (block_size, *(space.num_blocks for space in spaces)), ()))
        super().__init__(model, spaces=spaces, block_size=block_size, max_num_seqs=max_num_seqs)
        self._lead.gather_ready()

    def _send(self, message: bytes) -> None:
        self._lead.send(message)

    def fail(self) -> None:
        """Fail the exchange: after an exception the ranks may be at different steps."""
        assert self._lead.exchange is not None
        self._lead.exchange.fail()

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        if copies:
            self._send(packed(Kind.COPIES, [number for copy in copies for number in copy], ()))
        super().copy_blocks(copies)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled]:
        """See Runner. If an exception is raised after the step was sent, the exchange fails."""
        step = self._prepare(plan)
        try:
            return self._results(step, self._forward(step.batch, step.greedy))
        except BaseException:
            self.fail()
            raise

    def _forward(self, batch: StepBatch, greedy: int) -> Tensor:
        self._send(self._lead.adapters_message(batch.adapters))
        return self._lead.step(batch, greedy, self._caches)


def _selected(tokens: AdapterRows | None, output_rows: NDArray[Any]) -> StepAdapters | None:
    return None if tokens is None else StepAdapters(tokens, tokens.select(output_rows))


class Replica:
    """The runner's state on a rank other than the lead: KV caches and the adapters of the next step."""

    def __init__(self, share: Decoder, adapters: dict[int, Adapter]) -> None:
        """`adapters`: the loaded adapters by number; another thread adds to them."""
        self.share, self.caches = share, list[Tensor]()
        self._adapters = adapters
        self._builder: BatchBuilder | None = None
        self._adapted: AdapterRows | None = None

    def batch(self, arrays: list[NDArray[Any]], most_queries: int, most_places: int) -> StepBatch:
        """The batch of a step, with the adapters of the message before it. `arrays`, and both maxima: see
        BatchBuilder.batch."""
        assert self._builder is not None
        adapted, self._adapted = self._adapted, None
        return self._builder.batch(arrays, most_queries, most_places, _selected(adapted, arrays[_OUTPUT_ROWS]))

    def apply(self, kind: int, numbers: Sequence[int], arrays: list[NDArray[Any]]) -> None:
        """Handle a message that is neither STEP nor LOGITS."""
        if kind == Kind.ADAPTERS:
            count, *numbers = numbers
            if arrays:
                present = [self._adapters[number] for number in numbers[:count]]
                self._adapted = AdapterRows(present, arrays[0], self.share.device)
            for number in numbers[count:]:
                self._adapters.pop(number, None)
        elif kind == Kind.COPIES:
            copy_blocks(self.caches, list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)))
        else:
            self._make_caches(*numbers)

    def _make_caches(self, size: int, *blocks: int) -> None:
        share = self.share
        groups = zip(share.kv_groups, blocks, strict=True)
        # It only makes batches of arrays, and has no sequences.
        spaces = [KvSpace(count, group.window) for group, count in groups]
        self._builder = BatchBuilder(spaces, 0, size, share.kernels, share.device, rope_switch=share.rope_switch)
        self.caches = [
            share.kernels.kv_cache(group, count + 1, size, share.device)
            for group, count in zip(share.kv_groups, blocks, strict=True)
        ]


@torch.inference_mode()
def follow(share: Decoder, exchange: Exchange, adapters: dict[int, Adapter]) -> None:
    """Handle the messages of the stage's first rank until DeviceLostError: a rank has failed. `adapters`: see
    Replica."""
    replica = Replica(share, adapters)
    while True:
        kind, numbers, arrays = unpacked(exchange.receive())
        if kind == Kind.STEP:
            greedy, *maxima = numbers
            entering = None if share.is_first else torch.from_numpy(arrays.pop())
            hidden = run_step(share, replica.caches, replica.batch(arrays, *maxima), entering)
            if greedy:
                share.peaks(hidden[:greedy])
        elif kind == Kind.LOGITS:
            exchange.gather(_share_logits(share, torch.from_numpy(arrays[0])))
        elif kind == Kind.MEMORY:
            gather_free_bytes(exchange, share.device, numbers[0], arrays)
        else:
            replica.apply(kind, numbers, arrays)
            if kind == Kind.CACHES:
                exchange.gather(torch.zeros(1))


def gather_free_bytes(exchange: Exchange, device: torch.device, step: int, arrays: list[NDArray[Any]]) -> None:
    """Answer a MEMORY message, whose `arrays` have the usable part of the memory and this engine's share of it. `step`:
    the bytes of this rank's largest steps."""
    usable, part = arrays[0].tolist()
    exchange.gather(torch.tensor([free_bytes(device, usable, step, part)]))


def max_message(share: Decoder, tokens: int, sequences: int, length: int | None, block_size: int) -> int:
    """The bytes of the longest message that a receiver accepts: twice those of the largest step, for what lies between
    its arrays, and OTHER_BYTES for what is no step.

    `tokens`, `sequences`: of a step. `length`: of a sequence, in tokens; None: the model's context."""
    width, groups = share.embedding()[1].shape[1], len(share.all_groups)
    of_token = 4 * share.vocab_size + 8 * width + 16 * groups + 64
    of_sequence = groups * (4 * -(-(length or share.context_length) // block_size) + 16) + 64
    return 2 * (tokens * of_token + sequences * of_sequence) + OTHER_BYTES


def packed(kind: int, numbers: Sequence[int], arrays: Sequence[NDArray[Any]]) -> bytes:
    """A message as bytes that its receiver reads in place: `kind`, `numbers` (int64) and `arrays`, each of one or two
    dimensions and a type of `_TYPES`, padded to 8 bytes."""
    head, parts = [kind, len(numbers), len(arrays), *numbers], [b""]
    for array in arrays:
        head += (_CODES[array.dtype], array.ndim, len(array), array.shape[1] if array.ndim == 2 else 1)
        parts.append(array.tobytes())
        if array.nbytes % 8:
            parts.append(bytes(-array.nbytes % 8))
    parts[0] = struct.pack(f"={len(head)}q", *head)
    return b"".join(parts)


def unpacked(message: memoryview) -> tuple[int, list[int], list[NDArray[Any]]]:
    """The kind, the numbers and the arrays of a message of `packed`. The arrays are views of it."""
    kind, numbers, count = struct.unpack_from("=3q", message)
    head = struct.unpack_from(f"={numbers + 4 * count}q", message, 24)
    at, arrays = 24 + 8 * len(head), []
    for i in range(numbers, len(head), 4):
        code, dimensions, rows, columns = head[i : i + 4]
        dtype, shape = _TYPES[code], (rows, columns)[:dimensions]
        # numpy makes no empty view of the end of a buffer.
        array = np.frombuffer(message, dtype, rows * columns, at) if rows * columns else np.empty(0, dtype)
        arrays.append(array.reshape(shape))
        at += array.nbytes + -array.nbytes % 8
    return kind, list(head[:numbers]), arrays
