"""`/v1/overview`, and readings that many who look have in common."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.admin.fleet import Fleet
from producers.connection.script import run
from producers.contract import keys
from producers.gateway import overview as overview_module
from producers.gateway import samples as samples_module
from producers.gateway.samples import Point, Reading, Samples, percentile
from producers.store.measurements import FIRST_TOKEN, QUEUE_WAIT, Tally, measure
from producers.store.waiting import Pressure
from tests.producers.gateway.conftest import QUEUE, Door, Submit
from tests.producers.gateway.test_dead_letters import bury
from tests.producers.gateway.test_fleet import announce, read


def overview(http: httpx.Client, **query: float) -> dict[str, Any]:
    answer = http.get("/v1/overview", params={"max_age": 0, **query})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def tally(**outcomes: int) -> Tally:
    tally = Tally()
    for outcome, number in outcomes.items():
        tally.add("tasks", number, "default", outcome)
    return tally


def test_one_answer_tells_what_waits_runs_and_ended(http: httpx.Client, submit: Submit, valkey: Redis) -> None:
    announce(valkey)
    announce(valkey, "w2.x", worker="w2", draining=True)
    submit(tier="priority")
    measured = tally(completed=5, failed=2)
    measured.observe(FIRST_TOKEN, 0.2, "default", 10)
    measured.add("model_generated_tokens", 70)
    run(valkey, measure("test", "1", {"tiny": measured}))
    body = overview(http)
    assert abs(body["at"] - time.time()) < 60
    totals = body["totals"]
    assert 0 <= totals.pop("oldest_s") < 600
    assert totals == {
        "waiting": 1,
        "running": 6,
        "capacity": 128,
        "workers": 2,
        "ready": 1,
        "dead_letters": 0,
        "webhooks_due": 0,
        "webhooks_dead": 0,
        "tasks": {"completed": 5, "failed": 2, "cancelled": 0, "incomplete": 0},
    }
    (model,) = body["models"]
    assert (model["name"], model["waiting"], model["running"], model["workers"]) == ("tiny", 1, 6, 2)
    assert (model["generated_tokens"], model["tasks"]["failed"], model["overload"]) == (70, 2, "normal")
    assert {server["name"] for server in body["servers"]} == {"store"}


def test_what_needs_somebody_comes_with_what_to_do_the_worst_first(
    http: httpx.Client, submit: Submit, valkey: Redis
) -> None:
    submit()
    bury(valkey, "{")
    findings = overview(http)["findings"]
    checks = {finding["check"]: finding for finding in findings}
    assert (checks["unserved"]["status"], checks["dead letters"]["status"]) == ("fail", "warn")
    assert "no worker serves it" in checks["unserved"]["detail"]
    assert all(finding["advice"] for finding in findings)
    states = [finding["status"] for finding in findings]
    assert states == sorted(states)  # fail, then warn


def test_interactive_tasks_that_wait_long_are_told(
    http: httpx.Client, submit: Submit, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(valkey)
    submit(tier="default")
    submit(tier="batch")
    assert "long waits" not in {finding["check"] for finding in overview(http)["findings"]}
    monkeypatch.setitem(overview_module.LONG_S, "default", -1.0)
    waits = [finding for finding in overview(http)["findings"] if finding["check"] == "long waits"]
    assert {finding["status"] for finding in waits} == {"warn"}
    told = {finding["detail"].partition(",")[0] for finding in waits}
    assert f"1 default tasks of {QUEUE.removeprefix('penstock:queue:')}" in told
    assert not any("batch" in detail for detail in told)


def test_a_young_enough_reading_serves_all_who_ask(
    http: httpx.Client, door: Door, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty consoles cost the store what one costs."""
    announce(valkey)
    samples: Samples = door.app.state.gateway.samples
    readings = 0
    read_system = samples._read

    async def counted() -> Reading:
        nonlocal readings
        readings += 1
        return await read_system()

    monkeypatch.setattr(samples, "_read", counted)
    first = overview(http)
    for _ in range(20):
        assert overview(http, max_age=60)["at"] == first["at"]
        assert read(http, max_age="60")["at"] == first["at"]
    assert readings == 1
    announce(valkey, "w2.x", worker="w2")
    assert len(read(http, max_age="60")["workers"]) == 1
    assert len(read(http)["workers"]) == 2, "unasked, it is read anew"
    assert len(read(http, max_age="60", model="other")["workers"]) == 0


def test_an_age_that_is_none_is_refused(http: httpx.Client) -> None:
    for path in ("/v1/overview", "/v1/fleet"):
        for age in ("-1", "61", "nan", "x"):
            answer = http.get(path, params={"max_age": age})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_age")


def reading(at: float, **tallies: Tally) -> Reading:
    measured = {model: tally.fields() for model, tally in tallies.items()}
    return Reading(time.monotonic(), Fleet([], at=at), [], {"q": Pressure()}, {}, measured)


async def test_points_are_taken_by_themselves_also_after_a_failure_and_a_bounded_number_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samples_module, "INTERVAL_S", 0.001)
    times, enough = iter(range(10**6)), asyncio.Event()

    async def read_one() -> Reading:
        at = next(times)
        if at == samples_module.POINTS + 5:
            enough.set()
        if at % 3 == 0:
            raise OSError("away")
        return reading(float(at))

    samples = Samples(read_one)
    running = asyncio.create_task(samples.run())
    await enough.wait()
    running.cancel()
    series = samples.series()
    assert 3 < len(series["at"]) <= samples_module.POINTS
    assert {at % 3 for at in series["at"]} == {1, 2}
    assert {len(column) for column in series.values()} == {len(series["at"])}


