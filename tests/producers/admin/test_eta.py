"""Forecasts count what comes later and goes first, as it has come lately, for a part of the time that others waited."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers.admin import eta
from producers.admin.eta import GO_ON, MANY, TURNS, Forecast, forecast, known_groups
from producers.admin.fleet import Pool
from producers.admin.observation import (
    ARRIVED_S,
    ENDED_ROWS,
    Arrivals,
    EndedTask,
    Observation,
    read_ended,
)
from producers.broker.values import QueuePosition
from producers.contract import keys
from producers.contract.profile import Profile, TaskTimes
from producers.contract.record import Record

#: Of a worker with four slots that makes 10 tasks a second, each of 100 tokens and 0.4 s.
TIMES = TaskTimes(0.01, 0.001, 0.004, 0.4, 0.3, 0.1, 0.05, 4, (1.0,) * 11)
PROFILE = Profile(knee=4, tokens_per_s=1000, tokens_per_task=100, kv_capacity=1000, task_times=TIMES)
WORKER = {"worker": "w", "incarnation": "w", "capacity": 4, "running": 4, "waiting": 0, "profile": PROFILE.to_dict()}
FIELDS = {
    "status": "queued",
    "model": "tiny",
    "version": "1",
    "tier": "batch",
    "tenant": "a",
    "n": "1",
    "tokens": "100",
    "task": '{"prompt": [1], "max_tokens": 40}',
}
WAITS = Observation(
    Record.parse("t", FIELDS), 1e6, Pool("tiny@1", "tiny"), [WORKER], QueuePosition(20, tokens=2000), PROFILE
)


def with_arrivals(better: float = 0.0, beside: float = 0.0, for_s: float = 0.0) -> Forecast:
    return forecast(replace(WAITS, arrivals=Arrivals(better, beside, for_s)))


def start(told: Forecast) -> float:
    assert told.starts is not None
    assert told.ends is not None
    assert told.starts.p50_s <= told.starts.p90_s < told.ends.p90_s
    return told.starts.p50_s


def test_better_tiers_that_go_on_coming_make_a_wait_longer() -> None:
    """4 of 10 tasks a second are theirs, as long as that goes on; then all are its own."""
    alone = start(with_arrivals())
    assert alone == pytest.approx(2.0, abs=0.01)
    assert start(with_arrivals(better=4, for_s=100)) == pytest.approx(2.0 / 0.6, abs=0.01)
    assert start(with_arrivals(better=4, for_s=2)) == pytest.approx(2.0 + 0.4 * GO_ON * 2, abs=0.01)
    assert start(with_arrivals(better=50, for_s=2)) == pytest.approx(2.0 + 5 * GO_ON * 2, abs=0.01)
    plain, rush = with_arrivals(), with_arrivals(better=4, for_s=2)
    assert plain.starts is not None
    assert rush.starts is not None
    assert rush.starts.p90_s - rush.starts.p50_s > plain.starts.p90_s - plain.starts.p50_s


def test_other_tenants_get_the_turn_as_often_as_its_own() -> None:
    assert start(with_arrivals(beside=4, for_s=1)) == pytest.approx(2.0 + 0.4 * TURNS * GO_ON, abs=0.01)
    assert start(with_arrivals(beside=1000, for_s=1000)) == pytest.approx(2.0 + 2.0 * TURNS, abs=0.01)


def test_no_slot_is_free_while_a_task_of_its_tier_or_of_a_better_one_waits() -> None:
    """By its lease a worker's four slots are free for 5 tasks that wait, as flex tasks have them."""
    worker = WORKER | {"patient": 4, "tasks": 4}
    record = Record.parse("t", FIELDS | {"tier": "default"})
    soon = replace(WAITS, record=record, workers=[worker], queue_position=QueuePosition(5, tokens=500))
    at_once = start(forecast(soon))
    for tier, waits in (("default", True), ("priority", True), ("flex", False)):
        pool = replace_pool(queued={tier: 0}, oldest_s={tier: 1.0})
        assert start(forecast(replace(soon, pool=pool))) == (pytest.approx(0.5) if waits else at_once)
    just_come = replace_pool(queued={"default": 6}, oldest_s={"default": 0.02})
    assert start(forecast(replace(soon, pool=just_come))) == at_once < 0.3


def test_a_rush_without_end_is_told_as_nothing() -> None:
    assert with_arrivals(better=1000, for_s=1e9).starts is None


def ended(ago: float, tier: str = "default", model: str = "tiny", version: str = "1") -> EndedTask:
    return EndedTask(model, version, tier, 1000.0 - ago, 1000.0 - ago / 2)


