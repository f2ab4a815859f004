"""What a sweeper tells probes of itself: the store's silence, and sweeps that fail again and again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient
from producers.client.leases import Leadership
from producers.sweeper import sweeper, tasks
from producers.sweeper import sweeper as conditions
from producers.sweeper.sweeper import Condition, SweeperSettings
from producers.sweeper.tasks import Swept
from tests.waiting import auntil


async def test_a_sweep_that_fails_each_time_makes_the_leader_unready_until_it_succeeds(
    aclient: AsyncClient, valkey: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "FAILING_S", 0.0)
    broken = True

    async def sweep(client: AsyncClient, age_ms: int) -> Swept:
        if broken:
            raise RuntimeError("what nobody thought of")
        return Swept()

    monkeypatch.setattr(tasks, "send_unsent", sweep)
    condition = Condition()
    assert condition.unready() == ["it has not begun"]
    settings = SweeperSettings(valkey_url, valkey_url, "s", every=0.01)
    leading = asyncio.create_task(sweeper.lead(aclient, settings, condition=condition))
    await auntil(lambda: any("what nobody thought of" in reason for reason in condition.unready()))
    assert len(condition.unready()) == 1, "the other sweeps go on"
    broken = False
    await auntil(lambda: condition.unready() == [])
    assert not condition.failing
    leading.cancel()
    await asyncio.wait((leading,))


async def test_a_single_failure_is_no_reason(aclient: AsyncClient) -> None:
    condition = Condition()
    condition.leadership = Leadership(aclient, "s")
    condition.failed("a sweep", RuntimeError("once"))
    assert condition.unready() == []
    (begin, _), reason = condition.failing["a sweep"], "again"
    condition.failing["a sweep"] = begin - conditions.FAILING_S - 1, "once"
    condition.failed("a sweep", RuntimeError(reason))
    (told,) = condition.unready()
    assert told.endswith(f" s: {reason}"), "the time of the first failure, the reason of the last one"


async def test_a_sweeper_that_leads_no_more_forgets_what_failed_while_it_did(
    aclient: AsyncClient, valkey: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sweep(client: AsyncClient, age_ms: int) -> Any:
        raise RuntimeError("it fails")

    monkeypatch.setattr(tasks, "send_unsent", sweep)
    condition = Condition()
    settings = SweeperSettings(valkey_url, valkey_url, "s", every=0.01)
    leading = asyncio.create_task(sweeper.lead(aclient, settings, condition=condition))
    await auntil(lambda: condition.failing)
    leading.cancel()
    await asyncio.wait((leading,))
    assert not condition.failing


async def test_a_store_that_does_not_answer_makes_a_sweeper_unready_whether_it_leads_or_not() -> None:
    condition = Condition()
    async with AsyncClient("redis://127.0.0.1:1/0") as client:
        leadership = condition.leadership = Leadership(client, "s", lease_s=1.0)
        assert condition.unready() == []
        asking = asyncio.create_task(leadership.acquire())
        leadership.heard_at -= conditions.SILENT_S + leadership.lease_s + 1
        assert condition.unready() == ["the store does not answer"]
        asking.cancel()
        await asyncio.wait((asking,))
