"""Why a task waits: each cause is brought about, and the answer read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis import Redis

from producers import AsyncClient, Client
from producers.admin import eta as admin_eta
from producers.admin.eta import eta as eta_of
from producers.broker.connect import connect_consumer, connect_sender
from producers.broker.redis import keys as broker_keys
from producers.broker.values import Back, Credit
from producers.connection.script import run
from producers.contract import keys
from producers.contract.message import Message
from producers.contract.profile import Profile, TaskTimes
from producers.contract.record import Record, Run
from producers.gateway import estimates, wait_reasons
from producers.store import protocol
from tests.producers.broker.conftest import RULES
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import POOL, QUEUE, Submit, until
from tests.protocol.broker import AGE

NAME = QUEUE.removeprefix(keys.model_queue(""))
#: Of a worker with four slots that makes 10 tasks a second, each of 100 tokens and 0.4 s; outputs end at their limit.
TIMES = TaskTimes(
    per_output_token=0.01,
    per_prompt_token=0.001,
    per_need=0.004,
    task=0.4,
    remaining=0.3,
    need_error=0.1,
    error=0.05,
    running=4,
    shares=(1.0,) * 11,
)
MEASURED = Profile(
    knee=4,
    tokens_per_s=1000,
    tokens_per_task=100,
    kv_capacity=1000,
    task_times=TIMES,
    cold_start={"total": 2.5, "imports": 2.0},
)

Explain = Callable[[str], dict[str, Any]]


@pytest.fixture(autouse=True)
def slots_are_as_leases_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the tests' tasks have waited."""
    monkeypatch.setattr(admin_eta, "TAKEN_S", 3600.0)


@pytest.fixture
def explain(http: httpx.Client) -> Explain:
    def asked(task_id: str) -> dict[str, Any]:
        answer = http.get(f"/v1/tasks/{task_id}/explain")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    return asked


def names(said: dict[str, Any]) -> list[str]:
    return [reason["name"] for reason in said["blocked_by"]]


def lease(url: str, **about: Any) -> None:
    """A worker that is up and says this of itself."""
    said = {
        "worker": "w1",
        "running": 1,
        "waiting": 0,
        "capacity": 4,
        "kv_blocks_used": 1,
        "kv_blocks_total": 10,
        **about,
    }
    consumer = connect_consumer(url, POOL.queues, url)
    consumer.take_lease(f"{said['worker']}.1", json.dumps(said), 300.0)
    consumer.close()


def scaled(valkey: Redis, **state: Any) -> None:
    """An autoscaler that leads has decided this."""
    valkey.set(keys.SCALE_LEADER, "one")
    valkey.hset(
        keys.SCALE_POOLS, NAME, json.dumps({"at": time.time(), "wanted": 1, "reason": "r", "trouble": "", **state})
    )
    valkey.hset(keys.PROFILES, NAME, MEASURED.to_json())


def test_without_a_worker_and_without_one_that_starts_any(submit: Submit, explain: Explain) -> None:
    said = explain(submit())
    assert names(said) == ["no_worker", "not_scaled"]
    assert (said["ahead"], said["ahead_is_exact"], said["waiting"]) == (0, True, 1)
    assert said["estimate"] == {"starts_in_s": None, "ends_in_s": None}
    assert f"no worker serves {NAME}" in said["summary"]


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ({}, "cold_start", "the last start took 2.5 s, of which imports 2.0 s"),
        ({"trouble": "quota of GPUs"}, "start_failed", "quota of GPUs"),
        ({"wanted": 0, "reason": "batch waits"}, "not_worth_a_start", "batch waits"),
    ],
)
def test_an_autoscalers_state_is_told(
    submit: Submit, explain: Explain, valkey: Redis, state: dict[str, Any], reason: str, words: str
) -> None:
    task_id = submit()
    scaled(valkey, **state)
    said = explain(task_id)
    assert names(said) == ["no_worker", reason]
    assert words in said["blocked_by"][1]["message"]
    if reason == "cold_start":
        assert said["estimate"] == {"starts_in_s": 2.5, "ends_in_s": pytest.approx(2.5 + 2.562)}
    else:
        assert said["estimate"] == {"starts_in_s": None, "ends_in_s": None}, "nobody knows"


