"""Time that an explanation takes, and how right its place is, while many tasks wait.

    python -m tests.bench.explain [--tasks 100000] [--json FILE]

A Valkey of its own holds the messages of 1, 10 or 1,000 tenants, and what ADMIT counts of them. Some are explained
before any message is sorted by tenant, and after all are. Then a consumer takes every message, and places are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis

from producers.admin.explain import explain
from producers.broker.base import Broker, Consumer
from producers.broker.connect import connect_broker, connect_consumer
from producers.broker.values import Credit, Rules
from producers.contract import keys
from producers.contract.message import Message
from producers.contract.record import Record
from tests.processes import valkey

QUEUE: Final = keys.version_queue("m", "1")
INC: Final = "bench.1"
RULES: Final = Rules(capacity=(10**9, 10**9), plain_tokens=512, ageing=10**6, max_redeliveries=5)
ROOM: Final = Credit((10**9,) * 4, (10**12,) * 4)
NO_ROOM: Final = Credit((0,) * 4, (0,) * 4)
#: Case -> tenants, and how often each sends. Of a thousand, the most frequent sends 30 times as often as the rarest.
TENANTS: Final = {
    "1 tenant": {"a": 1.0},
    "10 tenants": {f"t{k}": 1 / (k + 1) for k in range(10)},
    "1,000 tenants": {f"t{k}": 1.0 for k in range(1000)},
    "1,000 unlike tenants": {f"t{k}": 30 ** (-k / 1000) for k in range(1000)},
}
ASKED: Final = 200


def record_of(message: Message) -> Record:
    fields = {"status": "queued", "model": "m", "queue": QUEUE, "tier": message.tier, "tenant": message.tenant}
    times = {"created": str(message.at), "queued": str(message.at)}
    return Record(message.id, {**fields, **times, "tokens": str(message.tokens), "task": "{}", "n": "1"})


async def timed(store: Redis, broker: Broker, asked: Sequence[Message]) -> tuple[list[float], dict[str, int]]:
    """Milliseconds of each explanation, and the places that they tell."""
    took, told = [], {}
    for message in asked:
        begun = time.perf_counter()
        said = await explain(store, broker, record_of(message))
        took.append(1000 * (time.perf_counter() - begun))
        assert said.ahead is not None
        told[message.id] = said.ahead
    return took, told


def taken(consumer: Consumer, count: int) -> list[str]:
    """The ids of all messages, in the order in which they are taken."""
    found: list[str] = []
    while len(found) < count:
        uuids = [f"u{len(found) + k}" for k in range(500)]
        fetched = consumer.fetch(INC, uuids, ROOM, RULES, sort_limit=1000)
        assert fetched, f"{len(found)} of {count} came"
        found += [json.loads(one.raw)["headers"]["id"] for one in fetched]
    return found


async def count(store: Redis, sent: Sequence[Message]) -> None:
    """As ADMIT does of tasks that are listed, and write what their records say of their size."""
    for k in range(0, len(sent), 5000):
        async with store.pipeline(transaction=False) as pipe:
            for one in sent[k : k + 5000]:
                pipe.hset(keys.task(one.id), "tokens", one.tokens)
            await pipe.execute()
    for name, its in groupby(sorted(sent, key=lambda one: one.tenant), lambda one: one.tenant):
        times = {one.id: one.at for one in its}
        await store.zadd(keys.tasks(name), times)
        await store.hset(keys.WAITING_TENANTS, name, len(times))


async def measured(url: str, tasks: int, tenants: Mapping[str, float]) -> dict[str, Any]:
    draw = random.Random(1)
    whose = draw.choices([*tenants], [*tenants.values()], k=tasks)
    now = int(time.time() * 1000) - tasks
    sent = [Message(f"t{k}", QUEUE, "default", 1, draw.randint(50, 500), whose[k], now + k // 2) for k in range(tasks)]
    store, broker = Redis.from_url(url), connect_broker(url, url)
    consumer = connect_consumer(url, [QUEUE], url)
    consumer.take_lease(INC, "{}", 3600.0)
    for k in range(0, tasks, 5000):
        await broker.send_many(sent[k : k + 5000])
    await count(store, sent)
    asked = draw.sample(sent, ASKED)
    unsorted, places = await timed(store, broker, asked)
    for _ in range(tasks // 1000 + 1):
        consumer.fetch(INC, ["none"], NO_ROOM, RULES, sort_limit=1000)
    by_tenant, places_by_tenant = await timed(store, broker, asked)
    order = {name: place for place, name in enumerate(taken(consumer, tasks))}
    await broker.aclose()
    await store.aclose()
    return {"unsorted": figures(unsorted, places, order), "sorted": figures(by_tenant, places_by_tenant, order)}


def figures(took: list[float], told: dict[str, int], order: dict[str, int]) -> dict[str, float]:
    off = sorted(abs(place - order[name]) / len(order) for name, place in told.items())
    return {
        "p50_ms": statistics.median(took),
        "p95_ms": statistics.quantiles(took, n=20)[-1],
        "mean_off": statistics.mean(off),
        "p95_off": off[int(0.95 * len(off))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000, help="tasks that wait")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    found = {}
    for case, tenants in TENANTS.items():
        with valkey() as (url, _):
            both = asyncio.run(measured(url, options.tasks, tenants))
        found |= {f"{case}, {name}": its for name, its in both.items()}
    print("| messages | p50 ms | p95 ms | place off by, mean | 95% by less than |\n| --- | --- | --- | --- | --- |")
    for name, its in found.items():
        off = f"{its['mean_off']:.1%} | {its['p95_off']:.1%}"
        print(f"| {name} | {its['p50_ms']:.1f} | {its['p95_ms']:.1f} | {off} |")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
