"""`/metrics`: true figures, in Prometheus' format, with labels whose number is bounded."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from redis import Redis

from producers.admin.roles import ROLES
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.gateway.metrics import MAX_LABEL, MAX_REASONS, Metrics, exposition
from producers.store.fleet.adapters import StoredAdapter
from producers.store.measurements import ENERGY, INTER_TOKEN, SOURCE_OUTCOMES, Tally, measure_items
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import POOL, QUEUE, Door, Open, Submit, until
from tests.producers.gateway.http.test_connection import busy
from tests.producers.gateway.test_health import NOWHERE
from tests.waiting import PATIENCE_S

POOL_NAME = POOL.queue.removeprefix("penstock:queue:")
VERSION = QUEUE.removeprefix("penstock:queue:")
LEASE = {
    "worker": "w1",
    "running": 3,
    "waiting": 1,
    "capacity": 64,
    "kv_blocks_used": 10,
    "kv_blocks_total": 100,
    "prompt_tokens": 50,
    "cached_tokens": 20,
    "generated_tokens": 70,
    "preemptions": 2,
}


@pytest.fixture
def door(open_door: Open, model: str) -> Door:
    """One that has counted nothing yet."""
    return open_door()


def figures(http: httpx.Client) -> dict[tuple[str, ...], float]:
    """Values by name and label values, in the order of the labels' names."""
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def announce(valkey: Redis, incarnation: str = "w1.abc", **about: object) -> None:
    valkey.hset(broker_keys.INCARNATIONS, incarnation, POOL.queue)
    valkey.set(keys.lease(incarnation), json.dumps({**LEASE, **about}))


def test_pools_are_counted_by_tier_also_where_plain_celery_put_its_tasks(
    http: httpx.Client, submit: Submit, valkey: Redis
) -> None:
    announce(valkey)
    for tier, count in {"priority": 1, "default": 2, "batch": 3}.items():
        for _ in range(count):
            submit(tier=tier)
    valkey.lpush(f"{QUEUE}\x06\x169", "{}")
    valkey.lpush(keys.model_queue("tiny"), "{}")
    valkey.zadd(broker_keys.delayed(QUEUE), {"x": 1, "y": 2})
    sorted_by_a_worker = broker_keys.tier_list(QUEUE, "flex")
    valkey.zadd(broker_keys.sorted_of(sorted_by_a_worker), {"first": 1, "second": 2, "third": 3})
    valkey.zadd(broker_keys.turns(sorted_by_a_worker), {"a tenant": 0, "": 5})
    got = figures(http)
    assert [got["penstock_queued", "tiny", VERSION, tier] for tier in keys.TIERS] == [1, 2, 3, 4]
    assert [got["penstock_queued_tenants", "tiny", VERSION, tier] for tier in keys.TIERS] == [0, 0, 2, 0]
    assert [got["penstock_queued", "tiny", "tiny", tier] for tier in keys.TIERS] == [0, 1, 0, 0]
    assert 0 <= got["penstock_queued_oldest_seconds", "tiny", VERSION, "priority"] < 600
    assert got["penstock_queued_oldest_seconds", "tiny", "tiny", "batch"] == 0
    assert ("penstock_queued_oldest_seconds", "tiny", VERSION, "flex") not in got, "nothing there says when it came"
    assert got["penstock_delayed", "tiny", VERSION] == 2
    assert got["penstock_tasks_submitting",] == 0


