"""A source that fails is run again, and holds up no other."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from redis.asyncio import Redis

from producers.sources import source
from producers.sources.source import Outcomes, Source, Sources
from producers.store.measurements import read_source_items


class Counted(Source):
    """Fails until its last run, which goes on. `told`: set when that begins."""

    def __init__(self, name: str, *errors: Exception) -> None:
        self.name, self.errors = name, list(errors)
        self.told, self.gave_back = asyncio.Event(), False

    async def run(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.told.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.gave_back = True

    def unready(self) -> list[str]:
        return ["it is asleep"] if self.name == "asleep" else []


async def test_outcomes_that_the_store_did_not_take_are_counted_once_it_does(valkey_url: str) -> None:
    outcomes = Outcomes()
    outcomes.begin("orders")
    outcomes.add("orders", "done", 2)
    async with Redis.from_url("redis://127.0.0.1:9") as away:
        await outcomes.send(away, "p")
    outcomes.add("orders", "done")
    outcomes.add("orders", "refused")
    async with Redis.from_url(valkey_url) as store:
        await outcomes.send(store, "p")
        await outcomes.send(store, "p")
        items = await read_source_items(store)
    assert items == {("orders", "done"): 3, ("orders", "refused"): 1, ("orders", "missed"): 0}


async def test_a_source_that_fails_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(source, "WELL_S", 0.05)
    well, failing = Counted("well"), Counted("failing", OSError("no queue"), ValueError("a fault"))
    sources = Sources([well, failing, Counted("asleep")])
    task = asyncio.create_task(sources.run())
    await well.told.wait()
    assert "failing: no queue" in sources.unready()
    await failing.told.wait()
    while sources.unready() != ["asleep: it is asleep"]:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert well.gave_back
    assert failing.gave_back
    assert "it drains" in sources.unready()