def test_a_worker_that_takes_no_tasks(submit: Submit, explain: Explain, valkey: Redis, valkey_url: str) -> None:
    task_id = submit()
    lease(valkey_url, unready=["its GPU is lost"])
    assert names(explain(task_id)) == ["worker_not_ready", "not_scaled"]
    assert "its GPU is lost" in explain(task_id)["blocked_by"][0]["message"]


def test_left_to_a_worker_that_has_its_prompt_cached(
    submit: Submit, explain: Explain, valkey: Redis, valkey_url: str
) -> None:
    task_id, mark = submit(), "0123456789abcdef"
    (raw,) = valkey.lrange(QUEUE, 0, -1)
    message = json.loads(raw)
    message["headers"]["penstock"]["prefix"] = mark
    valkey.delete(QUEUE)
    valkey.lpush(QUEUE, json.dumps(message))
    lease(valkey_url)
    lease(valkey_url, worker="w2")
    consumer = connect_consumer(valkey_url, [QUEUE], valkey_url)
    consumer.places = True
    consumer.hold("w2.1", [mark])
    room = Credit((1,) * 4, (10**6,) * 4)
    assert consumer.fetch("w2.1", [], room, RULES) == consumer.fetch("w1.1", ["u"], room, RULES) == []
    consumer.close()
    # For a moment alone, but for a clock that was set back.
    valkey.eval(AGE, 1, broker_keys.sorted_of(QUEUE), 1, 10**14)
    reason = next(reason for reason in explain(task_id)["blocked_by"] if reason["name"] == "left_to_holder")
    assert "worker w2.1 for at most 50 ms" in reason["message"]


def test_workers_that_are_held_back_beside_others(
    submit: Submit, explain: Explain, valkey: Redis, valkey_url: str
) -> None:
    task_id = submit()
    lease(valkey_url)
    lease(valkey_url, worker="w2", unready=["its breaker is open: its engine fails a probe"])
    reason = explain(task_id)["blocked_by"][-1]
    assert reason["name"] == "workers_held_back"
    assert "1 of 2 workers takes no tasks" in reason["message"]
    assert "its breaker is open" in reason["message"]


def test_of_many_workers_the_first_are_named_and_the_others_counted(
    submit: Submit, explain: Explain, valkey: Redis, valkey_url: str
) -> None:
    task_id = submit()
    for number in range(23):
        lease(valkey_url, worker=f"down{number}", unready=["its GPU is lost"])
    told = [reason for reason in explain(task_id)["blocked_by"] if reason["name"] == "worker_not_ready"]
    assert len(told) == 21
    assert told[-1]["message"] == "3 more workers take no tasks"
    lease(valkey_url, running=4)
    messages = {reason["name"]: reason["message"] for reason in explain(task_id)["blocked_by"]}
    assert messages["workers_held_back"].startswith("23 of 24 workers take no tasks: down")
    assert messages["workers_held_back"].count("its GPU is lost") == 20
    assert messages["workers_held_back"].endswith("; and 3 more")
    for number in range(20):
        lease(valkey_url, worker=f"full{number}", running=4)
    (full,) = (reason for reason in explain(task_id)["blocked_by"] if reason["name"] == "workers_full")
    assert full["message"].startswith("all 21 workers are full: ")
    assert full["message"].endswith("; and 1 more")


