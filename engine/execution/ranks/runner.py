"""The runner and model of a stage's first rank, and what the other ranks do with what these send."""

from __future__ import annotations

import struct
import weakref
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters import Adapter, AdapterRows
from engine.execution.runner import BatchBuilder, Runner, StepBatch, copy_blocks, run_step
from engine.kernels.native.exchange import Exchange, Share
from engine.kernels.reference import PEAK_BYTES
from engine.kv import KvSpace
from engine.layers import AdaptedRows, StepAdapters
from engine.models import Model
from engine.models.decoder import Decoder
from engine.plan import Sampled, StepPlan

#: The index of the output rows among a step's arrays.
_OUTPUT_ROWS = 2
#: The types of arrays. A message holds their indexes.
_TYPES = tuple(np.dtype(name) for name in ("int64", "int32", "float32", "bool"))
_CODES = {kind: i for i, kind in enumerate(_TYPES)}


class Kind(IntEnum):
    """What a message asks for, or answers."""

    CACHES = 0
    COPIES = 1
    STEP = 2
    LOGITS = 3
    ADAPTERS = 4
    MEMORY = 5


class LeadModel:
    """A Model: the share of a stage's first rank, with the logits of all ranks of the stage. The stage's followers do
    the same by `follow`."""

    def __init__(self, share: Decoder, exchange: Exchange | None) -> None:
        """`exchange`: this rank's end; None if it has the stage for itself."""
        self.share, self.exchange = share, exchange
        self.kernels, self.device, self.dtype = share.kernels, share.device, share.dtype
        self.vocab_size, self.context_length = share.vocab_size, share.context_length
        self.kv_groups, self.rope_switch, self.staged = share.kv_groups, share.rope_switch, share.staged
        self.linears, self.embedding, self.weights = share.linears, share.embedding, share.weights
        self.canonical, self.pack, self.forward = share.canonical, share.pack, share.forward
        self.cut, self.elsewhere = share.cut, share.elsewhere
        width = share.embedding()[1].shape[1]
        hidden = torch.zeros(1, width, dtype=share.kernels.compute_dtype)
        self._finds_peaks = exchange is not None and share.has_head and share.peak_values(hidden) is not None
        self._peaks: tuple[Tensor, Tensor] | None = None
        # The followers know an adapter by its number, until it is gone here.
        self._numbers: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()
        self._gone: deque[int] = deque()
        ranks = 1 if exchange is None else exchange.share.ranks
        self._own = [Share(rank, ranks).of(self.vocab_size) for rank in range(ranks)]

    def number(self, adapter: Adapter, number: int) -> None:
        """The followers have loaded `adapter`, as `number`."""
        self._numbers[adapter] = number
        weakref.finalize(adapter, self._gone.append, number)

    def adapters_message(self, rows: StepAdapters | None) -> bytes:
        """The adapters of the next step's rows, if there are some, and those that are gone. Empty if there are none."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        if rows is None and not gone:
            return b""
        tokens = None if rows is None else rows.tokens
        assert tokens is None or isinstance(tokens, AdapterRows)
        present = [] if tokens is None else [self._numbers[adapter] for adapter in tokens.adapters]
        owners = [] if tokens is None else [tokens.owners]
        return packed(Kind.ADAPTERS, (len(present), *present, *gone), owners)

    def send(self, message: bytes | memoryview) -> None:
        """Send a message to the stage's followers."""
        if self.exchange is not None and message:
            self.exchange.send(message)

    def gather_ready(self) -> None:
        """Wait until all followers have done what they were sent."""
        if self.exchange is not None:
            self.exchange.gather(torch.zeros(1))

    def logits(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """See Model. No adapter changes the head."""
        if self.exchange is None:
            return self.share.logits(hidden)
        self.exchange.send(packed(Kind.LOGITS, (), [hidden.numpy()]))
        every = self.exchange.gather(_own_logits(self.share, hidden))
        assert every is not None
        return torch.cat([every[rank, :, : len(own)] for rank, own in enumerate(self._own)], 1)

    def peaks(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """See Model. Those of several ranks are found within the step."""
        return self.share.peaks(hidden) if self.exchange is None else self._peaks

    def _best(self, peaks: bytes, rows: int) -> tuple[Tensor, Tensor]:
        """The peaks of all tokens, of those of each rank. In plain Python: numpy is slow after a native call that has
        emptied the caches."""
        ranks = [
            struct.unpack_from(f"={rows}q{rows}f{rows}?", peaks, at) for at in range(0, len(peaks), PEAK_BYTES * rows)
        ]
        places = []
        for row, values in enumerate(zip(*(rank[rows : 2 * rows] for rank in ranks), strict=True)):
            # Of equal ones the first rank's, which has the smaller token ids.
            best = values.index(max(values))
            places.append(self._own[best].start + ranks[best][row])
        finite = list(map(all, zip(*(rank[2 * rows :] for rank in ranks), strict=True)))
        return torch.tensor(places), torch.tensor(finite)

    def step(
        self, batch: StepBatch, greedy: int, caches: Sequence[Tensor], entering: NDArray[np.float32] | None = None
    ) -> Tensor:
        """Send a step and compute it here. Of the first `greedy` output rows all ranks find the peaks. `entering`: what
        the stage before this one returned."""
        if self.exchange is not None:
            greedy *= self._finds_peaks
            first = batch.attention[0]
            arrays = [*batch.arrays, *(() if entering is None else (entering,))]
            self.exchange.send(packed(Kind.STEP, (greedy, first.most_queries, first.most_places), arrays))
        hidden = run_step(self.share, caches, batch, None if entering is None else torch.from_numpy(entering))
        self._peaks = None
        if self.exchange is not None and greedy:
            self._peaks = self._best(_gathered_peaks(self.share, self.exchange, hidden, greedy), greedy)
        return hidden


def types_of(share: Decoder) -> str:
    """The data types of a rank, in words: all ranks of a model have the same."""
    weights, computed = (str(dtype).removeprefix("torch.") for dtype in (share.dtype, share.kernels.compute_dtype))
    return f"{weights}, computed in {computed} by {share.kernels.identity}"


def _own_logits(share: Decoder, hidden: Tensor) -> Tensor:
    """This rank's logits, [rows, the most tokens of a rank]."""
    exchange = share.kernels.exchange
    assert exchange is not None
    logits = share.logits(hidden).float()
    most = -(-share.vocab_size // exchange.share.ranks)
    return torch.nn.functional.pad(logits, (0, most - logits.shape[1]))


def _gathered_peaks(share: Decoder, exchange: Exchange, hidden: Tensor, rows: int) -> bytes:
    """On the first rank, Kernels.peak_values of the first rows, of each rank."""
    found = share.peak_values(hidden if rows == len(hidden) else hidden[:rows])
    assert found is not None
    return exchange.gather_bytes(found)


class RanksRunner(Runner):
    """The lead's Runner: sends each step to the followers before it runs its own share."""

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
        """End the ranks' work: after an exception they are not at the same place any more."""
        assert self._lead.exchange is not None
        self._lead.exchange.fail()

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        if copies:
            self._send(packed(Kind.COPIES, [number for copy in copies for number in copy], ()))
        super().copy_blocks(copies)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled]:
        """See Runner. After an exception, once the step was sent, the exchange fails."""
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
    """What a rank other than the lead has of the runner's state."""

    def __init__(self, share: Decoder, adapters: dict[int, Adapter]) -> None:
        """`adapters`: the loaded ones by number, to which another thread adds some."""
        self.share, self.caches = share, list[Tensor]()
        self._adapters = adapters
        self._builder: BatchBuilder | None = None
        self._adapted: AdapterRows | None = None

    def batch(self, arrays: list[NDArray[Any]], most_queries: int, most_places: int) -> StepBatch:
        """The batch of a step, with the adapters that were sent before it."""
        assert self._builder is not None
        adapted, self._adapted = self._adapted, None
        return self._builder.batch(arrays, most_queries, most_places, _selected(adapted, arrays[_OUTPUT_ROWS]))

    def take(self, kind: int, numbers: Sequence[int], arrays: list[NDArray[Any]]) -> None:
        """Do what is no step."""
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
    """Do what the stage's first rank sends, until DeviceLostError: a rank has failed. `adapters`: see Replica."""
    replica = Replica(share, adapters)
    while True:
        kind, numbers, arrays = unpacked(exchange.receive())
        if kind == Kind.STEP:
            greedy, *most = numbers
            entering = None if share.is_first else torch.from_numpy(arrays.pop())
            hidden = run_step(share, replica.caches, replica.batch(arrays, *most), entering)
            if greedy:
                _gathered_peaks(share, exchange, hidden, greedy)
        elif kind == Kind.LOGITS:
            exchange.gather(_own_logits(share, torch.from_numpy(arrays[0])))
        else:
            replica.take(kind, numbers, arrays)
            if kind == Kind.CACHES:
                exchange.gather(torch.zeros(1))


def packed(kind: int, numbers: Sequence[int], arrays: Sequence[NDArray[Any]]) -> bytes:
    """A message of the lead, as bytes that a follower reads in place: what to do, numbers, and arrays of at most two
    dimensions."""
    head, parts = [kind, len(numbers), len(arrays), *numbers], [b""]
    for array in arrays:
        head += (_CODES[array.dtype], array.ndim, len(array), array.shape[1] if array.ndim == 2 else 1)
        parts.append(array.tobytes())
        if array.nbytes % 8:
            parts.append(bytes(-array.nbytes % 8))
    parts[0] = struct.pack(f"={len(head)}q", *head)
    return b"".join(parts)


def unpacked(message: memoryview) -> tuple[int, list[int], list[NDArray[Any]]]:
    """The kind, the numbers and the arrays of a message. The arrays are views of it."""
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
