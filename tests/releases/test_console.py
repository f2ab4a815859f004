"""The console of this release, whose requests a gateway of the release before answers, behind the same address."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.async_api import Route, expect

from tests.conformance.conftest import gateway
from tests.processes import fill, free_port, guarded, valkey
from tests.producers.gateway.console.conftest import Complaints, Look
from tests.producers.gateway.console.conftest import browser as browser
from tests.producers.gateway.console.conftest import complaints as complaints
from tests.producers.gateway.console.conftest import look as look
from tests.waiting import until

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

#: What the release before has not, of what these pages ask for.
ABSENT = re.compile("has no /v1/(overview|fleet): it is of an earlier release")


@dataclass
class Gateways:
    """One of each release, on one store with one task. Playwright writes into an object whose method it calls."""

    url: str
    before: str
    task_id: str

    async def answer(self, route: Route) -> None:
        """Let the release before answer."""
        parts = urlsplit(route.request.url)
        await route.fulfill(response=await route.fetch(url=f"{self.before}{parts.path}?{parts.query}"))


@pytest.fixture(scope="module")
def gateways(before: Path) -> Iterator[Gateways]:
    with valkey() as (store_url, store), gateway(store_url) as (url, _):
        (task_id,) = fill(store, "stub", 1)
        port = free_port()
        env = {**os.environ, "PYTHONPATH": str(before), "BROKER_URL": store_url, "STORE_URL": store_url}
        argv = guarded(sys.executable, "-P", "-m", "workers.cli", "gateway", "--port", str(port))
        earlier = subprocess.Popen(argv, cwd=before, env=env)
        address = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            try:
                return httpx.get(f"{address}/v1/tasks/{task_id}").status_code == 200
            except httpx.TransportError:
                return False

        try:
            until(answers)
            yield Gateways(url, address, task_id)
        finally:
            earlier.kill()
            earlier.wait()


async def test_what_the_release_before_has_is_shown_and_what_it_has_not_is_named(
    look: Look, gateways: Gateways, complaints: Complaints
) -> None:
    page = await look(gateways, "models")
    await page.route("**/v1/**", gateways.answer)
    await page.route("**/v1/whoami", lambda route: route.continue_())
    for path, title in (("", "Overview"), ("workers", "Workers")):
        await page.goto(f"{gateways.url}/console#/{path}")
        await expect(page.get_by_role("heading", level=1, name=title)).to_be_visible()
        await expect(page.locator("main .note.bad")).to_contain_text(ABSENT)
    await page.goto(f"{gateways.url}/console#/tasks/{gateways.task_id}")
    await expect(page.locator(".head .state")).to_have_text("queued")
    await page.unroute_all(behavior="ignoreErrors")  # the task's events, which have not ended
    complaints.clear()  # Chromium tells of each 404


async def test_a_page_that_begins_at_the_release_before_says_so_and_goes_on_with_this_one(
    look: Look, gateways: Gateways, complaints: Complaints
) -> None:
    page = await look(gateways, "tasks")
    await page.route("**/v1/**", gateways.answer)
    await page.reload()
    await expect(page.get_by_role("alert")).to_contain_text("has no /v1/whoami: it is of an earlier release")
    await page.unroute_all(behavior="ignoreErrors")
    await expect(page.locator("tbody tr")).to_have_count(1)
    complaints.clear()
