"""`/v1/fleet`: what runs, what waits and what the autoscaler wants, also where those who say so are wrong."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from producers.gateway import fleet
from tests.producers.gateway.conftest import POOL, QUEUE, Make, Open, Submit
from tests.producers.gateway.test_keys import make as make  # the fixture
from tests.producers.gateway.test_metrics import LEASE, POOL_NAME
from tests.waiting import until

VERSION = QUEUE.removeprefix("penstock:queue:")


def announce(valkey: Redis, name: str = "w1.abc", **described: object) -> None:
    valkey.hset(broker_keys.INCARNATIONS, name, POOL.queue)
    lease = {**LEASE, "version": POOL.version, "release": "9.9", "device": "cpu", "began": 1_790_000_000.5, **described}
    valkey.set(keys.lease(name), json.dumps(lease), px=600_000)


def decide(valkey: Redis, pool: str, at: float, **state: object) -> None:
    decision = {"at": at, "by": "scaler", "wanted": 3, "told": 2, "reason": "30 tasks wait", "trouble": "", **state}
    valkey.hset(keys.SCALE_POOLS, pool, json.dumps(decision))


def read(http: httpx.Client, **query: str) -> dict[str, Any]:
    answer = http.get("/v1/fleet", params=query)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_workers_pools_and_queues_are_told(http: httpx.Client, submit: Submit, valkey: Redis) -> None:
    announce(valkey)
    announce(valkey, "w2.x", worker="w2", draining=True, gpu={"name": "NVIDIA H200", "uuid": "u"}, share=0.7)
    announce(valkey, "w3.x", worker="w3", unready=["a step hangs"])
    decide(valkey, "tiny", time.time())
    submit(tier="priority")
    body = read(http)
    first, second, third = body["workers"]
    assert 0 < first.pop("lease_s") <= 600
    assert first == {
        "id": "w1.abc",
        "name": "w1",
        "model": "tiny",
        "version": POOL.version,
        "pool": POOL_NAME,
        "release": "9.9",
        "device": "cpu",
        "kind": None,
        "ranks": None,
        "tensor_parallel": None,
        "pipeline_parallel": None,
        "share": None,
        "state": "ready",
        "unready": [],
        "since": 1_790_000_000.5,
        "running": 3,
        "waiting": 1,
        "capacity": 64,
        "room": 60,
        "kv_used_ratio": 0.1,
        "kv_blocks_total": 100,
        "kv_blocks_used": 10,
        "kv_blocks_cached": None,
        "generated_tokens": 70,
    }
    assert (second["state"], second["device"], second["share"]) == ("draining", "NVIDIA H200", 0.7)
    assert (third["state"], third["unready"]) == ("unready", ["a step hangs"])
    (pool,) = body["pools"]
    assert (pool["name"], pool["current"], pool["workers"], pool["ready"]) == (VERSION, True, 3, 1)
    assert (pool["desired"], pool["decision"]["ordered"], pool["decision"]["reason"]) == (3, 2, "30 tasks wait")
    queue = next(queue for queue in body["queues"] if queue["name"] == VERSION)
    assert (queue["queued"], queue["tiers"]["priority"]["queued"], queue["tiers"]["batch"]["queued"]) == (1, 1, 0)
    assert 0 <= queue["tiers"]["priority"]["oldest_s"] < 600
    assert queue["tiers"]["batch"]["oldest_s"] is None
    assert body["totals"] == {
        "workers": 3,
        "pools": 1,
        "queues": len(body["queues"]),
        "queued": 1,
        "running": 9,
        "dead_letters": 0,
        "webhooks_due": 0,
    }
    assert read(http, model="other")["totals"]["queues"] == 0


def test_a_workers_largest_sequences_and_cache_are_told_and_tasks_only_to_who_sees_all(
    http: httpx.Client, valkey: Redis, open_door: Open, model: str, make: Make
) -> None:
    odd = [None, ["t", 0, 9, 1, 1, 1], ["t", "x", 1, 1, 1, 1], ["t", 0], "x", 7]
    rows = [["task-1", 0, 1, 20, 30, 2], ["task-2", 1, 3, 5, 9, 1], *odd]
    gpu = {"name": "NVIDIA H200", "temperature_c": 61}
    announce(valkey, "w/1.x", kv_blocks_cached=7, sequences=rows, gpu=gpu)
    announce(valkey, "old.x", sequences="none", gpu={f"fact {number}": number for number in range(1000)})
    answer = http.get("/v1/workers/w%2F1.x").json()
    assert (answer["kv_blocks_used"], answer["kv_blocks_cached"], answer["kv_blocks_total"]) == (10, 7, 100)
    assert (answer["preemptions"], answer["gpu"]) == (2, {"temperature_c": 61.0})
    first, second = answer["sequences"]
    assert first == {"task": "task-1", "choice": 0, "tier": "default", "prompt_tokens": 20, "tokens": 30, "blocks": 2}
    assert (second["task"], second["tier"]) == ("task-2", "batch")
    old = http.get("/v1/workers/old.x").json()
    assert (old["sequences"], len(old["gpu"])) == ([], fleet.MAX_FACTS)
    missing = http.get("/v1/workers/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "worker_not_found")
    door, key = open_door(auth="keys"), make("acme", ("metrics",))
    seen = httpx.get(f"{door.url}/v1/workers/w%2F1.x", headers={"authorization": f"Bearer {key}"}).json()
    assert [row["task"] for row in seen["sequences"]] == [None, None]


def test_what_a_worker_makes_and_its_processes_are_told(http: httpx.Client, valkey: Redis) -> None:
    adapters = {"loaded": [f"a{number}" for number in range(100)], "loading": []}
    divided = {"tensor_parallel": 2, "pipeline_parallel": 3, "slow_rank": "rank 1", "engine_process": True}
    announce(valkey, "w1.x", kind="generate", adapters=adapters, **divided)
    announce(valkey, "w2.x", kind="embed")
    nonsense = {"tensor_parallel": "x", "engine_process": "x", "slow_rank": 7, "adapters": [7]}
    announce(valkey, "w3.x", kind=["x"], **nonsense)
    workers = {worker["id"]: (worker["kind"], worker["ranks"]) for worker in read(http)["workers"]}
    assert workers == {"w1.x": ("generate", 6), "w2.x": ("embed", None), "w3.x": (None, None)}
    until(lambda: http.get("/v1/workers/w3.x").status_code == 200)  # it may be of a reading before
    one, odd = (http.get(f"/v1/workers/{name}.x").json() for name in ("w1", "w3"))
    assert {name: one[name] for name in divided} == divided
    assert one["adapters"] == adapters["loaded"][: fleet.MAX_ADAPTERS]
    assert [odd[name] for name in (*divided, "adapters")] == [None, None, None, False, []]


def test_an_old_decision_wants_nothing(http: httpx.Client, valkey: Redis) -> None:
    decide(valkey, VERSION, time.time() - 3600)
    decide(valkey, "gone@v0", time.time(), trouble="no machine")
    gone, tiny = read(http)["pools"]
    assert (tiny["desired"], tiny["decision"]["desired"], tiny["decision"]["current"]) == (None, 3, False)
    assert (gone["model"], gone["version"], gone["current"], gone["desired"]) == ("gone", "v0", False, 3)
    assert gone["decision"]["trouble"] == "no machine"


def test_a_worker_that_lies_is_shown_without_its_lies(http: httpx.Client, valkey: Redis) -> None:
    script = "<script>alert(1)</script>\x1b[2J"
    announce(valkey, "w1.abc", worker=script, release="\ud800" * 2000, unready=["x", 7, None] * 100, incarnation="w9")
    nonsense = {"running": -1, "capacity": 10**400, "kv_blocks_total": 0, "began": "then", "version": [], "gpu": 1}
    announce(valkey, "w2.x", worker={"a": [[]]}, **nonsense)
    liar, other = sorted(read(http)["workers"], key=lambda worker: str(worker["id"]))
    assert (liar["id"], liar["name"]) == ("w1.abc", script)
    assert liar["release"].startswith("\\ud800\\ud800")
    assert len(liar["release"]) <= 6 * fleet.MAX_TEXT
    assert len(liar["unready"]) == fleet.MAX_REASONS
    assert (other["name"], other["version"], other["device"]) == ("w2.x", None, "cpu")
    assert [other[name] for name in ("running", "capacity", "room", "kv_used_ratio", "since")] == [None] * 5


def test_a_large_fleet_is_cut_and_counted(http: httpx.Client, valkey: Redis) -> None:
    lease = json.dumps({**LEASE, "version": POOL.version})
    with valkey.pipeline() as pipe:
        for number in range(fleet.MAX_ROWS + 5):
            pipe.hset(broker_keys.INCARNATIONS, f"w{number}", POOL.queue)
            pipe.set(keys.lease(f"w{number}"), lease)
        pipe.execute()
    body = read(http)
    assert len(body["workers"]) == fleet.MAX_ROWS
    assert body["totals"]["workers"] == body["pools"][0]["workers"] == fleet.MAX_ROWS + 5
