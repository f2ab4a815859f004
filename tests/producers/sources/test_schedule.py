"""Each time of a schedule makes one task, whoever leads and however clocks jump."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from producers.client.aio import AsyncClient
from producers.contract import keys
from producers.sources.schedule import LATE_S, Schedule, ScheduleSettings
from producers.sources.source import Context
from producers.store.measurements import read_source_items
from tests.chaos.sourcing import SourcesProcess
from tests.producers.sources.test_cron import at
from tests.waiting import PATIENCE_S

TASK = {"model": "tiny", "prompt": "def main():", "max_tokens": 3}
HOURLY: dict[str, Any] = {"type": "schedule", "cron": "0 * * * *", "task": TASK}
NOON = at("2026-11-22T12:00")


class Clock:
    """A schedule in one process, asked at times of the test's choice."""

    def __init__(self, client: AsyncClient, valkey: Redis, **settings: Any) -> None:
        context = Context(client, "", "here", "")
        self._client, self._outcomes = client, context.outcomes
        self.schedule = ScheduleSettings.model_validate(HOURLY | settings).source("hourly", context)
        self._valkey = valkey

    async def at(self, now: float) -> float:
        noted = self._valkey.hget(keys.SCHEDULES, "hourly")
        assert isinstance(self.schedule, Schedule)
        return await self.schedule.step(now, None if noted is None else int(noted))  # type: ignore[arg-type]

    async def became(self) -> dict[str, int]:
        """What became of its times, as /metrics counts it."""
        await self._outcomes.send(self._client.store, "here")
        return {outcome: count for (_, outcome), count in (await read_source_items(self._client.store)).items()}


@pytest.fixture
async def client(valkey_url: str, model: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url) as client:
        yield client


async def test_it_begins_now_and_makes_one_task_for_each_time(client: AsyncClient, valkey: Redis, records: Any) -> None:
    clock = Clock(client, valkey)
    assert await clock.at(NOON + 600) == 3000
    assert records() == {}
    assert await clock.at(NOON + 3599.5) == 0.5
    for now in (NOON + 3600, NOON + 3600.1, NOON + 3700):
        await clock.at(now)
    assert list(records()) == ["hourly-20261122T130000Z"]
    await clock.at(NOON + 7201)
    assert len(records()) == 2


async def test_two_who_lead_make_one_task(client: AsyncClient, valkey: Redis, records: Any) -> None:
    one, other = Clock(client, valkey), Clock(client, valkey)
    await one.at(NOON)
    for clock in (one, other):
        assert isinstance(clock.schedule, Schedule)
        await clock.schedule.step(NOON + 3600, NOON)  # both have read the same
    assert len(records()) == 1
    assert valkey.hget(keys.SCHEDULES, "hourly") == str(NOON + 3600).encode()


@pytest.mark.parametrize(("missed", "made"), [("skip", []), ("once", ["hourly-20261122T170000Z"])])
async def test_missed_times(client: AsyncClient, valkey: Redis, records: Any, missed: str, made: list[str]) -> None:
    clock = Clock(client, valkey, missed=missed)
    await clock.at(NOON + 1)
    await clock.at(at("2026-11-22T17:00") + LATE_S + 1)
    assert list(records()) == made
    await clock.at(at("2026-11-22T18:00") + LATE_S - 1)
    assert [*made, "hourly-20261122T180000Z"] == sorted(records())
    assert await clock.became() == {"done": 1 + len(made), "refused": 0, "missed": 1 - len(made)}


async def test_a_clock_that_goes_back_makes_nothing_twice(client: AsyncClient, valkey: Redis, records: Any) -> None:
    clock = Clock(client, valkey)
    await clock.at(NOON + 1)
    for now in (NOON + 3600, NOON + 600, NOON + 3600, NOON + 3605):
        await clock.at(now)
    assert len(records()) == 1


async def test_a_task_that_cannot_be_made_is_told_until_the_next_can(
    client: AsyncClient, valkey: Redis, records: Any
) -> None:
    clock = Clock(client, valkey, task=TASK | {"model": "nobody"})
    await clock.at(NOON + 1)
    await clock.at(NOON + 3600)
    assert "There is no model" in clock.schedule.unready()[0]
    card = valkey.hget(keys.MODELS, "tiny")
    valkey.hset(keys.MODELS, "nobody", card)  # type: ignore[arg-type]
    await clock.at(NOON + 7200)
    assert clock.schedule.unready() == []
    assert len(records()) == 1
    assert await clock.became() == {"done": 1, "refused": 1, "missed": 0}


async def test_a_batchs_file_goes_to_a_watched_folder_once(client: AsyncClient, valkey: Redis, tmp_path: Path) -> None:
    (tmp_path / "nightly.jsonl").write_text("{}\n")
    where = {"batch": str(tmp_path / "nightly.jsonl"), "folder": str(tmp_path), "task": None}
    clock = Clock(client, valkey, **where)
    await clock.at(NOON + 1)
    for _ in range(2):
        assert isinstance(clock.schedule, Schedule)
        await clock.schedule.step(NOON + 3600, NOON)
        files = list((tmp_path / "inbox").iterdir())
        assert [one.name for one in files] in (["hourly-20261122T130000Z.jsonl"], [])
        for one in files:
            assert one.read_text() == "{}\n"
            one.unlink()  # taken
    assert not list((tmp_path / "inbox").iterdir())


@pytest.mark.usefixtures("model")
def test_processes_share_a_schedule(valkey_url: str, valkey: Redis, records: Any, tmp_path: Path) -> None:
    """One leads; when it is killed, the other goes on once its lease is over."""
    config = (
        '[daily]\ntype = "schedule"\ncron = "@daily"\nmissed = "once"\n[daily.task]\nmodel = "tiny"\nprompt = "x"\n'
    )
    with SourcesProcess(valkey_url, tmp_path, config) as first, SourcesProcess(valkey_url, tmp_path, config) as second:
        first.until(lambda: valkey.exists(keys.source_leader("daily"), keys.SCHEDULES) == 2)
        second.until(lambda: "another schedule daily leads" in first.log.read_text() + second.log.read_text())
        leader = next(one for one in (first, second) if "another schedule" not in one.log.read_text())
        other = second if leader is first else first
        leader.process.kill()
        leader.process.wait(PATIENCE_S)
        valkey.hset(keys.SCHEDULES, "daily", int(valkey.time()[0]) - 2 * 24 * 3600)  # type: ignore[index]
        valkey.delete(keys.source_leader("daily"))  # as if its lease were over
        other.until(lambda: "made daily-" in other.log.read_text())
        assert other.stop() == 0
    assert len(records()) == 1
    assert not valkey.exists(keys.source_leader("daily"))