def test_a_worker_is_shown_while_its_lease_lives(http: httpx.Client, model: str, valkey: Redis) -> None:
    announce(valkey)
    announce(valkey, "w2.def", worker="w2", running=5, out_of_memory=4, not_finite=6, drafted=9, draft_accepted=8)
    valkey.hset(broker_keys.inflight("w1.abc"), mapping={"a": "m", "b": "m"})
    got = figures(http)
    assert got["penstock_workers", "tiny", POOL_NAME] == 2
    assert got["penstock_in_flight", "tiny", POOL_NAME] == 2
    assert [got["penstock_worker_running", "tiny", POOL_NAME, name] for name in ("w1", "w2")] == [3, 5]
    assert got["penstock_worker_kv_blocks_used", "tiny", POOL_NAME, "w1"] == 10
    assert got["penstock_worker_kv_blocks", "tiny", POOL_NAME, "w1"] == 100
    assert got["penstock_worker_generated_tokens_total", "tiny", POOL_NAME, "w1"] == 70
    # One of an earlier release, which does not tell.
    assert ("penstock_worker_out_of_memory_total", "tiny", POOL_NAME, "w1") not in got
    assert got["penstock_worker_out_of_memory_total", "tiny", POOL_NAME, "w2"] == 4
    assert got["penstock_worker_not_finite_total", "tiny", POOL_NAME, "w2"] == 6
    assert got["penstock_worker_drafted_tokens_total", "tiny", POOL_NAME, "w2"] == 9
    assert got["penstock_worker_draft_accepted_tokens_total", "tiny", POOL_NAME, "w2"] == 8
    assert [got["penstock_worker_ready", "tiny", POOL_NAME, name] for name in ("w1", "w2")] == [1, 1]
    announce(valkey, "w2.def", worker="w2", unready=["a step has not ended for 200 s"])
    assert figures(http)["penstock_worker_ready", "tiny", POOL_NAME, "w2"] == 0
    valkey.delete(keys.lease("w1.abc"))
    got = figures(http)
    assert got["penstock_workers", "tiny", POOL_NAME] == 1
    assert got["penstock_in_flight", "tiny", POOL_NAME] == 2  # until it is reaped
    assert ("penstock_worker_running", "tiny", POOL_NAME, "w1") not in got


