"""Servers that take connections and answer nothing, as one that is stopped, or writes to a disk that hangs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import httpx
import pytest

from producers import AsyncClient
from producers.client import leases as readers
from producers.client.leases import ReaderLeases
from producers.connection import connect
from producers.gateway import metrics
from producers.gateway.admission import authentication, limits
from producers.gateway.admission.limits import Overload
from producers.store.waiting import Bounds, Pressure
from tests.chaos.links import Links
from tests.producers.gateway.conftest import Make, Open
from tests.producers.gateway.test_keys import as_caller
from tests.producers.gateway.test_keys import make as make
from tests.producers.gateway.test_metrics import figures

#: What nothing here takes where servers are waited for as long as is said, with some to spare (s).
LONG = 60.0


@pytest.fixture
def hung() -> Iterator[str]:
    """Its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0"


def test_the_gateways_own_figures_are_still_told(open_door: Open, hung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SILENT_S", 0.1)
    with httpx.Client(base_url=open_door(store=hung).url, timeout=LONG) as http:
        assert figures(http)["penstock_up",] == 0


def test_a_request_waits_once_and_the_next_ones_not_at_all(
    open_door: Open, make: Make, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many calls it makes: the key is looked up, then the task."""
    monkeypatch.setattr(authentication, "FRESH_S", 0.0)
    monkeypatch.setattr(connect, "PAUSE_S", LONG)
    abort, waits = connect._AsyncChecked._abort, []
    monkeypatch.setattr(connect._AsyncChecked, "_abort", lambda self, due: (waits.append(self), abort(self, due)))
    with closing(Links()) as links:
        url = f"redis://127.0.0.1:{links.add('gateway', urlsplit(valkey_url).port or 0)}/0"
        door, token = open_door(auth="keys", broker=url, store=url), make(scopes=("read", "metrics"))
        with httpx.Client(base_url=door.url, timeout=LONG, headers=as_caller(token)) as http:
            assert http.get("/v1/tasks/none").status_code == 404
            links.make("gateway", "silence")
            with monkeypatch.context() as patched:
                patched.setattr(connect, "SILENT_S", 0.2)
                assert [http.get("/v1/tasks/none").status_code for _ in range(3)] == [503] * 3
                assert figures(http)["penstock_up",] == 0
            # Of seven calls that would; one that the gateway makes by itself may be under way beside the first.
            assert len(waits) in (1, 2)


async def test_who_asks_for_room_waits_once_however_many_they_are(hung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they are let in: that the store is away is submit's to tell."""
    monkeypatch.setattr(limits, "SILENT_S", 0.1)
    monkeypatch.setattr(limits, "PRESSURE_FRESH_S", 1e6)
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