def test_who_goes_first_and_when_it_starts(
    submit: Submit, explain: Explain, valkey: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_eta, "GO_ON", 0.0)  # nobody comes any more
    valkey.hset(keys.PROFILES, NAME, MEASURED.to_json())
    for tier in ("priority", "default", "default", "flex", "batch"):
        submit(tier=tier)
    task_id = submit(tier="flex")
    lease(valkey_url)
    said = explain(task_id)
    assert names(said) == ["better_tiers", "same_tier"]
    assert (said["ahead"], said["waiting"]) == (4, 6)
    # Four tasks that may need 258 tokens each; four slots clear 1,000 a second, and three of them are free at once.
    starts = (4 * 258 - 3 * 75) / 1000
    assert said["estimate"] == {"starts_in_s": pytest.approx(starts), "ends_in_s": pytest.approx(starts + 2.562)}
    submit(tier="default", tenant="other")
    assert "turns" in names(explain(submit(tier="default", tenant="greedy")))


def test_a_store_that_is_too_full_for_the_tier(
    submit: Submit, explain: Explain, valkey: Redis, valkey_url: str
) -> None:
    flex, default = submit(tier="flex"), submit()
    lease(valkey_url)
    valkey.setrange("ballast", 60_000_000, "x")
    valkey.config_set("maxmemory", int(valkey.info("memory")["used_memory"] / 1.02))
    try:
        assert "storage_full" in names(explain(flex))
        assert "storage_full" not in names(explain(default))
    finally:
        valkey.config_set("maxmemory", "0")
        valkey.delete("ballast")


def test_workers_without_room(submit: Submit, explain: Explain, valkey: Redis, valkey_url: str) -> None:
    valkey.hset(keys.PROFILES, NAME, MEASURED.to_json())
    task_id = submit(max_tokens=600)
    lease(valkey_url, running=3, waiting=1)
    said = explain(task_id)
    assert names(said) == ["workers_full"]
    assert "w1 generates 3 of 4" in said["blocked_by"][0]["message"]
    lease(valkey_url, kv_blocks_used=5)
    assert names(explain(task_id)) == ["kv_room"]
    lease(valkey_url)
    assert names(explain(task_id)) == []


def test_what_was_given_back_for_later_or_was_not_sent_yet(
    submit: Submit, explain: Explain, valkey: Redis, valkey_url: str
) -> None:
    task_id = submit()
    consumer = connect_consumer(valkey_url, [QUEUE], valkey_url)
    consumer.take_lease("w1.1", "{}", 300.0)
    assert consumer.fetch("w1.1", ["u"], Credit((1,) * 4, (10**6,) * 4), RULES)
    consumer.put_down([Back("w1.1", "u", 60.0)])
    consumer.close()
    assert names(explain(task_id))[0] == "delayed"
    valkey.hset(keys.task(task_id), "status", "submitting")
    assert names(explain(task_id)) == ["submitting"]


@pytest.mark.parametrize(("field", "value"), [("tier", "gold"), ("tokens", "many"), ("task", "null"), ("task", "[")])
def test_a_record_that_makes_no_message(
    submit: Submit, explain: Explain, valkey: Redis, field: str, value: str
) -> None:
    task_id = submit()
    valkey.hset(keys.task(task_id), field, value)
    said = explain(task_id)
    assert (said["ahead"], names(said)) == (None, ["no_worker", "not_scaled"])


