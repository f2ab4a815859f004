"""The ranks of a model as threads of this process: the followers on threads of their own, the lead as a Driver."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.adapters import Adapter, load_adapter
from engine.errors import DeviceLostError
from engine.execution.ranks.runner import LeadModel, RanksRunner, follow
from engine.kernels.native import load_library
from engine.kernels.native.exchange import Exchange, Share, shared_memory
from engine.models import load_model
from engine.models.decoder import Decoder
from tests.parity.driver import Driver


def exchanges_of(ranks: int) -> list[Exchange]:
    library = load_library()
    assert library is not None
    memory = shared_memory(ranks)
    try:
        return [Exchange(library, memory, Share(rank, ranks)) for rank in range(ranks)]
    finally:
        os.close(memory)


class Ranks:
    """`shares`: each rank's, the lead's first."""

    def __init__(self, folder: Path, ranks: int, dtype: str = "float32", **settings: Any) -> None:
        self.exchanges = exchanges_of(ranks)
        self.shares = [
            load_model(folder, dtype, torch.device("cpu"), "native", exchange=exchange, **settings)
            for exchange in self.exchanges
        ]
        self.lead = LeadModel(self.shares[0], self.exchanges[0])
        #: Of each rank, by number.
        self.adapters: list[dict[int, Adapter]] = [{} for _ in self.exchanges]
        self._threads = [
            threading.Thread(target=self._follow, args=pair, daemon=True)
            for pair in zip(self.shares[1:], self.exchanges[1:], strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, share: Decoder, exchange: Exchange) -> None:
        try:
            follow(share, exchange, self.adapters[exchange.share.rank])
        except DeviceLostError:
            return
        except BaseException:
            exchange.fail()
            raise

    def adapter(self, folder: Path, number: int) -> Adapter:
        """Load an adapter on all ranks. Returns the lead's."""
        for share, adapters in zip(self.shares, self.adapters, strict=True):
            adapters[number] = load_adapter(folder, share)
        self.lead.number(self.adapters[0][number], number)
        return self.adapters[0].pop(number)

    def driver(self, **settings: Any) -> Driver:
        return Driver(self.lead, runner=RanksRunner, **settings)

    def close(self) -> None:
        self.exchanges[0].fail()
        for thread in self._threads:
            thread.join()


@contextmanager
def ranks_of(folder: Path, ranks: int, **settings: Any) -> Iterator[Ranks]:
    made = Ranks(folder, ranks, **settings)
    try:
        yield made
    finally:
        made.close()
