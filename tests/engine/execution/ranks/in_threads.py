"""The ranks of a model as threads of this process: the followers on threads of their own, the lead as a Driver."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from engine.adapters import Adapter, load_adapter
from engine.errors import DeviceLostError
from engine.execution.ranks.nodes import Mirror
from engine.execution.ranks.runner import OTHER_BYTES, LeadModel, RanksRunner, follow, max_message
from engine.execution.ranks.stages import Chain, StagedModel, StagesRunner, lead_stage
from engine.kernels.native import load_library
from engine.kernels.native.exchange import Exchange, Share, shared_memory
from engine.models import load_model
from tests.parity.driver import Driver


def exchanges_of(ranks: int, machines: int = 1) -> list[Exchange]:
    """Each rank's end of one exchange. Of several machines each has a copy of its memory, and as many ranks."""
    library = load_library()
    assert library is not None
    ends, own = list[Exchange](), ranks // machines
    for machine in range(machines):
        memory = shared_memory(ranks)
        try:
            ends += [Exchange(library, memory, Share(machine * own + i, ranks)) for i in range(own)]
        finally:
            os.close(memory)
    for one, other in combinations(range(machines), 2):
        for i in range(own):
            ranks_of_pair = one * own + i, other * own + i
            for rank, peer, end in zip(ranks_of_pair, ranks_of_pair[::-1], socket.socketpair(), strict=True):
                Mirror(ends[rank], rank, peer, end)
    return ends


class Ranks:
    """`shares`: each rank's, a stage's first rank's first, the lead's first of all."""

    def __init__(
        self, folder: Path, ranks: int, stages: int = 1, dtype: str = "float32", machines: int = 1, **settings: Any
    ) -> None:
        self.exchanges = [exchanges_of(ranks, machines) for _ in range(stages)]
        self.links = [exchanges_of(2) for _ in range(stages if stages > 1 else 0)]
        self.shares = [
            load_model(
                folder,
                dtype,
                torch.device("cpu"),
                "native",
                exchange=exchange if ranks > 1 else None,
                stage=Share(stage, stages),
                **settings,
            )
            for stage, exchanges in enumerate(self.exchanges)
            for exchange in exchanges
        ]
        first = self.exchanges[0][0] if ranks > 1 else None
        self._chain = Chain(self.links[0][0], self.links[-1][1]) if stages > 1 else None
        self.lead = LeadModel(self.shares[0], first) if self._chain is None else self._staged(first, self._chain)
        #: Of each rank, by number.
        self.adapters: list[dict[int, Adapter]] = [{} for _ in self.shares]
        self._threads = [
            threading.Thread(target=self._follow, args=(rank, *divmod(rank, ranks)), daemon=True)
            for rank in range(1, len(self.shares))
        ]
        for thread in self._threads:
            thread.start()

    def _staged(self, exchange: Exchange | None, chain: Chain) -> StagedModel:
        return StagedModel(self.shares[0], exchange, chain)

    def _follow(self, rank: int, stage: int, own: int) -> None:
        exchanges = self.exchanges[stage]
        try:
            if own:
                follow(self.shares[rank], exchanges[own], self.adapters[rank])
            else:
                exchange = exchanges[0] if len(exchanges) > 1 else None
                links = self.links[stage - 1][1], self.links[stage][0]
                lead_stage(self.shares[rank], exchange, *links, self.adapters[rank])
        except DeviceLostError:
            return
        except BaseException:
            self._fail()
            raise

    def _fail(self) -> None:
        for ends in self.exchanges + self.links:
            ends[0].fail()

    def adapter(self, folder: Path, number: int) -> Adapter:
        """Load an adapter on all ranks. Returns the lead's."""
        for share, adapters in zip(self.shares, self.adapters, strict=True):
            adapters[number] = load_adapter(folder, share)
        self.lead.number(self.adapters[0][number], number)
        return self.adapters[0].pop(number)

    def driver(self, **settings: Any) -> Driver:
        """A Driver of all ranks. It has as many steps in flight as stages, unless `overlap` is 0. Messages of steps are
        to be no longer than it is said that they are."""
        tokens, sequences, size = (
            settings.get(*each) for each in (("tokens", 64), ("sequences", 8), ("block_size", 16))
        )
        most = max_message(self.lead.share, tokens, sequences, None, size) - OTHER_BYTES
        for exchange in itertools.chain(*self.exchanges, *self.links):
            exchange.max_message = most
        if self._chain is None:
            return Driver(self.lead, runner=RanksRunner, **settings)
        overlap = settings.pop("overlap", len(self.exchanges) - 1)
        return Driver(self.lead, runner=StagesRunner, overlap=overlap, batches=1 + overlap, **settings)

    def close(self) -> None:
        self._fail()
        for thread in self._threads:
            thread.join()
        if self._chain is not None:
            self._chain.close()


@contextmanager
def ranks_of(folder: Path, ranks: int, stages: int = 1, **settings: Any) -> Iterator[Ranks]:
    made = Ranks(folder, ranks, stages, **settings)
    try:
        yield made
    finally:
        made.close()
