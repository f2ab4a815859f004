"""Servers that take connections and answer nothing, as one that is stopped, or writes to a disk that hangs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest

from producers import AsyncClient
from producers.gateway import metrics
from producers.gateway.admission import overload
from producers.gateway.admission.overload import Overload
from producers.store.waiting import Bounds, Pressure
from producers.sweeper import reader_leases as readers
from producers.sweeper.reader_leases import ReaderLeases
from tests.producers.gateway.conftest import Door
from tests.producers.gateway.test_metrics import figures

#: What nothing here takes where servers are waited for as long as is said, with some to spare (s).
LONG = 60.0


@pytest.fixture
def hung() -> Iterator[str]:
    """Its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0"


def test_the_gateways_own_figures_are_still_told(
    open_door: Callable[..., Door], hung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SILENT_S", 0.1)
    with httpx.Client(base_url=open_door(store=hung).url, timeout=LONG) as http:
        assert figures(http)["penstock_up",] == 0


async def test_who_asks_for_room_waits_once_however_many_they_are(hung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they are let in: that the store is away is submit's to tell."""
    monkeypatch.setattr(overload, "SILENT_S", 0.1)
    monkeypatch.setattr(overload, "FRESH_S", 1e6)
    waits = 0

    class Counting(asyncio.Timeout):
        async def __aenter__(self) -> Counting:
            nonlocal waits
            waits += 1
            await super().__aenter__()
            return self

    async with AsyncClient(hung) as client:
        found = Overload(client.store, Bounds(pool=5))
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "timeout", lambda s: Counting(asyncio.get_running_loop().time() + s))
            asked = asyncio.gather(*(found.look("a queue") for _ in range(5)))
            assert await asyncio.wait_for(asked, LONG) == [Pressure()] * 5
    assert waits == 1


async def test_a_readers_end_is_not_held_up(hung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease lapses."""
    monkeypatch.setattr(readers, "SILENT_S", 0.1)
    async with AsyncClient(hung) as client:
        await asyncio.wait_for(ReaderLeases(client).leave(["a task"]), LONG)