def test_a_task_that_runs_lost_a_worker_and_ends(
    submit: Submit, explain: Explain, valkey: Redis, worker: FakeWorker
) -> None:
    task_id = submit(max_tokens=2)
    first = FakeWorker(valkey, "first")
    assert first.take(QUEUE) == task_id
    first.claim(task_id)
    first.append(task_id, 0, ["a"])
    first.die()
    second = FakeWorker(valkey, "second")
    second.claim(task_id)
    run(valkey, protocol.release(task_id, second.claims[task_id], "drained"))
    worker.claim(task_id)
    said = explain(task_id)
    assert (said["status"], said["worker"], said["starts"], said["blocked_by"]) == ("in_progress", "fake", 3, [])
    assert [(one["worker"], one["why"], one["entries"]) for one in said["attempts"]] == [
        ("first", "died", 1),
        ("second", "drained", 1),
        ("fake", "running", None),
    ]
    assert all(one["duration_s"] >= 0 for one in said["attempts"])
    assert said["phases"].keys() == {"submit", "queue", "first_token", "output"}
    assert "runs on fake; tokens so far: 1" in said["summary"]
    run(valkey, protocol.cancel(task_id))
    worker.die()
    run(valkey, protocol.expire(task_id))
    said = explain(task_id)
    assert said["summary"] == "It has ended: cancelled"
    assert said["attempts"][-1]["why"] == "ended"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"beam_width": 3, "n": 2}, "a beam search compares its 3 beams to the end"),
        ({"best_of": 4}, "the best of 4 outputs are chosen"),
        ({"n": 2}, None),
    ],
)
def test_what_publishes_nothing_before_its_end_says_why(
    submit: Submit, explain: Explain, worker: FakeWorker, fields: dict[str, Any], reason: str | None
) -> None:
    task_id = submit(**fields)
    assert worker.take(QUEUE) == task_id
    worker.claim(task_id)
    said = explain(task_id)
    assert (said["output_at_end"] or "").startswith(reason or "")
    assert (said["output_at_end"] is None) == (reason is None)
    assert f"It runs on fake; {reason or 'tokens so far: 0'}" in said["summary"]
    worker.finish(task_id, [0], status="failed", reasons=[], error={"code": "engine_error", "message": "It broke."})
    assert explain(task_id)["output_at_end"] is None


def test_a_task_whose_worker_is_dead_waits_for_another_one(
    submit: Submit, explain: Explain, valkey: Redis, valkey_url: str, worker: FakeWorker
) -> None:
    task_id = submit()
    valkey.hset(keys.PROFILES, NAME, MEASURED.to_json())
    assert worker.take(QUEUE) == task_id
    worker.claim(task_id)
    assert (explain(task_id)["worker"], names(explain(task_id))) == ("fake", [])
    worker.die()
    said = explain(task_id)
    assert (said["status"], said["worker"], names(said)) == ("in_progress", None, ["no_worker", "not_scaled"])
    assert "It waits for another worker: fake died, or was cut off; no worker serves" in said["summary"]
    assert [(one["worker"], one["why"]) for one in said["attempts"]] == [("fake", "died")]
    assert said["estimate"] == {"starts_in_s": None, "ends_in_s": None}
    lease(valkey_url)
    assert (explain(task_id)["worker"], names(explain(task_id))) == (None, []), "another one takes it up in a moment"


def test_a_worker_tells_what_its_engine_does_with_a_task(
    submit: Submit, explain: Explain, http: httpx.Client, valkey: Redis, valkey_url: str, worker: FakeWorker
) -> None:
    task_id = submit(max_tokens=600)
    valkey.hset(keys.PROFILES, NAME, MEASURED.to_json())
    assert worker.take(QUEUE) == task_id
    claimed = worker.claim(task_id)
    assert claimed.record is not None
    began = claimed.record.time("began") or 0
    for about, reason in (
        ({"running": 4, "waits": {worker.claims[task_id]: "not_begun"}}, "workers_full"),
        ({"kv_blocks_used": 9, "waits": {worker.claims[task_id]: "not_begun"}}, "kv_room"),
        ({"waits": {worker.claims[task_id]: "better_tier"}}, "preempted"),
        ({"kind": "embed", "kv_blocks_total": 0, "waits": {worker.claims[task_id]: "not_begun"}}, "workers_full"),
    ):
        lease(valkey_url, **about)
        assert names(explain(task_id)) == [reason]
        assert "and waits there" in explain(task_id)["summary"]
    assert explain(task_id)["phases"].keys() == {"submit", "queue", "worker"}
    lease(valkey_url, waits={"another": "better_tier"})
    assert names(explain(task_id)) == []
    done = Run("fake", began, began + 20, began + 90, 128, 2, [(began + 50, "better_tier"), (began + 60, "kv_room")])
    token = protocol.Append(task_id, worker.claims[task_id], 0, 0, ['[0,0,7,"a"]'], run=done.script_argument(1))
    run(valkey, protocol.append([token]))
    worker.finish(task_id, [1])
    worker.settle(task_id)
    said = explain(task_id)
    (attempt,) = said["attempts"]
    assert (attempt["worker"], attempt["why"], attempt["cached_tokens"], attempt["preemptions"]) == (
        "fake",
        "ended",
        128,
        2,
    )
    assert [one["why"] for one in attempt["preempted"]] == ["better_tier", "kv_room"]
    assert list(said["phases"]) == ["submit", "queue", "worker", "first_token", "output", "settle"]
    assert said["phases"]["worker"] == pytest.approx(0.02)
    task = http.get(f"/v1/tasks/{task_id}").json()
    assert (task["first_step_at"], task["last_token_at"]) == ((began + 20) / 1000, (began + 90) / 1000)
    assert task["settled_at"] >= task["finished_at"]


