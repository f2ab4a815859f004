"""Each stage of overload is brought about, left at less pressure, and seen in answers, /readyz, metrics and the log."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import httpx
import pytest
from redis import Redis

from producers import AsyncClient
from producers.contract import keys
from producers.store.waiting import Bounds, Pressure, pressure
from tests.producers.gateway.admission.test_limits import be_served
from tests.producers.gateway.conftest import CARD, QUEUE, Door, Make, Open, until
from tests.producers.gateway.test_keys import as_caller
from tests.producers.gateway.test_keys import make as make  # the fixture
from tests.producers.gateway.test_metrics import figures
from tests.waiting import PATIENCE_S

MODEL = QUEUE.removeprefix("penstock:queue:")
#: What waits of 100 -> the stage that it leads to, and the tiers that are refused there.
STAGES = {
    75: ("normal", {"batch"}),
    85: ("shed", {"batch", "flex"}),
    92: ("shorten", {"batch", "flex"}),
    97: ("priority", {"batch", "flex", "default"}),
}
NUMBERS = {stage: number for number, (stage, _) in enumerate(STAGES.values())}


@pytest.fixture
def door(open_door: Open, model: str) -> Door:
    return open_door(max_queued=100, auth="keys")


def let_wait(valkey: Redis, tasks: int) -> None:
    """So many tasks of the tier default wait, and the gateways have looked since."""
    valkey.hset(keys.WAITING, mapping={"default": tasks, f"default {QUEUE}": tasks})
    valkey.hset(keys.WAITING_TOKENS, f"default {QUEUE}", 100 * tasks)
    time.sleep(0.06)


def submit(door: Door, key: str, path: str = "tasks", **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": [1], **fields}
    return httpx.post(f"{door.url}/v1/{path}", json=body, headers=as_caller(key), timeout=PATIENCE_S)


@pytest.mark.parametrize("waiting", STAGES)
def test_each_stage_refuses_what_it_says_and_is_seen_everywhere(
    door: Door, make: Make, valkey: Redis, waiting: int, caplog: pytest.LogCaptureFixture
) -> None:
    (stage, refused), key = STAGES[waiting], make()
    with caplog.at_level(logging.WARNING):
        let_wait(valkey, waiting)
        answers = {tier: submit(door, key, tier=tier) for tier in keys.TIERS}
    assert {tier for tier, answer in answers.items() if answer.status_code == 429} == refused
    told = {answer.headers.get("penstock-degraded") for answer in answers.values()}
    assert told == {None if stage == "normal" else stage}
    ready = httpx.get(f"{door.url}/readyz", timeout=PATIENCE_S)
    assert (ready.status_code, ready.json()["degraded"]) == (200, stage != "normal")
    assert ready.json()["checks"].get("overload") == (None if stage == "normal" else f"{MODEL}: {stage}")
    operator = as_caller(make(scopes=("metrics",)))
    with httpx.Client(base_url=door.url, headers=operator, timeout=PATIENCE_S) as http:
        found = figures(http)
    assert found["penstock_overload_stage", MODEL] == NUMBERS[stage]
    assert found["penstock_overload_pressure_ratio", MODEL] >= waiting / 100
    assert found["penstock_waiting_tasks", "default", MODEL] >= waiting
    assert (f"overload of {QUEUE}: from normal to {stage}" in caplog.text) == (stage != "normal")


def test_a_stage_is_left_at_less_pressure_than_it_was_entered_at(door: Door, make: Make, valkey: Redis) -> None:
    key, seen = make(), []
    for waiting in (97, 90, 75, 69, 63, 61, 50, 70):
        let_wait(valkey, waiting)
        # Each of these waits, too.
        seen.append(submit(door, key, tier="priority").headers.get("penstock-degraded", "normal"))
    assert seen == ["priority", "priority", "shorten", "shorten", "shed", "shed", "normal", "normal"]


def test_another_gateway_is_in_the_same_stage(open_door: Open, door: Door, make: Make, valkey: Redis) -> None:
    let_wait(valkey, 97)
    assert submit(door, make()).status_code == 429
    let_wait(valkey, 85)  # alone this would be `shed`
    other = open_door(max_queued=100, auth="keys")
    assert submit(other, make(), tier="priority").headers["penstock-degraded"] == "priority"


@pytest.mark.parametrize(
    ("cache", "asked", "left"), [(999, None, 16), (999, 500, 16), (999, 16, None), (999, 9, None), (12, None, None)]
)
def test_outputs_of_keys_that_say_so_are_shortened(
    door: Door, make: Make, valkey: Redis, cache: int, asked: int | None, left: int | None
) -> None:
    """`cache`: the tokens for which the workers have room."""
    valkey.hset(keys.MODELS, CARD.name, json.dumps(json.loads(CARD.to_json()) | {"kv_capacity": cache}))
    let_wait(valkey, 92)
    asked_for = {} if asked is None else {"max_tokens": asked}
    answer = submit(door, make(shorten_to=16), **asked_for)
    assert answer.headers.get("penstock-shortened") == (left and str(left))
    assert answer.json().get("shortened_to") == left
    record = valkey.hgetall(keys.task(answer.json()["id"]))
    assert json.loads(record[b"task"]).get("max_tokens") == (left or asked)
    seen = httpx.get(f"{door.url}{answer.headers['location']}", headers=as_caller(make()), timeout=PATIENCE_S).json()
    assert seen["shortened_to"] == left
    for spared in (submit(door, make(), **asked_for), submit(door, make(shorten_to=16), tier="priority", **asked_for)):
        assert "shortened_to" not in spared.json()


def test_a_chat_completion_says_that_it_was_shortened(door: Door, make: Make, valkey: Redis, worker: Any) -> None:
    let_wait(valkey, 92)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    with httpx.stream(
        "POST", f"{door.url}/v1/chat/completions", json=body, headers=as_caller(make(shorten_to=16)), timeout=PATIENCE_S
    ) as answer:
        assert (answer.headers["penstock-shortened"], answer.headers["penstock-degraded"]) == ("16", "shorten")
        task_id = until(lambda: worker.take(QUEUE))
        worker.serve(task_id, ["x"])
        first = next(line for line in answer.iter_lines() if line.startswith("data: "))
    assert json.loads(first[6:])["shortened_to"] == 16


def test_a_retry_asks_for_what_was_asked_for_at_first(door: Door, make: Make, valkey: Redis, worker: Any) -> None:
    let_wait(valkey, 92)
    key = make(shorten_to=16)
    task_id = submit(door, key, max_tokens=500).json()["id"]
    worker.serve(task_id, ["x"])
    let_wait(valkey, 0)
    again = httpx.post(f"{door.url}/v1/tasks/{task_id}/retry", headers=as_caller(key), timeout=PATIENCE_S)
    assert json.loads(valkey.hget(keys.task(again.json()["id"]), "task") or "")["max_tokens"] == 500


async def test_the_rate_is_that_of_time_in_which_tasks_waited_for_a_worker(valkey: Redis, valkey_url: str) -> None:
    async with AsyncClient(valkey_url) as client:

        async def look(started: int, *, waits: int = 1, seen: int = 0) -> Pressure:
            """A second after a look that found that `seen` tokens were started."""
            seconds, micros = valkey.time()
            valkey.hset(keys.WAITING, f"default {QUEUE}", waits)
            valkey.hset(keys.drain(QUEUE), mapping={"taken": 20_000, "took": 20, "started": started, "seen": seen})
            valkey.hset(keys.drain(QUEUE), "looked", f"{seconds - 1 + micros / 1e6:.6f}")
            return await pressure(client.store, QUEUE, Bounds(pool=10), 0)

        assert (await look(9_999)).rate == 1_000, "nobody serves it"
        valkey.hset(keys.POOLS, f"{QUEUE}.test", "{}")
        be_served(valkey)
        assert (await look(9_999)).rate > 1_000
        assert (await look(0)).rate < 1_000
        assert (await look(0, waits=0)).rate == 1_000, "nothing waits now"
        assert (await look(0, seen=-1)).rate == 1_000, "nothing waited, or nobody served it, at the last look"


async def test_a_long_wait_of_interactive_tasks_is_pressure(valkey: Redis, valkey_url: str) -> None:
    valkey.hset(keys.POOLS, f"{QUEUE}.test", "{}")
    valkey.hset(keys.WAITING_TOKENS, mapping={f"default {QUEUE}": 850, f"batch {QUEUE}": 10_000})
    async with AsyncClient(valkey_url) as client:
        assert (await pressure(client.store, QUEUE, Bounds(), 10)).stage == 0, "without a worker nobody knows"
        be_served(valkey, rate=100)
        found = await pressure(client.store, QUEUE, Bounds(), 10)
    assert (found.stage, found.share) == (1, 0.85)
