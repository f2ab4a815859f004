"""Connections are killed at random while all processes live: whoever is taken for dead is not."""

from __future__ import annotations

import asyncio
import random
import re
import time
import urllib.request
from dataclasses import dataclass, field

from redis import Redis

from producers.contract import keys
from tests.bench.failover.load import Load
from tests.bench.failover.system import System
from tests.processes import TESTS

METRICS = ("penstock_worker_false_takeovers_total", "penstock_worker_recomputed_tokens_total")


@dataclass(slots=True)
class Soak:
    """`deaths`: of records, each a takeover of a task whose worker lived; `lives`: incarnations of the workers."""

    seconds: float = 0.0
    killed: dict[str, int] = field(default_factory=dict)
    lives: int = 0
    deaths: int = 0
    claims: int = 0
    tasks: int = 0


async def soak(system: System, load: Load, seconds: float, pause: float) -> Soak:
    """Kill a connection every `pause` s on average. Each kind, normal and pubsub, has the same chance."""
    found, began, lives = Soak(), time.monotonic(), set(system.incarnations())
    while (passed := time.monotonic() - began) < seconds:
        await asyncio.sleep(random.expovariate(1 / pause))
        kind = await asyncio.to_thread(_kill_one, system.redis)
        found.killed[kind] = found.killed.get(kind, 0) + 1
        lives.update(system.incarnations())
    found.seconds, found.lives = passed, len(lives)
    await load.close()
    for stream in load.done:
        deaths, claims = system.redis.hmget(keys.task(stream.id), "deaths", "claims")
        found.deaths += int(deaths or 0)
        found.claims += int(claims or 0)
    found.tasks = len(load.done)
    return found


def _kill_one(redis: Redis) -> str:
    kind = random.choice(["normal", "pubsub"])
    clients = [one for one in redis.client_list(_type=kind) if one["name"] != TESTS]
    if clients:
        redis.client_kill_filter(_id=random.choice(clients)["id"])
    return kind


def counted(port: int) -> dict[str, float]:
    """The gateway's figures of takeovers, summed over all workers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return {name: sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))) for name in METRICS}