def test_what_was_begun_is_found_in_its_own_pools_queue(
    submit: Submit, explain: Explain, valkey: Redis, valkey_url: str, worker: FakeWorker
) -> None:
    task_id = submit()
    assert worker.take(QUEUE) == task_id
    worker.claim(task_id)
    run(valkey, protocol.release(task_id, worker.claims[task_id], "drained"))
    assert (explain(task_id)["ahead"], names(explain(task_id))[0]) == (None, "fetched")
    message = Message.of(Record.parse(task_id, valkey.hgetall(keys.task(task_id))))
    sender = connect_sender(valkey_url, valkey_url)
    sender.send(replace(message, queue=f"{QUEUE}.fake"))
    sender.close()
    assert (explain(task_id)["ahead"], explain(task_id)["ahead_is_exact"]) == (0, True)


def test_when_a_task_ends_is_told_until_it_has_ended(
    submit: Submit, explain: Explain, http: httpx.Client, valkey: Redis, valkey_url: str, worker: FakeWorker
) -> None:
    """By its own size while it waits, and by its own pace once it runs."""

    def told(task_id: str) -> dict[str, float] | None:
        eta: dict[str, float] | None = http.get(f"/v1/tasks/{task_id}").json()["eta"]
        return eta

    first, second = submit(max_tokens=100), submit(max_tokens=10)
    assert (told(first), explain(first)["eta"]) == (None, None), "nothing was measured"
    valkey.hset(keys.PROFILES, NAME, MEASURED.to_json())
    lease(valkey_url, running=0)
    eta = explain(first)["eta"]
    assert eta["p50_s"] == pytest.approx(1.0, abs=0.05)
    assert 1.02 * eta["p50_s"] < eta["p90_s"] < 1.5 * eta["p50_s"]
    assert explain(second)["eta"]["p50_s"] == pytest.approx(0.1, abs=0.05)
    assert "it ends in about 1.0 s, in 9 of 10 cases within 1." in explain(first)["summary"]
    with Client(valkey_url, valkey_url) as client:
        own = eta_of(client, first)
    assert own is not None
    assert (own.p50_s, own.p90_s) == (eta["p50_s"], eta["p90_s"]), "so it is in Python"
    until(lambda: told(first) is not None)  # what was told before is told for two seconds
    assert worker.take(QUEUE) == first
    worker.claim(first)
    assert worker.append(first, 0, ["a"] * 51)
    began = int(valkey.time()[0]) - 5
    valkey.hset(keys.task(first), "first", 1000 * began)  # a tenth of a second for each, or more on a busy machine
    ends_in = explain(first)["eta"]["p50_s"]
    elapsed = int(valkey.time()[0]) + 1 - began
    assert ends_in >= 49 * (0.01 * 8 + 5) / (8 + 50) - 1e-3
    assert ends_in <= 49 * (0.01 * 8 + elapsed) / (8 + 50) + 1e-3
    worker.finish(first, [51])
    assert (told(first), explain(first)["eta"]) == (None, None)


