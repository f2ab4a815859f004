"""The console with 100,000 tasks that have ended."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect
from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store.usage.ledger import fold
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Door, Submit
from tests.producers.gateway.console.conftest import Look

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.exhaustive, pytest.mark.timeout(300)]
TASKS = 100_000
#: Commands for what a page asks once, of whatever it shows.
COMMANDS = 3000


def ended_tasks(valkey: Redis, submit: Submit, worker: FakeWorker) -> None:
    """A task that ended, so many times."""
    task_id = submit(max_tokens=1)
    worker.claim(task_id)
    worker.append(task_id, 0, ["a"], finish_reason="length")
    worker.finish(task_id, [1])
    worker.settle(task_id)
    record = {name.decode(): value for name, value in valkey.hgetall(keys.task(task_id)).items()}
    ((entry, row),) = valkey.xrange(keys.LEDGER)
    at = int(entry.split(b"-")[0])
    for start in range(0, TASKS, 5000):
        with valkey.pipeline(transaction=False) as pipe:
            for number in range(start, start + 5000):
                copy = f"copy-{number:06}"
                pipe.hset(keys.task(copy), mapping={**record, "created": at + number // 100})
                pipe.zadd(keys.TASKS, {copy: at + number // 100})
                pipe.xadd(keys.LEDGER, {**row, b"id": copy}, id=f"{at + 1 + number // 100}-*")
            pipe.execute()
    while run(valkey, fold(-10_000, 500)):
        pass


async def test_pages_read_no_more_of_the_store_than_they_show(
    look: Look, door: Door, valkey: Redis, submit: Submit, worker: FakeWorker
) -> None:
    ended_tasks(valkey, submit, worker)

    async def shown(path: str, text: str | re.Pattern[str]) -> None:
        before = valkey.info("stats")["total_commands_processed"]
        page = await look(door, path)
        await expect(page.locator("main")).to_contain_text(text)
        assert valkey.info("stats")["total_commands_processed"] - before < COMMANDS
        await page.context.close()

    await shown("", re.compile(r"100.k tasks"))
    await shown("tasks", f"copy-{TASKS - 1:06}")
    await shown("usage", re.compile(r"100.k|100.001"))
    await shown("tasks/copy-000000", "completed")
