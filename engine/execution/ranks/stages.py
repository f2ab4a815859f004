"""Stages: groups of layers that follow each other, each in processes of its own, through which several steps pass at
the same time.

    lead, stage 0: step N+1 as arrays, computed -> what enters stage 1 -> ... -> the last stage: N's peaks or logits
         ^----------------------------------------------------------------------------------------'

Each link carries messages in one direction, in order, so that a stage handles one message after another and needs to
know nothing of other steps. Copies and adapters, which must come before a step, go the same way. To a MEMORY message,
of the free bytes of each rank so far, each stage adds its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters import Adapter
from engine.errors import DeviceLostError
from engine.execution.ranks.runner import Kind, LeadModel, RanksRunner, Replica, packed, unpacked
from engine.execution.runner import PreparedStep
from engine.kernels.native.exchange import Exchange
from engine.kv import KvSpace
from engine.layers import AdaptedRows
from engine.models import Model
from engine.models.decoder import Decoder
from engine.plan import Sampled, StepPlan
from engine.sampling import SamplingBatch, chosen, sample
from engine.sequence import Sequence as TokenSequence

Message = tuple[list[int], list[NDArray[Any]]]


class Link(Protocol):
    """One end of a channel for messages from one process to another, in order. Its methods raise DeviceLostError once
    the other end, or any rank, has failed."""

    def send(self, message: bytes | memoryview) -> None: ...
    def receive(self) -> memoryview: ...
    def fail(self) -> None:
        """End all waiting at both ends, for good."""


class Chain:
    """The lead's ends of the links to the second stage and from the last one. Used by one thread, but for `fail`."""

    def __init__(self, after: Link, back: Link, explain: Callable[[], None] = lambda: None) -> None:
        """`explain`: raises DeviceLostError with the reason why a link has failed, if the reason can be known."""
        self._after, self._back, self._explain = after, back, explain
        #: Whether the lead waits for the last stage. Any thread may read it.
        self.waits = False
        self._arrived: queue.SimpleQueue[tuple[int, Message] | None] = queue.SimpleQueue()
        self._early: dict[int, deque[Message]] = {
            kind: deque() for kind in (Kind.STEP, Kind.LOGITS, Kind.CACHES, Kind.MEMORY)
        }
        # Results are read at once: while the last stage waits to send one, no stage before it could send either.
        self._thread = threading.Thread(target=self._read, name="penstock-stages", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Send a message to the second stage."""
        self._after.send(message)

    def next(self, kind: Kind) -> Message:
        """Wait for the last stage's next message of this kind: its numbers and arrays. Raises DeviceLostError."""
        early = self._early[kind]
        while not early:
            self.waits = True
            arrived = self._arrived.get()
            self.waits = False
            if arrived is None:
                self._arrived.put(None)
                self._explain()
                raise DeviceLostError("a stage of the model has failed, and is waited for no more")
            self._early[arrived[0]].append(arrived[1])
        return early.popleft()

    def fail(self) -> None:
        """End all waiting, for good. Any thread may call it."""
        self._after.fail()
        self._back.fail()

    def close(self) -> None:
        self.fail()
        self._thread.join()

    def _read(self) -> None:
        try:
            while True:
                kind, numbers, arrays = unpacked(self._back.receive())
                self._arrived.put((kind, (numbers, arrays)))
        except DeviceLostError:
            self._arrived.put(None)


class BusyLink:
    """A Link into a stage that counts how long the stage works on its messages."""

    def __init__(self, link: Link) -> None:
        self.send, self.fail, self._receive = link.send, link.fail, link.receive
        # The seconds up to the last message, and since when the stage works on it: one value, as two threads use it.
        self._worked: tuple[float, float | None] = (0.0, None)

    def receive(self) -> memoryview:
        before = self.worked_s()
        self._worked = (before, None)
        received = self._receive()
        self._worked = (before, time.monotonic())
        return received

    def worked_s(self) -> float:
        """The seconds for which the stage has worked so far. Any thread may call it."""
        seconds, since = self._worked
        return seconds if since is None else seconds + time.monotonic() - since


class StagedModel(LeadModel):
    """The LeadModel of the first stage, with the logits of the last one."""

    def __init__(self, share: Decoder, exchange: Exchange | None, chain: Chain) -> None:
        super().__init__(share, exchange)
        self.chain = chain

    def logits(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """See Model. Waits for the steps in flight as well, because links keep the order."""
        self.chain.send(packed(Kind.LOGITS, (), [hidden.numpy()]))
        return torch.from_numpy(self.chain.next(Kind.LOGITS)[1][0])

    def free_bytes_by_rank(self, usable: float, step: int, share: float) -> list[int]:
        """See LeadModel. Those of all stages' ranks."""
        sizes = super().free_bytes_by_rank(usable, step, share)
        self.chain.send(packed(Kind.MEMORY, sizes, [np.array([usable, share], np.float32)]))
        return self.chain.next(Kind.MEMORY)[0]


@dataclass(slots=True)
class _Outcome:
    """The last stage's results of a step."""

    peaks: tuple[Tensor, Tensor] | None = None
    logits: Tensor | None = None
    """The logits of the rows from which tokens are sampled, unless there are peaks."""


class StagesRunner(RanksRunner):
    """The lead's Runner: launches several plans before the first is collected, if no sequence is in two of them."""

    def __init__(self, model: Model, *, spaces: Sequence[KvSpace], block_size: int, max_num_seqs: int) -> None:
        """`model`: a StagedModel."""
        assert isinstance(model, StagedModel)
        self._chain = model.chain
        super().__init__(model, spaces=spaces, block_size=block_size, max_num_seqs=max_num_seqs)
        self._chain.next(Kind.CACHES)
        self._outcome = _Outcome()

    def _send(self, message: bytes) -> None:
        super()._send(message)
        if message:
            self._chain.send(message)

    def fail(self) -> None:
        if self._lead.exchange is not None:
            self._lead.exchange.fail()
        self._chain.fail()

    def needs_token(self, sequence: TokenSequence) -> bool:
        """Always: a token is known once its step has passed all stages."""
        return True

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Any:
        """Compute the first stage's part of a plan, and send the hidden states on. After an exception all links
        fail."""
        step = self._prepare(plan)
        try:
            self._send(self._lead.adapters_message(step.batch.adapters))
            entering = self._lead.step(step.batch, 0, self._caches)
            first, rows = step.batch.attention[0], len(step.batch.output_rows)
            numbers = (step.greedy, step.chosen, int(rows > step.chosen), first.most_queries, first.most_places)
            self._chain.send(packed(Kind.STEP, numbers, [*step.batch.arrays, entering.numpy()]))
        except BaseException:
            self.fail()
            raise
        return step

    @torch.inference_mode()
    def collect(self, launched: Any) -> list[Sampled]:
        step: PreparedStep = launched
        (peaks, logits, hidden), arrays = self._chain.next(Kind.STEP)
        tensors = iter(map(torch.from_numpy, arrays))
        self._outcome = _Outcome()
        if peaks:
            self._outcome.peaks = next(tensors), next(tensors)
        if logits:
            self._outcome.logits = next(tensors)
        return self._results(step, next(tensors) if hidden else torch.empty(step.chosen, 0))

    def _sample(self, hidden: Tensor, how: SamplingBatch, adapters: AdaptedRows | None) -> list[Sampled]:
        if self._outcome.peaks is not None:
            return chosen(*self._outcome.peaks)
        assert self._outcome.logits is not None
        return sample(self._outcome.logits, how, self._model.kernels.candidates)


@torch.inference_mode()
def lead_stage(
    share: Decoder, exchange: Exchange | None, before: Link, after: Link, adapters: dict[int, Adapter]
) -> None:
    """The loop of the first rank of a stage other than the first: handle each message from the stage `before`, and have
    the stage's other ranks handle it, until DeviceLostError.

    `after`: the link to the next stage; of the last stage, to the lead. `adapters`: see Replica.
    """
    replica, model = Replica(share, adapters), LeadModel(share, exchange)
    while True:
        received = before.receive()
        message: bytes | memoryview = received
        kind, numbers, arrays = unpacked(received)
        if kind == Kind.STEP:
            greedy, sampled, keeps, *maxima = numbers
            entering = arrays.pop()
            batch = replica.batch(arrays, *maxima)
            hidden = model.step(batch, greedy if share.has_head else 0, replica.caches, entering)
            if share.has_head:
                after.send(_outcome_message(model, hidden, greedy, sampled, keeps))
            else:
                after.send(packed(kind, numbers, [*arrays, hidden.numpy()]))
        elif kind == Kind.LOGITS:
            if share.has_head:
                message = packed(kind, (), [model.logits(torch.from_numpy(arrays[0])).float().numpy()])
            after.send(message)
        elif kind == Kind.MEMORY:
            usable, part = arrays[0].tolist()
            after.send(packed(kind, [*numbers, *model.free_bytes_by_rank(usable, 0, part)], arrays))
        else:
            model.send(message)
            replica.apply(kind, numbers, arrays)
            if kind == Kind.CACHES:
                model.gather_ready()
            if not share.has_head or kind == Kind.CACHES:
                after.send(message)


def _outcome_message(model: LeadModel, hidden: Tensor, greedy: int, sampled: int, keeps: int) -> bytes:
    """The last stage's STEP message to the lead: peaks of the first `greedy` rows, or else logits of the first
    `sampled`; with `keeps`, all hidden states, of which the lead may ask for more logits."""
    arrays: list[NDArray[Any]] = []
    peaks = model.peaks(hidden[:greedy]) if greedy else None
    if peaks is not None:
        arrays += [peak.numpy() for peak in peaks]
    logits = sampled > 0 and peaks is None
    if logits:
        arrays.append(model.logits(hidden[:sampled]).float().numpy())
    if keeps:
        arrays.append(hidden.numpy())
    return packed(Kind.STEP, (int(peaks is not None), int(logits), keeps), arrays)
