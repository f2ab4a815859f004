"""A store with a model's card, queues to fill, leases of workers that are none, and an actuator that records."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient
from producers.broker.redis import keys as broker_keys
from producers.connection.script import parsed
from producers.contract import keys
from tests.processes import fill
from workers.autoscaler.actuators import Actual, ActuatorError

POOL = keys.Pool("tiny", "v1", "cafe")


class Fleet:
    """The store as an autoscaler finds it."""

    def __init__(self, valkey: Redis) -> None:
        self.valkey = valkey
        self.card("v1")

    def card(self, version: str) -> None:
        self.valkey.hset(keys.MODELS, "tiny", json.dumps({"name": "tiny", "version": version}))

    def fill(self, count: int, queue: str = POOL.version_queue, tier: str = "default") -> None:
        fill(self.valkey, queue, count, tier=tier, model="tiny")

    def empty(self, queue: str = POOL.version_queue) -> None:
        for tier in keys.TIERS:
            self.valkey.delete(*broker_keys.tier_lists(queue, tier))

    def lease(self, name: str, pool: keys.Pool = POOL, **about: Any) -> None:
        """A ready worker's."""
        text = json.dumps({"worker": name, "running": 0, "waiting": 0, **about})
        self.valkey.hset(keys.POOLS, pool.queue, json.dumps({"model": pool.model, "version": pool.version}))
        self.valkey.hset(broker_keys.INCARNATIONS, f"{name}.1", pool.queue)
        self.valkey.set(keys.lease(f"{name}.1"), text)

    def end(self, name: str) -> None:
        self.valkey.hdel(broker_keys.INCARNATIONS, f"{name}.1")
        self.valkey.delete(keys.lease(f"{name}.1"))

    def state(self, pool: str = "tiny") -> dict[str, Any]:
        """The kept one; empty where there is none."""
        return parsed(self.valkey.hget(keys.SCALE_POOLS, pool))

    def history(self) -> list[dict[str, Any]]:
        return [json.loads(fields[b"decision"]) for _, fields in self.valkey.xrange(keys.SCALE_DECISIONS)]


class Recorder:
    """An actuator that notes what it is told, and has that many workers at once unless said otherwise."""

    name = "recorder"

    def __init__(self, wanted: int = 0) -> None:
        self.wanted = wanted
        self.up: int | None = None
        self.failing, self.failures = "", 0
        self.told: list[tuple[int, list[str]]] = []
        self.refuses = ""
        self.answers = asyncio.Event()
        self.answers.set()

    async def actual(self) -> Actual:
        await self._answer()
        return Actual(self.wanted, self.wanted if self.up is None else self.up, self.failing, self.failures)

    async def scale(self, wanted: int, first: Sequence[str]) -> None:
        await self._answer()
        self.wanted = wanted
        self.told.append((wanted, list(first)))

    async def aclose(self) -> None:
        """It has nothing to close."""

    async def _answer(self) -> None:
        await self.answers.wait()
        if self.refuses:
            raise ActuatorError(self.refuses)

    @property
    def numbers(self) -> list[int]:
        return [wanted for wanted, _ in self.told]


@pytest.fixture
def fleet(valkey: Redis) -> Fleet:
    return Fleet(valkey)


@pytest.fixture
async def aclient(valkey_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url) as client:
        yield client