async def test_those_who_wait_for_a_reading_get_the_error_and_the_next_one_is_tried_anew() -> None:
    errors: list[Exception | None] = [OSError("away"), None]

    async def read_one() -> Reading:
        await asyncio.sleep(0.01)
        if (error := errors.pop(0)) is not None:
            raise error
        return reading(1.0)

    samples = Samples(read_one)
    first = await asyncio.gather(*(samples.latest(0) for _ in range(5)), return_exceptions=True)
    assert [str(error) for error in first] == ["away"] * 5
    assert (await samples.latest(0)).fleet.at == 1.0


def test_the_series_has_rates_and_percentiles_of_what_came_between(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = Samples(None)  # type: ignore[arg-type]  # nothing is read
    total = tally(completed=10)
    for at in range(4):
        total.add("tasks", 5, "default", "failed")
        total.add("model_generated_tokens", 100)
        total.observe(FIRST_TOKEN, 0.04, "default", 100)
        samples._enter(reading(10.0 * at, tiny=total))
    series = samples.series()
    assert series["at"] == [0.0, 10.0, 20.0, 30.0]
    assert series["tokens_per_s"] == [None, 10.0, 10.0, 10.0]
    assert series["failed_per_s"] == [None, 0.5, 0.5, 0.5]
    assert series["first_token_p95_s"][0] is None
    assert all(0.025 < p95 <= 0.05 for p95 in series["first_token_p95_s"][1:])
    assert series["queue_wait_p95_s"] == [None] * 4
    assert samples.series(reading(31.0, tiny=total))["at"][-1] == 30.0
    monkeypatch.setattr(samples_module, "INTERVAL_S", 10.0)
    assert samples.series(reading(34.0, tiny=total))["at"][-1] == 34.0
    samples._enter(reading(40.0))  # the model is gone, and its counters with it
    assert samples.series()["tokens_per_s"][-1] == 0.0


@pytest.mark.parametrize(
    ("seconds", "share", "low", "high"),
    [
        ([0.03] * 100, 0.95, 0.025, 0.05),
        ([0.003] * 90 + [2.0] * 10, 0.5, 0.0025, 0.005),
        ([0.003] * 90 + [2.0] * 10, 0.95, 1.0, 2.5),
        ([1e6], 0.95, 3600.0, 3600.0),
    ],
)
def test_a_percentile_lies_in_its_bucket(seconds: list[float], share: float, low: float, high: float) -> None:
    total = Tally()
    for wait in seconds:
        total.observe(QUEUE_WAIT, wait, "default")
    counts = samples_module.buckets(total.fields(), QUEUE_WAIT)
    value = percentile(QUEUE_WAIT, counts, share=share)
    assert value is not None
    assert low <= value <= high


def test_a_point_of_an_empty_system_has_zeros() -> None:
    point = Point.of(reading(1.0))
    assert (point.waiting, point.running, point.generated, sum(point.first_token)) == (0, 0, 0, 0)


def test_a_worker_that_lies_spoils_no_sum(http: httpx.Client, valkey: Redis) -> None:
    announce(valkey, running=10**400, capacity="many")
    announce(valkey, "w2.x", worker="w2", running=-3, capacity=8)
    totals = overview(http)["totals"]
    assert (totals["running"], totals["capacity"]) == (0, 8)
    assert json.loads(valkey.get(keys.lease("w2.x")) or "{}")["running"] == -3


async def test_all_who_follow_have_one_reading_after_the_other_in_common() -> None:
    gate, readings = asyncio.Semaphore(0), list[Reading]()

    async def read_one() -> Reading:
        await gate.acquire()
        readings.append(Reading(time.monotonic(), Fleet([]), [], {}, {}, {}))
        return readings[-1]

    samples = Samples(read_one)
    followers = [samples.follow(0.0) for _ in range(5)]
    for number in range(3):
        coming = [asyncio.ensure_future(anext(follower)) for follower in followers]
        for _ in range(20):  # turns of the loop, in which all come to wait
            await asyncio.sleep(0)
        gate.release()
        assert {id(reading) for reading in await asyncio.gather(*coming)} == {id(readings[number])}
    assert len(readings) == 3
    for follower in followers:
        await follower.aclose()


def test_the_overview_comes_as_events(
    http: httpx.Client, submit: Submit, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fleet, and with names that some clients would take for ends of lines."""
    monkeypatch.setattr(overview_module, "FRESH_S", 0.05)
    announce(valkey, "w2.x", worker="a\u2028b")
    with http.stream("GET", "/v1/overview/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()

        def event() -> tuple[str, dict[str, Any]]:
            """The next one; httpx, too, ends lines at such characters."""
            name = next(line for line in lines if line.startswith("event: "))
            return name.removeprefix("event: "), json.loads(next(lines).removeprefix("data: "))

        first = dict((event(), event()))
        assert first["overview"]["totals"]["waiting"] == 0
        assert first["overview"].keys() == overview(http).keys()
        fleet = first["fleet"]
        while [worker["name"] for worker in fleet["workers"]] != [
            "a\u2028b"
        ]:  # what was read shortly before may be sent
            name, told = event()
            fleet = told if name == "fleet" else fleet
        submit()
        while event()[1].get("totals", {}).get("waiting") != 1:
            pass
