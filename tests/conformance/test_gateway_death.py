"""A gateway is killed while it streams: what its callers waited for ends, and makes room for others."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from producers.contract import keys
from tests.conformance.conftest import System, gateway
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_kill_9_mid_stream_cancels_its_tasks_and_frees_their_memory(system: System) -> None:
    with gateway(system.store_url, reader_lease=1.0, sweep=False) as (url, process), system.steps.held():
        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)
        chunks = iter(
            client.completions.create(
                model="tiny", prompt=["def f"] * 4, n=16, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
            )
        )
        next(chunks)
        until(lambda: _lease(system)["kv_blocks_used"])
        ids = system.store.zrange(keys.READERS, 0, -1)
        assert len(ids) == 4
        process.kill()
        process.join()
        # The system's own, whose readers are given longer, would find them too, a quarter of a minute later.
        with gateway(system.store_url, reader_lease=1.0):
            until(lambda: "cancelled" in map(system.status, ids))
            until(lambda: all(system.store.hexists(keys.task(task_id), "settled") for task_id in ids))
    made = [json.loads(system.store.hget(keys.task(task_id), "usage"))["output_tokens"] for task_id in ids]
    assert 0 < sum(made) < 4 * 16 * 900
    until(lambda: _lease(system)["running"] == 0 and _lease(system)["kv_blocks_used"] == 0)
    until(lambda: not system.store.zcard(keys.READERS))


def _lease(system: System) -> dict[str, int]:
    (incarnation,) = system.worker.incarnations
    said: dict[str, int] = json.loads(system.store.get(keys.lease(incarnation)))
    return said
