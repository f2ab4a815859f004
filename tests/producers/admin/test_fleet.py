"""The queues of a published model that no worker serves are told of."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis import Redis

from producers import AsyncClient
from producers.admin.fleet import Pool, read_fleet
from producers.broker.connect import connect_consumer
from producers.broker.sqs.address import is_sqs, lists, read
from producers.broker.sqs.setup import make_missing
from producers.broker.values import Credit, Rules
from producers.contract import keys
from producers.store.fleet import cards
from producers.sweeper.queues import OrphanedQueues
from tests.producers.broker.conftest import url
from tests.producers.conftest import CARD, POOL, QUEUE

__all__ = ["url"]


@pytest.fixture
async def client(url: str, valkey: Redis, valkey_url: str) -> AsyncIterator[AsyncClient]:
    """`tiny` is published, and no worker was ever up."""
    if is_sqs(url):
        make_missing(read(url), [name for name, _ in lists(QUEUE)])
    cards.publish(valkey, CARD, {})
    async with AsyncClient(url, valkey_url) as made:
        yield made


async def pool(client: AsyncClient) -> Pool:
    fleet = await read_fleet(client.store, client.broker)
    return next(pool for pool in fleet.pools if pool.name == QUEUE.removeprefix("penstock:queue:"))


async def test_depth_and_age_are_known_with_no_worker_in_all_tiers(client: AsyncClient) -> None:
    for tier in keys.TIERS:
        await client.submit(model="tiny", prompt=[1], tier=tier)
    found = await pool(client)
    assert (found.queued, found.workers) == (dict.fromkeys(keys.TIERS, 1), [])
    assert found.oldest_s.keys() == keys.TIERS.keys()


@pytest.mark.parametrize("url", ["redis", "memory"], indirect=True)
async def test_they_are_known_of_what_a_dead_worker_had_sorted_and_taken(client: AsyncClient, url: str) -> None:
    for tenant in "abcd":
        await client.submit(model="tiny", prompt=[1], tenant=tenant)
    worker = connect_consumer(url, [QUEUE], url)
    worker.take_lease("w.1", "{}", 60.0)
    taken = worker.fetch("w.1", ["u"], Credit((1,) * 4, (10**6,) * 4), Rules((64, 10**6), 512, 10**6, 5))
    assert len(taken or ()) == 1
    found = await pool(client)
    assert (found.queued["default"], "default" in found.oldest_s) == (3, True)
    worker.end_lease("w.1")
    assert await client.broker.reap("w.1") == 1
    found = await pool(client)
    assert (found.queued["default"], "default" in found.oldest_s, found.in_flight) == (4, True, 0)
    worker.close()


@pytest.mark.parametrize("url", ["redis"], indirect=True)
async def test_tasks_of_a_version_that_was_never_served_are_seen_once_another_is_published(
    client: AsyncClient, valkey: Redis
) -> None:
    await client.submit(model="tiny", prompt=[1])
    cards.publish(valkey, CARD | {"version": "ba9876543210"}, {})
    assert (await pool(client)).queued["default"] == 1
    await OrphanedQueues(client, patience_s=0.0).sweep()
    cards.announce(valkey, CARD, POOL, {})
    assert [text for text in valkey.hkeys(keys.POOLS) if POOL.version.encode() in text] == [POOL.queue.encode()]
    assert (await pool(client)).queued["default"] == 1
