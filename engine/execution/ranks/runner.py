"""The lead's runner and model, and what the followers do with what these send."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from engine.adapters import Adapter, AdapterRows
from engine.execution.ranks.messages import packed, unpacked
from engine.execution.runner import Runner, StepBatch, copy_blocks, run_step
from engine.kernels import RaggedBatch
from engine.kernels.native.exchange import Exchange, Share
from engine.kv import KvSpace
from engine.layers import AdaptedRows, StepAdapters
from engine.models import Model
from engine.models.decoder import Decoder
from engine.plan import Sampled, StepPlan

#: The arrays that all KV groups share, and those of each.
_SHARED, _PER_GROUP = 3, 6


class _Kind(IntEnum):
    CACHES = 0
    COPIES = 1
    STEP = 2
    LOGITS = 3
    ADAPTERS = 4


class LeadModel:
    """A Model: the lead's share, with the logits of all ranks. Its followers do the same by `follow`."""

    def __init__(self, share: Decoder, exchange: Exchange) -> None:
        self.share, self.exchange = share, exchange
        self.kernels, self.device, self.dtype = share.kernels, share.device, share.dtype
        self.vocab_size, self.context_length = share.vocab_size, share.context_length
        self.kv_groups, self.rope_switch = share.kv_groups, share.rope_switch
        self.linears, self.embedding, self.weights = share.linears, share.embedding, share.weights
        self.canonical, self.pack, self.forward = share.canonical, share.pack, share.forward
        width = share.embedding()[1].shape[1]
        self._finds_peaks = share.peak_values(torch.zeros(1, width, dtype=share.kernels.compute_dtype)) is not None
        self._peaks: tuple[Tensor, Tensor] | None = None
        self.cut = share.cut
        # The followers know an adapter by its number, until it is gone here.
        self._numbers: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()
        self._gone: deque[int] = deque()
        self._own = [Share(rank, exchange.share.ranks).of(self.vocab_size) for rank in range(exchange.share.ranks)]

    def number(self, adapter: Adapter, number: int) -> None:
        """The followers have loaded `adapter`, as `number`."""
        self._numbers[adapter] = number
        weakref.finalize(adapter, self._gone.append, number)

    def _send_adapters(self, rows: StepAdapters | None) -> None:
        """Send the adapters of the next step's rows, if there are some, and those that are gone."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        if rows is None and not gone:
            return
        tokens = None if rows is None else rows.tokens
        assert tokens is None or isinstance(tokens, AdapterRows)
        present = [] if tokens is None else [self._numbers[adapter] for adapter in tokens.adapters]
        owners = [] if tokens is None else [torch.from_numpy(tokens.owners)]
        self.exchange.send(packed(_Kind.ADAPTERS, (len(present), *present, *gone), owners))

    def logits(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """See Model. No adapter changes the head."""
        self.exchange.send(packed(_Kind.LOGITS, (), [hidden]))
        every = self.exchange.gather(_own_logits(self.share, hidden))
        assert every is not None
        return torch.cat([every[rank, :, : len(own)] for rank, own in enumerate(self._own)], 1)

    def peaks(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """See Model. They are found within the step."""
        return self._peaks

    def step(self, batch: StepBatch, greedy: int, compute: Callable[[], Tensor]) -> Tensor:
        """Send a step and `compute` it here. Of the first `greedy` output rows all ranks find the peaks."""
        greedy *= self._finds_peaks
        self._send_adapters(batch.adapters)
        self.exchange.send(_step_message(batch, greedy))
        hidden = compute()
        self._peaks = None
        if greedy:
            every = self.exchange.gather(_own_peaks(self.share, hidden[:greedy]))
            assert every is not None
            values, places, finite = every.numpy().transpose(1, 0, 2)
            # Of equal ones the first rank's, which has the smaller token ids.
            best = places[values.argmax(0), np.arange(greedy)]
            self._peaks = torch.from_numpy(best.astype(np.int64)), torch.from_numpy(finite.all(0))
        return hidden


def _own_logits(share: Decoder, hidden: Tensor) -> Tensor:
    """This rank's logits, [rows, the most tokens of a rank]."""
    exchange = share.kernels.exchange
    assert exchange is not None
    logits = share.logits(hidden).float()
    most = -(-share.vocab_size // exchange.share.ranks)
    return torch.nn.functional.pad(logits, (0, most - logits.shape[1]))


def _own_peaks(share: Decoder, hidden: Tensor) -> Tensor:
    """This rank's largest logits, the token ids, and whether all are finite, fp64 [3, rows]."""
    found = share.peak_values(hidden)
    assert found is not None
    places, finite, values = found
    # By numpy, whose small operations take a tenth of the time of torch's.
    own = np.empty((3, len(places)))
    own[0], own[1], own[2] = values.numpy(), places.numpy(), finite.numpy()
    own[1] += share.own_tokens.start
    return torch.from_numpy(own)


class RanksRunner(Runner):
    """The lead's Runner: sends each step to the followers before it runs its own share."""

    def __init__(self, model: Model, *, spaces: Sequence[KvSpace], block_size: int, max_num_seqs: int) -> None:
        """`model`: a LeadModel."""
        assert isinstance(model, LeadModel)
        self._lead, self._exchange = model, model.exchange
        numbers = (block_size, *(space.num_blocks for space in spaces))
        self._exchange.send(packed(_Kind.CACHES, numbers, ()))
        super().__init__(model, spaces=spaces, block_size=block_size, max_num_seqs=max_num_seqs)
        # They have theirs, too.
        self._exchange.gather(torch.zeros(1))

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        if copies:
            self._exchange.send(packed(_Kind.COPIES, [number for copy in copies for number in copy], ()))
        super().copy_blocks(copies)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sampled]:
        """See Runner. After an exception the ranks are not at the same place any more: the exchange fails."""
        try:
            return super().execute(plan)
        except BaseException:
            self._exchange.fail()
            raise

    def _forward(self, batch: StepBatch, greedy: int) -> Tensor:
        return self._lead.step(batch, greedy, partial(super()._forward, batch, greedy))