def test_of_two_leases_of_one_name_the_last_begun_is_shown(http: httpx.Client, model: str, valkey: Redis) -> None:
    """That of a worker that was killed stands until it lapses; no series comes twice."""
    for incarnation, began in (("w1.new", 9.0), ("w1.old", 5.0)):
        announce(valkey, incarnation, began=began, generated_tokens=began)
    lines = [line.rpartition(" ")[0] for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    assert figures(http)["penstock_worker_generated_tokens_total", "tiny", POOL_NAME, "w1"] == 9


def test_a_workers_gpu_is_shown_as_far_as_its_driver_tells(http: httpx.Client, model: str, valkey: Redis) -> None:
    gpu = {"uuid": "a0", "memory_bytes": 150e9, "memory_used_bytes": 128e9, "power_watts": 654.3, "ecc_uncorrected": 1}
    announce(valkey, gpu={**gpu, "slowed_by": ["power_cap", "hardware_thermal"]})
    announce(valkey, "w2.def", worker="w2", gpu={"uuid": "a1", "memory_bytes": 1, "memory_used_bytes": 0})
    announce(valkey, "w3.abc", worker="w3")
    # In the order of the labels' names: gpu, model, pool, reason, worker.
    got = {names: value for names, value in figures(http).items() if names[0].startswith("penstock_worker_gpu")}
    assert got == {
        ("penstock_worker_gpu_memory_bytes", "a0", "tiny", POOL_NAME, "w1"): 150e9,
        ("penstock_worker_gpu_memory_bytes", "a1", "tiny", POOL_NAME, "w2"): 1,
        ("penstock_worker_gpu_memory_used_bytes", "a0", "tiny", POOL_NAME, "w1"): 128e9,
        ("penstock_worker_gpu_memory_used_bytes", "a1", "tiny", POOL_NAME, "w2"): 0,
        ("penstock_worker_gpu_power_watts", "a0", "tiny", POOL_NAME, "w1"): 654.3,
        ("penstock_worker_gpu_ecc_uncorrected_errors_total", "a0", "tiny", POOL_NAME, "w1"): 1,
        ("penstock_worker_gpu_slowed", "a0", "tiny", POOL_NAME, "power_cap", "w1"): 1,
        ("penstock_worker_gpu_slowed", "a0", "tiny", POOL_NAME, "hardware_thermal", "w1"): 1,
    }


def test_clocks_are_compared_with_the_stores(
    http: httpx.Client, model: str, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(valkey, began=time.time() - 60)
    announce(valkey, "w2.x", worker="w2", began=time.time() + 90)
    told = figures(http)
    assert told["penstock_gateway_clock_skew_seconds",] == 0, "as far as can be told"
    assert told["penstock_worker_clock_ahead_seconds", "tiny", POOL_NAME, "w1"] == 0
    assert 0 < told["penstock_worker_clock_ahead_seconds", "tiny", POOL_NAME, "w2"] <= 90
    real = time.time
    monkeypatch.setattr("producers.gateway.metrics.time", SimpleNamespace(time=lambda: real() - 5))
    assert figures(http)["penstock_gateway_clock_skew_seconds",] <= -4
    monkeypatch.setattr("producers.gateway.metrics.time", SimpleNamespace(time=lambda: real() + 50))
    assert figures(http)["penstock_gateway_clock_skew_seconds",] >= 4


def test_what_is_stuck_is_counted(http: httpx.Client, model: str, valkey: Redis) -> None:
    valkey.rpush(broker_keys.DEAD, "a", "b")
    valkey.zadd(keys.SUBMITTING, {"x": 1})
    valkey.zadd(keys.WEBHOOKS_DUE, {"w": 1000, "taken": 9e12})
    valkey.zadd(keys.WEBHOOKS_DEAD, {"v": 1000})
    got = figures(http)
    assert [got["penstock_webhook_rows", state] for state in ("due", "delivered", "dead")] == [2, 0, 1]
    assert got["penstock_webhook_oldest_due_seconds",] > 1e9
    assert (got["penstock_dead_letters",], got["penstock_tasks_submitting",]) == (2, 1)


def test_requests_are_counted_by_template_and_status(http: httpx.Client, submit: Submit) -> None:
    submit()
    submit(tier="flex")
    http.post("/v1/tasks", json={"model": "tiny"})
    for task_id in "abc":
        http.get(f"/v1/tasks/{task_id}")
    for path in ("/no", "/nowhere"):
        http.request("PROPFIND", path)
    got = figures(http)
    requests = {labels[1:]: value for labels, value in got.items() if labels[0] == "penstock_gateway_requests_total"}
    assert requests == {
        ("POST", "/v1/tasks", "202"): 2,
        ("POST", "/v1/tasks", "400"): 1,
        ("GET", "/v1/tasks/{task_id}", "404"): 3,
        ("other", "unmatched", "404"): 2,
    }
    assert got["penstock_gateway_tasks_submitted_total", "tiny", "default"] == 1
    assert got["penstock_gateway_tasks_submitted_total", "tiny", "flex"] == 1
    assert got["penstock_gateway_request_seconds_count", "/v1/tasks"] == 3


def test_tasks_of_an_adapter_are_counted_by_its_own_name(http: httpx.Client, submit: Submit, valkey: Redis) -> None:
    adapter = StoredAdapter("mine", "tiny", "0123456789ab", 8, 1, 1)
    valkey.hset(keys.ADAPTERS, "mine", json.dumps(asdict(adapter)))
    for name in ("mine", "tiny:mine"):
        submit(model=name)
    assert figures(http)["penstock_gateway_tasks_submitted_total", "mine", "default"] == 2


def refused(http: httpx.Client) -> dict[tuple[str, ...], float]:
    """How often, by reason and tier."""
    return {n[1:]: value for n, value in figures(http).items() if n[0] == "penstock_gateway_requests_refused_total"}


def test_what_is_refused_is_counted_by_reason_and_tier(open_door: Open, model: str, valkey: Redis) -> None:
    door = open_door(max_queued=2)

    def post(path: str, **fields: Any) -> int:
        return httpx.post(f"{door.url}/v1/{path}", json={"model": model, **fields}, timeout=PATIENCE_S).status_code

    assert [post("tasks", prompt=[1], tier="priority") for _ in range(4)] == [202, 202, 429, 429]
    assert post("tasks", prompt=[1]) == 429
    assert post("completions", prompt=[1], service_tier="flex") == 429
    messages = [{"role": "user", "content": "x"}]
    assert post("chat/completions", messages=messages, service_tier="priority") == 429
    # What is wrong with the request itself is no refusal of this kind.
    assert post("tasks", prompt=[1], tier="first") == 400
    assert post("tasks", prompt=[1], model="no") == 404
    http = door.http
    assert refused(http) == {("queue_full", "priority"): 3, ("queue_full", "default"): 1, ("queue_full", "flex"): 1}

    door = open_door(max_queued_per_tenant=1)
    valkey.hset(keys.WAITING_TENANTS, "greedy", 1)
    assert post("tasks", prompt=[1], tier="flex", tenant="greedy") == 429
    valkey.config_set("maxmemory", "1")
    try:
        assert post("tasks", prompt=[1], tier="batch") == 503
    finally:
        valkey.config_set("maxmemory", "0")
    http = door.http
    assert refused(http) == {("tenant_queue_full", "flex"): 1, ("storage_full", "batch"): 1}


def test_who_comes_while_the_store_is_away_or_without_a_connection_is_counted(open_door: Open) -> None:
    door = open_door(store=NOWHERE, connections=1, patience=0.2)
    with httpx.Client(base_url=door.url, timeout=PATIENCE_S) as http:
        assert http.post("/v1/tasks", json={"model": "tiny", "prompt": [1], "tier": "batch"}).status_code == 503
        assert http.get("/v1/models").status_code == 503
        with busy(door):  # which takes the only place, of a connection that is idle
            assert httpx.get(f"{door.url}/livez", timeout=PATIENCE_S).status_code == 503
        until(lambda: not len(door.peers))
        assert refused(http) == {
            ("service_unavailable", "batch"): 1,
            ("service_unavailable", "unknown"): 1,
            ("too_many_connections", "unknown"): 1,
        }


def test_open_streams_are_counted(http: httpx.Client, submit: Submit, worker: FakeWorker) -> None:
    task_id = submit()
    with http.stream("GET", f"/v1/tasks/{task_id}/events"):
        assert figures(http)["penstock_gateway_open_streams", "events"] == 1
    until(lambda: figures(http)["penstock_gateway_open_streams", "events"] == 0)


def test_without_a_store_the_gateways_own_figures_are_still_told(open_door: Open) -> None:
    door = open_door(store=NOWHERE)
    http = door.http
    got = figures(http)
    assert got["penstock_up",] == 0
    assert ("penstock_gateway_open_streams", "answer") in got
    assert not any(name.startswith("penstock_queued") for name, *_ in got)


def test_what_waits_for_a_sweeper_is_told_and_what_one_did(
    http: httpx.Client, submit: Submit, valkey: Redis, worker: FakeWorker
) -> None:
    now = int(valkey.time()[0]) * 1000
    worker.claim(one := submit())
    worker.finish(one, [0])
    valkey.zadd(keys.UNSETTLED, {one: now - 90_000})
    worker.serve(submit())
    valkey.zadd(keys.SUBMITTING, {"unsent": now - 40_000})
    got = figures(http)
    counts = ("tasks_submitting", "tasks_unsettled", "streams_to_compact")
    assert [got[f"penstock_{name}",] for name in counts] == [1, 1, 1]
    oldest = [got[f"penstock_{name}_oldest_seconds",] for name in counts]
    assert 39 <= oldest[0] < 90 <= oldest[1] + 1
    assert 0 <= oldest[2] < 60
    assert got["penstock_sweeper_leads",] == 0
    valkey.set(keys.SWEEPER, "s1")
    valkey.hset(keys.SWEPT, mapping={"compacted": 7, "sent": 2})
    got = figures(http)
    assert got["penstock_sweeper_leads",] == 1
    assert (got["penstock_swept_total", "compacted"], got["penstock_swept_total", "sent"]) == (7, 2)


def test_what_the_autoscaler_wants_is_told_while_it_is_news(http: httpx.Client, model: str, valkey: Redis) -> None:
    now = int(valkey.time()[0])
    actual = {"wanted": 3, "standbys": 1}
    state = {"model": "tiny", "at": now, "wanted": 3, "starts": {"failures": 2}, "actual": actual}
    states = {"tiny": state, "old": {**state, "at": now - 60}, "odd": {**state, "wanted": -1}, "text": 7}
    valkey.hset(keys.SCALE_POOLS, mapping={name: json.dumps(one) for name, one in states.items()})
    valkey.hset(keys.SCALE_POOLS, "bytes", b"\xff")
    profile = {"knee": 12, "tokens_per_s": float("nan"), "cold_start": {"imports": 1.5, "total": -2}}
    valkey.hset(keys.PROFILES, "tiny@v", json.dumps(profile))
    got = figures(http)
    assert got["penstock_autoscaler_leads",] == 0
    assert {key[1:]: value for key, value in got.items() if key[0] == "penstock_desired_workers"} == {
        ("tiny", "tiny"): 3
    }
    assert got["penstock_worker_start_failures", "tiny", "tiny"] == 2
    pools = {key: value for key, value in got.items() if key[0].startswith("penstock_pool_")}
    assert pools == {
        ("penstock_pool_knee", "tiny", "tiny@v"): 12,
        ("penstock_pool_cold_start_seconds", "tiny", "imports", "tiny@v"): 1.5,
        ("penstock_pool_standbys", "tiny", "tiny"): 1,
    }
    valkey.set(keys.SCALE_LEADER, "one")
    assert figures(http)["penstock_autoscaler_leads",] == 1


def test_a_lease_that_lies_is_a_worker_without_those_figures(http: httpx.Client, model: str, valkey: Redis) -> None:
    announce(valkey, running="many", waiting=-1, gpu="none", version="v", profile={"ttft_p95": 0.25, "duty": "x"})
    announce(valkey, "w2.def", worker="w2", version="v", profile={"ttft_p95": 0.5})
    got = figures(http)
    assert got["penstock_workers", "tiny", POOL_NAME] == 2
    assert got["penstock_worker_running", "tiny", POOL_NAME, "w2"] == 3
    assert ("penstock_worker_running", "tiny", POOL_NAME, "w1") not in got
    assert ("penstock_worker_waiting", "tiny", POOL_NAME, "w1") not in got
    assert got["penstock_pool_ttft_p95_seconds", "tiny", "tiny@v"] == 0.5


def test_the_text_is_that_of_prometheus_own_library() -> None:
    """Each line of it, of all kinds of families, numbers and labels."""

    class Families(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from Metrics(lambda kind: 3, process="1").collect()
            for number, value in enumerate((0.0, 1e6, 1234567.5, 1e21, 1e-9, math.inf, -math.inf, True, 2**60)):
                family = GaugeMetricFamily(f"g{number}", 'a "text"\n\\n of', labels=("b", "a"))
                for label in ("", 'x"} 1\n\\n', "é"):
                    family.add_metric((label, "y"), value)
                yield family
            yield UnknownMetricFamily("what", "unknown", value=5)
            yield CounterMetricFamily("seen", "counted", value=5, created=7)
            yield HistogramMetricFamily("h", "times", buckets=[("0.5", 1), ("+Inf", 2)], sum_value=3)

    registry = Families()

    def lines(text: bytes) -> list[str]:
        """Without numbers that change from one call to the next."""
        return [
            line for line in text.decode().splitlines() if not re.match(r"process_|penstock_gateway_\w+_created", line)
        ]

    assert lines(exposition(registry)) == lines(generate_latest(registry))


def test_names_that_workers_make_up_are_bounded_and_escaped(http: httpx.Client, model: str, valkey: Redis) -> None:
    """Half of the fleet is of an earlier release, and tells less."""
    wild = 'x"} 1\n# EOF\\ <script>\ud800' + "é" * 500
    gpu = {"uuid": wild, "memory_bytes": 1, "slowed_by": [wild, wild, *map(str, range(10**4))]}
    for number in range(6):
        new = {"release": wild, "gpu": gpu, "out_of_memory": 1} if number % 2 else {}
        announce(valkey, f"w{number}.a", worker=f"{number}{wild}", running=number, **new)
    announce(valkey, "w6.a", worker={"a": 1}, gpu={"uuid": 7, "slowed_by": 5}, release=None)
    text = http.get("/metrics").text
    lines = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("penstock_worker")
    ]
    assert max(len(value) for sample in samples for value in sample.labels.values()) <= MAX_LABEL
    counts = Counter(sample.name for sample in samples)
    assert (counts["penstock_worker_running"], counts["penstock_worker_out_of_memory_total"]) == (7, 3)
    assert 3 <= counts["penstock_worker_gpu_slowed"] <= 3 * MAX_REASONS
    assert {sample.value for sample in samples if sample.name == "penstock_worker_running"} == {*range(6)}


def test_histograms_of_a_model_are_the_same_at_each_gateway(open_door: Open, model: str, valkey: Redis) -> None:
    """Each bucket has the smaller ones' observations, too, and no counter falls when a worker leaves."""
    doors = [open_door(), open_door()]
    zero = figures(doors[0].http)
    assert zero["penstock_tasks_total", "tiny", "completed", "flex"] == 0, "so that the first one is an increase"
    assert zero["penstock_model_generated_tokens_total", "tiny"] == 0
    announce(valkey, profile={"duty": 0.25}, turn_wait_s=12.5)
    tally = Tally()
    for seconds, count in ((0.002, 3), (0.04, 2), (7200.0, 1)):
        tally.observe(INTER_TOKEN, seconds, "flex", count)
    tally.add("tasks", 2, "flex", "completed")
    tally.add("model_generated_tokens", 70)
    tally.add(ENERGY, 2_500_000, "busy")
    tally.add("model_starts", 3, "standby")
    tally.add("model_start_us", 750_000, "weights")
    fields = tally.fields() | {"of_a_later_release all n": 1, "tasks flex lost n": 1, "inter_token_seconds x sum": 5}
    valkey.hset(keys.metrics("tiny"), mapping=fields)
    of_worker = figures(doors[0].http)
    assert of_worker["penstock_worker_duty_ratio", "tiny", POOL_NAME, "w1"] == 0.25
    assert of_worker["penstock_worker_turn_wait_seconds_total", "tiny", POOL_NAME, "w1"] == 12.5
    valkey.delete(keys.lease("w1.abc"))
    for door in doors:
        got = figures(door.http)
        name = "penstock_inter_token_seconds"
        buckets = {names[1]: n for names, n in got.items() if names[0] == f"{name}_bucket"}
        assert list(buckets.values()) == sorted(buckets.values())
        marks = ("0.001", "0.0025", "0.025", "0.05", "3600.0", "+Inf")
        assert [buckets[bound] for bound in marks] == [0, 3, 3, 5, 5, 6]
        assert got[f"{name}_count", "tiny", "flex"] == 6
        assert got[f"{name}_sum", "tiny", "flex"] == pytest.approx(7200.086)
        assert got["penstock_tasks_total", "tiny", "completed", "flex"] == 2
        assert got["penstock_model_generated_tokens_total", "tiny"] == 70
        energy = {names[2]: joules for names, joules in got.items() if names[0] == "penstock_model_energy_joules_total"}
        assert energy == {"busy": 2.5}
        assert got["penstock_model_starts_total", "tiny", "standby"] == 3
        assert got["penstock_model_starts_total", "tiny", "process"] == 0
        assert got["penstock_model_start_seconds_total", "tiny", "weights"] == 0.75
        assert got["penstock_model_lost_seconds_total", "failover", "tiny"] == 0, "so that the first is an increase"
        assert not [names for names in got if "lost" in names or "later_release" in names[0]]


def test_what_became_of_what_sources_took_is_the_same_at_each_gateway(open_door: Open, valkey: Redis) -> None:
    """A call whose reply was lost counts once; a source that has begun shows zeros."""
    doors = [open_door(), open_door()]
    begun = {("orders", outcome): 0 for outcome in SOURCE_OUTCOMES}
    run(valkey, measure_items("p1", "1", begun))
    assert figures(doors[0].http)["penstock_source_items_total", "refused", "orders"] == 0
    for process, mark in (("p1", "2"), ("p1", "2"), ("p2", "1")):
        run(valkey, measure_items(process, mark, {("orders", "refused"): 2, ("nightly", "missed"): 1}))
    valkey.hset(
        keys.METRICS_SOURCES, mapping={"source_items orders lost n": 1, "other orders done n": 1, "source_items": 1}
    )
    for door in doors:
        items = {names[1:]: n for names, n in figures(door.http).items() if names[0] == "penstock_source_items_total"}
        assert {names: n for names, n in items.items() if n} == {("refused", "orders"): 4, ("missed", "nightly"): 2}
        assert len(items) == 2 * len(SOURCE_OUTCOMES)


def test_a_user_of_the_server_of_an_earlier_release_costs_the_histograms_alone(
    open_door: Open, model: str, valkey: Redis, valkey_url: str
) -> None:
    rules = ROLES["gateway"].rules().replace("%R~penstock:metrics:* ", "").split()
    valkey.execute_command("ACL", "SETUSER", "earlier", "reset", "on", ">secret", *rules)
    announce(valkey)
    try:
        url = valkey_url.replace("redis://", "redis://earlier:secret@")
        got = figures(open_door(store=url, broker=url).http)
    finally:
        valkey.execute_command("ACL", "DELUSER", "earlier")
    assert (got["penstock_up",], got["penstock_workers", "tiny", POOL_NAME]) == (1, 1)
    assert not [names for names in got if names[0] == "penstock_tasks_total"]
