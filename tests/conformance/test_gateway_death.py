"""A gateway is killed while it streams: what its callers waited for ends, and makes room for others."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from producers import keys
from tests.conformance.conftest import System, gateway
from tests.producers.gateway.conftest import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_kill_9_mid_stream_cancels_the_task_and_frees_its_memory(system: System) -> None:
    with gateway(system.store_url, reader_lease=1.0, sweep=False) as (url, process):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)
        chunks = iter(
            client.completions.create(
                model="tiny", prompt="def f", n=64, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
            )
        )
        task_id = next(chunks).id.removeprefix("cmpl-")
        until(lambda: _lease(system)["kv_blocks_used"])
        assert system.store.zscore(keys.READERS, task_id) is not None
        process.kill()
        process.join()
        until(lambda: system.status(task_id) == "cancelled", 40)
    until(lambda: system.store.hexists(keys.task(task_id), "settled"))
    assert 0 < json.loads(system.store.hget(keys.task(task_id), "usage"))["output_tokens"] < 64 * 900
    until(lambda: _lease(system)["running"] == 0 and _lease(system)["kv_blocks_used"] == 0)
    until(lambda: system.store.zscore(keys.READERS, task_id) is None)


def _lease(system: System) -> dict[str, int]:
    (incarnation,) = system.worker.incarnations
    said: dict[str, int] = json.loads(system.store.get(keys.lease(incarnation)))
    return said
