"""Counters and histograms in the store: each end and each increment counts once, whoever adds it, and what is in them
is bounded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers.connection.script import run
from producers.contract import keys
from producers.store.measurements import (
    GEN_AI,
    HISTOGRAMS,
    KEPT_S,
    LEDGER,
    MAX_FIELDS,
    SECONDS,
    STEP_SEQUENCES,
    Tally,
    count_ended,
    measure,
    read_measurements,
)
from producers.store.usage.ledger import fold
from tests.producers.faces import Face
from tests.producers.fake_worker import FakeWorker


def counted(url: str, times: int = 1) -> dict[str, dict[str, int]]:
    """What is in the store once so many sweepers have counted at a time."""

    async def count() -> dict[str, dict[str, int]]:
        async with AsyncRedis.from_url(url) as store:
            await asyncio.gather(*(count_ended(store) for _ in range(times)))
            return await read_measurements(store)

    return asyncio.run(count())


def sizes(*values: int) -> Tally:
    tally = Tally()
    for value in values:
        tally.observe(STEP_SEQUENCES, value)
    return tally


def row(valkey: Redis, **fields: Any) -> None:
    """A task of 3 tokens that waited 2 s, had its first token 0.5 s later, and ended 4 s after that."""
    ended = int(valkey.time()[0]) * 1000
    times = {"created": ended - 6500, "started": ended - 4500, "first": ended - 4000, "longest": 3}
    usual = {"id": "x", "model": "tiny", "tier": "flex", "status": "completed", "discarded": 0}
    valkey.xadd(keys.LEDGER, usual | times | fields, id=f"{ended}-*")


def test_a_task_is_in_each_histogram_once_however_many_count(valkey: Redis, valkey_url: str, model: str) -> None:
    for _ in range(3):
        row(valkey)
    row(valkey, tier="batch", status="failed", started="", first="", longest=0)
    got = counted(valkey_url, times=4)[model]
    assert counted(valkey_url)[model] == got
    assert got == {
        "tasks flex completed n": 3,
        "queue_wait_seconds flex 2.5": 3,
        "queue_wait_seconds flex sum": 6_000_000,
        "claim_to_first_token_seconds flex 0.5": 3,
        "claim_to_first_token_seconds flex sum": 1_500_000,
        "time_to_first_token_seconds flex 2.5": 3,
        "time_to_first_token_seconds flex sum": 7_500_000,
        "time_per_output_token_seconds flex 2.5": 3,
        "time_per_output_token_seconds flex sum": 6_000_000,
        "task_seconds flex 10.0": 3,
        "task_seconds flex sum": 19_500_000,
        "tasks batch failed n": 1,
        "task_seconds batch 10.0": 1,
        "task_seconds batch sum": 6_500_000,
        "gen_ai.server.time_to_first_token flex 2.5": 3,
        "gen_ai.server.time_to_first_token flex sum": 7_500_000,
        "gen_ai.server.time_per_output_token flex 2.5": 3,
        "gen_ai.server.time_per_output_token flex sum": 6_000_000,
        "gen_ai.server.request.duration flex 10.24": 3,
        "gen_ai.server.request.duration flex sum": 19_500_000,
        "gen_ai.server.request.duration.failed batch 10.24": 1,
        "gen_ai.server.request.duration.failed batch sum": 6_500_000,
    }
    run(valkey, fold(-1000))
    row(valkey)
    assert counted(valkey_url)[model]["tasks flex completed n"] == 4


def test_a_task_is_measured_by_its_record(valkey: Redis, valkey_url: str, client: Face, worker: FakeWorker) -> None:
    """Each script that ends one writes what the histograms need; a plain Celery task came nobody knows when."""
    ids = [client.submit(model="tiny", prompt=[1]).id for _ in range(3)]
    now = int(valkey.time()[0]) * 1000
    for task_id in ids:
        valkey.hset(keys.task(task_id), "created", now - 50_000)
    valkey.hset(keys.task(ids[1]), "plain", "1")
    for task_id in ids[:2]:
        worker.claim(task_id)
        worker.append(task_id, 0, ["a", "b", "c"], finish_reason="stop")
        worker.finish(task_id, [3])
    client.get(ids[2]).cancel()
    got = counted(valkey_url)["tiny"]
    counts = {name: n for name, n in got.items() if not name.endswith("sum") and not name.startswith("gen_ai")}
    per_token = [name for name in counts if name.startswith("time_per_output_token_seconds default")]
    first = [name for name in counts if name.startswith("claim_to_first_token_seconds default")]
    assert counts.pop("tasks default completed n") == 2
    assert counts.pop("tasks default cancelled n") == 1
    assert sum(counts.pop(name) for name in per_token) == sum(counts.pop(name) for name in first) == 2
    assert {name.split()[0] for name in counts} == {"queue_wait_seconds", "time_to_first_token_seconds", "task_seconds"}
    assert sum(n for name, n in counts.items() if name.startswith("queue_wait_seconds")) == 1
    assert sum(n for name, n in counts.items() if name.startswith("task_seconds")) == 2


def test_a_row_that_is_not_of_this_release_or_of_no_model_makes_no_field(
    valkey: Redis, valkey_url: str, model: str
) -> None:
    row(valkey, model="made up by a Celery sender")
    row(valkey, tier="no tier", status="completed")
    row(valkey, status="no status")
    row(valkey, created="1e9", started="-5", first="soon", longest="many")
    valkey.xadd(keys.LEDGER, {"id": "x", "model": model, "tier": "default", "status": "cancelled"})
    assert counted(valkey_url) == {model: {"tasks flex completed n": 1, "tasks default cancelled n": 1}}
    assert not valkey.exists(keys.metrics("made up by a Celery sender"))


def test_best_of_and_clocks_that_were_set_back(valkey: Redis, valkey_url: str, model: str) -> None:
    ended = int(valkey.time()[0]) * 1000
    row(valkey, discarded=4, created=ended + 9000, started=ended - 9000, first=ended - 9000)
    got = counted(valkey_url)[model]
    late = ("time_per_output", "time_to_first", "claim_to_first", "gen_ai.server.time_")
    assert not [name for name in got if name.startswith(late)], "best_of publishes all at once"
    assert got["queue_wait_seconds flex 0.001"] == got["task_seconds flex 0.001"] == 1


def test_increments_whose_answer_was_lost_count_once(valkey: Redis) -> None:
    for mark, tally in (("1", sizes(3)), ("1", sizes(3)), ("2", sizes(3, 70_000)), ("2", sizes(3, 70_000))):
        run(valkey, measure("worker", mark, {"tiny": tally}))
    run(valkey, measure("another", "1", {"tiny": sizes(3)}))
    fields = {name.decode(): int(n) for name, n in valkey.hgetall(keys.metrics("tiny")).items()}
    prefix = f"{STEP_SEQUENCES.name} all "
    assert fields == {prefix + "4.0": 3, prefix + "+Inf": 1, prefix + "sum": 70_009}


def test_a_sweeper_that_was_overtaken_adds_nothing(valkey: Redis) -> None:
    assert run(valkey, measure(LEDGER, "5-0", {"tiny": sizes(1)}, before="0-0")) == 1
    assert run(valkey, measure(LEDGER, "7-0", {"tiny": sizes(1)}, before="0-0")) == 0
    assert run(valkey, measure(LEDGER, "7-0", {"tiny": sizes(1)}, before="5-0")) == 1


def test_what_is_kept_is_bounded(valkey: Redis, valkey_url: str, model: str) -> None:
    usual = len((*HISTOGRAMS, *GEN_AI)) * 4 * (len(SECONDS) + 2) + 100
    assert usual < MAX_FIELDS
    foreign = {f"field {k}": "1" for k in range(MAX_FIELDS)}
    valkey.hset(keys.metrics(model), mapping=foreign | {"text": "no number", "large": 2**63 - 1})
    tally = sizes(1)
    tally.add("large", 1)
    tally.add("text", 1)
    valkey.hset(keys.metrics(model), mapping={"large all n": 2**63 - 1, "text all n": "no number"})
    run(valkey, measure("worker", "1", {model: tally}))
    assert valkey.hlen(keys.metrics(model)) == MAX_FIELDS + 4, "no new field"
    for name in (keys.metrics(model), keys.metrics_mark("worker")):
        assert 0 < valkey.ttl(name) <= KEPT_S
    got = counted(valkey_url)[model]
    assert got["large all n"] == 2**63 - 1
    assert "text all n" not in got


@pytest.mark.parametrize("name", ["tiny", 'a"b\\c\nd', "ünï cödé", "a b 1 2 3"])
def test_a_models_name_is_whatever_it_is(valkey: Redis, valkey_url: str, name: str) -> None:
    valkey.hset(keys.MODELS, name, json.dumps({"version": "v"}))
    row(valkey, model=name)
    assert counted(valkey_url)[name]["tasks flex completed n"] == 1