def _step_message(batch: StepBatch, greedy: int) -> bytes:
    tensors = [batch.tokens, batch.output_rows, batch.positions]
    numbers = [greedy, int(batch.long is not None)]
    for group, entered in zip(batch.attention, batch.entered, strict=True):
        numbers += (group.most_queries, group.most_places, group.window or 0)
        tensors += (group.slots, group.query_starts, group.kv_lens, group.tables, group.table_rows)
        tensors.append(batch.tokens[:0] if entered is None else entered)
    if batch.long is not None:
        tensors.append(batch.long)
    return packed(_Kind.STEP, numbers, tensors)


def _step_of(numbers: list[int], tensors: list[Tensor], adapted: AdapterRows | None) -> StepBatch:
    tokens, output_rows, positions = tensors[:_SHARED]
    attention, every = [], []
    long, *groups = numbers
    for i in range(len(groups) // 3):
        most_queries, most_places, window = groups[3 * i : 3 * i + 3]
        slots, starts, lengths, tables, rows, entered = tensors[_SHARED + i * _PER_GROUP :][:_PER_GROUP]
        attention.append(
            RaggedBatch(
                slots=slots,
                query_starts=starts,
                kv_lens=lengths,
                tables=tables,
                table_rows=rows,
                most_queries=most_queries,
                most_places=most_places,
                window=window or None,
                positions=positions,
            )
        )
        every.append(entered if len(entered) else None)
    return StepBatch(
        tokens=tokens,
        positions=positions,
        long=tensors[-1] if long else None,
        attention=tuple(attention),
        output_rows=output_rows,
        entered=tuple(every),
        adapters=None if adapted is None else StepAdapters(adapted, adapted.select(output_rows.numpy())),
    )


@torch.inference_mode()
def follow(share: Decoder, exchange: Exchange, adapters: dict[int, Adapter]) -> None:
    """Do what the lead sends, until DeviceLostError: a rank has failed. `adapters`: the loaded ones by number, to which
    another thread adds some."""
    caches: list[Tensor] = []
    adapted: AdapterRows | None = None
    while True:
        kind, numbers, tensors = unpacked(exchange.receive())
        if kind == _Kind.STEP:
            greedy, *numbers = numbers
            hidden = run_step(share, caches, _step_of(numbers, tensors, adapted))
            adapted = None
            if greedy:
                exchange.gather(_own_peaks(share, hidden[:greedy]))
        elif kind == _Kind.LOGITS:
            exchange.gather(_own_logits(share, tensors[0]))
        elif kind == _Kind.ADAPTERS:
            count, *numbers = numbers
            if tensors:
                present = [adapters[number] for number in numbers[:count]]
                adapted = AdapterRows(present, tensors[0].numpy(), share.device)
            for number in numbers[count:]:
                adapters.pop(number, None)
        elif kind == _Kind.COPIES:
            copy_blocks(caches, list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)))
        else:
            size, *blocks = numbers
            caches = [
                share.kernels.kv_cache(group, count + 1, size, share.device)
                for group, count in zip(share.kv_groups, blocks, strict=True)
            ]
            exchange.gather(torch.zeros(1))