def test_arrivals_are_what_ended_and_what_waits_of_the_last_seconds() -> None:
    rows = [
        *(ended(ago) for ago in (0.5, 2.0, 5.9)),
        *(ended(1.0, "batch"), ended(1.0, "no tier"), ended(1.0, "priority", version="2"), ended(7.0)),
        EndedTask("tiny", "1", "default", None, 999.0),
    ]
    pool = replace_pool(queued={"flex": 20, "batch": 30, "default": 2}, oldest_s={"flex": 60.0, "batch": 3.0})
    still = replace(WAITS, pool=pool, workers=[])
    arrivals = still.arriving(rows, {"a": 5, "b": 10})
    assert arrivals.better == pytest.approx((3 + 2) / ARRIVED_S)
    assert arrivals.beside == pytest.approx(31 / ARRIVED_S * 10 / 15)
    assert arrivals.for_s == 60.0
    many = [EndedTask("tiny", "1", "default", 999.9 - k / 100, 1000.0 - k / 100) for k in range(ENDED_ROWS)]
    window = 1000.0 - many[-1].ended
    long = replace_pool(oldest_s={"flex": 60.0})
    assert replace(still, pool=long).arriving(many, {}).better == pytest.approx((ENDED_ROWS - 10) / window)
    # What runs came, too: 4 beside 37, of which a half came earlier where each takes twice the time.
    slow = replace(PROFILE, task_times=replace(TIMES, task=2 * ARRIVED_S))
    assert replace(WAITS, pool=pool).arriving(rows, {}).better == pytest.approx(5 / ARRIVED_S * 41 / 37)
    assert replace(WAITS, pool=pool, profile=slow).arriving(rows, {}).better == pytest.approx(5 / ARRIVED_S * 39 / 37)
    # Tasks wait for 2 s alone.
    young = replace_pool(queued={"flex": 20}, oldest_s={"flex": 2.0})
    assert replace(still, pool=young).arriving(rows, {}).better == pytest.approx((2 + 20) / 2)
    beyond = replace(WAITS, workers=[{"running": 1e308}] * 2)
    assert beyond.arriving([], {}).better == 0


def replace_pool(**fields: dict[str, float]) -> Pool:
    return replace(WAITS.pool, **fields)  # type: ignore[arg-type]


async def test_rows_that_say_no_time_are_read_and_no_more_than_the_last(valkey: Redis, valkey_url: str) -> None:
    for number in range(ENDED_ROWS + 5):
        valkey.xadd(keys.LEDGER, {"model": "m", "version": "1", "tier": "flex", "created": 500 + number}, "1000-*")
    valkey.xadd(keys.LEDGER, {"model": "m", "tier": "idle"}, "2000-*")
    valkey.xadd(keys.LEDGER, {"created": "1e9", "version": "\udc80".encode(errors="surrogateescape")}, "3000-*")
    async with AsyncRedis.from_url(valkey_url) as store:
        rows = await read_ended(store)
    assert len(rows) == ENDED_ROWS
    assert [(row.created, row.ended) for row in rows[:3]] == [(None, 3.0), (None, 2.0), (0.704, 1.0)]


def test_workers_are_added_up_once_for_all_who_ask_of_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be a thousand, and each tells dozens of figures."""
    fleet = replace(WAITS, workers=[WORKER | {"worker": f"w{n}", "incarnation": f"w{n}"} for n in range(20)])
    alone, known, read = forecast(fleet), dict[Any, Any](), []
    of = Profile.of
    monkeypatch.setattr(Profile, "of", lambda value: read.append(value) or of(value))
    for _ in range(3):
        assert forecast(fleet, known) == alone
    assert len(read) == 20
    assert start(alone) == pytest.approx(start(with_arrivals()) / 20, abs=0.01)
    other = replace(fleet, record=Record.parse("t", FIELDS | {"tier": "default"}))
    assert forecast(other, known) == forecast(other), "better tiers take flex's and batch's room"


async def test_many_workers_are_added_up_once_in_a_while_for_who_reads_the_fleet_at_each_question(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [WORKER | {"worker": f"w{n}", "incarnation": f"w{n}"} for n in range(MANY)]
    fleet, read = replace(WAITS, workers=workers), []
    of = Profile.of
    monkeypatch.setattr(Profile, "of", lambda value: read.append(value) or of(value))
    async with AsyncRedis.from_url(valkey_url) as store, AsyncRedis.from_url(valkey_url) as other:
        told = [forecast(observed, known_groups(store, observed)) for observed in (fleet, replace(fleet), fleet)]
        assert len(read) == MANY
        assert told == [forecast(fleet)] * 3
        del read[:]
        forecast(fleet, known_groups(other, fleet))
        assert len(read) == MANY, "another store's workers are others"
        few = replace(WAITS, workers=workers[1:])
        for _ in range(2):
            forecast(few, known_groups(store, few))
        assert len(read) == MANY + 2 * (MANY - 1), "few are added up each time"
        monkeypatch.setattr(eta, "KEPT_S", 0.0)
        forecast(fleet, known_groups(store, fleet))
        assert len(read) == 2 * MANY + 2 * (MANY - 1)
