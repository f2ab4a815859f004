"""Sums and messages between ranks, of any size, and their end when a rank fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engine.errors import DeviceLostError
from engine.kernels.native import load_library
from engine.kernels.native.exchange import SLOT, Exchange, Share
from engine.kernels.native.library import Pool
from tests.engine.execution.ranks.in_threads import exchanges_of
from tests.waiting import PATIENCE_S

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="native kernels are not built for this CPU")

RANKS = 3


def together(exchanges: list[Exchange], work: Callable[[Exchange], Any]) -> list[Any]:
    """What each rank's work returns."""
    with ThreadPoolExecutor(len(exchanges)) as threads:
        return list(threads.map(work, exchanges))


@pytest.mark.parametrize("count", [1, 1000, SLOT // 4, SLOT // 2 + 3])
def test_sums_are_equal_on_all_ranks_and_in_their_order(count: int) -> None:
    parts = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
    expected = (parts[0] + parts[1]) + parts[2]

    def add(exchange: Exchange) -> list[torch.Tensor]:
        assert LIBRARY is not None
        pool = Pool(LIBRARY, 1 + exchange.share.rank % 2)
        return [exchange.sum(pool, parts[exchange.share.rank].clone()) for _ in range(3)]

    for sums in together(exchanges_of(RANKS), add):
        assert all(torch.equal(each, expected) for each in sums)


@pytest.mark.parametrize("length", [0, 1, SLOT - 64, SLOT - 63, 2 * SLOT + 5])
def test_messages_and_what_is_gathered_may_be_longer_than_a_slot(length: int) -> None:
    messages = [bytes([number]) * length for number in range(4)]

    def talk(exchange: Exchange) -> Any:
        rank = exchange.share.rank
        received = []
        for message in messages:
            if rank == 0:
                exchange.send(message)
            else:
                received.append(bytes(exchange.receive()))
        every = exchange.gather(torch.full((length + 1,), rank, dtype=torch.uint8))
        if rank:
            assert every is None
            return received == messages
        assert every is not None
        return all(bool((own == of).all()) for of, own in enumerate(every))

    assert together(exchanges_of(RANKS), talk) == [True] * RANKS


def test_a_message_longer_than_any_of_a_step_is_refused() -> None:
    exchanges = exchanges_of(2)
    exchanges[1].max_message = 99

    def talk(exchange: Exchange) -> None:
        if exchange.share.rank == 0:
            exchange.send(bytes(99))
            exchange.send(bytes(100))
            return
        assert len(exchange.receive()) == 99
        with pytest.raises(
            DeviceLostError, match="a message of 100 bytes is announced; a step of this model has 99 at"
        ):
            exchange.receive()

    together(exchanges, talk)


def test_a_failure_ends_the_waiting_of_all() -> None:
    exchanges = exchanges_of(2)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(DeviceLostError):
            exchanges[1].receive()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    exchanges[0].fail()
    assert ended.wait(PATIENCE_S)
    with pytest.raises(DeviceLostError):
        exchanges[0].send(b"too late")


def test_shares_are_of_all_things_and_differ_by_one_at_most() -> None:
    for count in (1, 9, 50257):
        parts = [Share(rank, 4).of(count) for rank in range(4)]
        assert [thing for part in parts for thing in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