async def test_what_an_estimate_takes_of_the_store_does_not_grow_with_what_waits(
    valkey: Redis, valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a number of commands. The ledger's last rows are read for all who ask within a second.

    No gateway runs beside it: whatever the store gets is for the estimates."""
    monkeypatch.setattr(estimates, "LIMIT_S", 60.0)  # the machine may be busy
    monkeypatch.setattr(estimates, "ENDED_KEPT_S", 3600.0)
    monkeypatch.setattr(estimates, "KEPT_S", 3600.0)
    monkeypatch.setattr(wait_reasons, "FRESH_S", 3600.0)
    monkeypatch.setattr(wait_reasons, "READ_S", 60.0)
    valkey.hset(keys.PROFILES, NAME, MEASURED.to_json())
    lease(valkey_url)
    valkey.config_set("slowlog-max-len", 10_000)
    lookups = ("SORT_RO", "ZCOUNT", "HGETALL", "XREVRANGE", "HMGET")
    counts = []
    async with AsyncClient(valkey_url) as client:
        told = estimates.Estimates(client, wait_reasons.WaitReasons(client))

        async def commands(task_id: str) -> list[str]:
            """Names of those that the store got meanwhile."""
            record = await client.get(task_id).status()
            valkey.slowlog_reset()
            valkey.config_set("slowlog-log-slower-than", 0)
            assert await told.eta(record) is not None
            valkey.config_set("slowlog-log-slower-than", 10_000)
            return [entry["command"].split()[0].decode().upper() for entry in valkey.slowlog_get(10_000)]

        for waiting in (1, 60, 60):
            ids = [(await client.submit(model=model, prompt=[1], tenant=f"t{n}")).id for n in range(waiting)]
            got = await commands(ids[-1])
            assert not {*lookups} & {*await commands(ids[-1])}, "it was told before"
            counts.append([got.count(name) for name in lookups])
    assert [count[3] for count in counts] == [1, 0, 0]
    assert all(sum(count) <= 60 for count in counts)


def test_no_estimate_is_made_of_what_makes_no_sense(
    submit: Submit, explain: Explain, valkey: Redis, valkey_url: str
) -> None:
    """A worker that lies, and one that has measured nothing beside a profile of the version."""
    task_id = submit(max_tokens=10)
    sane = json.loads(MEASURED.to_json())
    for lie in (
        {"per_need": -1},
        {"task": "NaN"},
        {"shares": [1]},
        {"shares": [1e308] * 11, "per_output_token": 1e308},
        {"per_output_token": 1e200},
        {"per_need": 1e308, "task": 1e-308},
    ):
        lease(valkey_url, profile={**sane, "task_times": {**sane["task_times"], **lie}})
        assert explain(task_id)["eta"] is None
    valkey.hset(keys.PROFILES, NAME, MEASURED.to_json())
    lease(valkey_url, profile={})
    assert explain(task_id)["eta"] is not None


def test_running_tasks_of_low_tiers_wait_for_those_that_take_their_room(
    submit: Submit, explain: Explain, valkey: Redis, valkey_url: str, worker: FakeWorker
) -> None:
    valkey.hset(keys.PROFILES, NAME, MEASURED.to_json())
    task_id = submit(tier="flex", max_tokens=10)
    assert worker.take(QUEUE) == task_id
    worker.claim(task_id)
    lease(valkey_url)
    alone = explain(task_id)["eta"]["p50_s"]
    for _ in range(20):
        submit(max_tokens=100)
    # Some 102 tokens of each task, of which four slots clear 1,000 a second.
    assert explain(task_id)["eta"]["p50_s"] - alone == pytest.approx(2.0, abs=0.2)
