"""The ten questions of docs/run/console.md, answered in a browser, on a system with SmolLM2 under load.

Each test begins at the overview, clicks at most twice, and reads the answer where the page says that it is.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Locator, Page, expect
from redis import Redis

from producers.contract import keys
from producers.store.fleet import cards
from producers.store.protocol import STRETCH
from tests.conformance.conftest import gateway
from tests.processes import Worker, valkey
from tests.producers.gateway.console.conftest import Complaints, Look
from tests.producers.gateway.console.conftest import browser as browser
from tests.producers.gateway.console.conftest import look as look
from tests.producers.gateway.test_dead_letters import bury
from tests.waiting import PATIENCE_S, StepGate, until
from tests.warm import Forked
from workers.library.reference import BUNDLED, packaged

MODEL = "smollm2"
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(MODEL not in packaged(), reason="no trained model on this machine"),
]
CONFIG: dict[str, Any] = {"threads": 2, "kv_cache_bytes": 256 << 20, "max_num_seqs": 2}
#: Tasks that wait, more than the fastest machine ends between two looks at the queue.
BACKLOG = 30
#: Seconds between two points of a gateway that serves.
INTERVAL_S = 10.0
#: A worker that is lost soon after it dies, and few of whose deaths are enough to give up what they ran.
FRAGILE: dict[str, Any] = {
    "model": f"tiny={BUNDLED / 'tiny'}",
    "engine_factory": "workers.runtime.worker:load_engine",
    "engine": {"threads": 1, "kv_cache_bytes": 16 << 20},
    "lease": 4.0,
    "max_deaths": 1,
    "warm": True,
    "LOG_LEVEL": "WARNING",
}
STORY = "Write a long story about a fox and a river."
PAGE = Path(__file__).parents[2] / "docs" / "run" / "console.md"


@dataclass(frozen=True)
class System:
    url: str
    store_url: str
    store: Redis
    http: httpx.Client
    steps: StepGate

    def submit(self, tenant: str = "acme", **fields: Any) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": STORY}], "max_tokens": 60, **fields}
        answer = self.http.post("/v1/tasks", json={"tenant": tenant, **body})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def totals(self) -> dict[str, Any]:
        """Of the overview; empty while the gateway, on a busy machine, does not come to read it."""
        return dict(self.http.get("/v1/overview").json().get("totals", {}))


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A gateway, a sweeper, and a worker that is kept busy: more waits than it can run."""
    steps = StepGate(tmp_path_factory.mktemp("steps"))
    with (
        valkey() as (url, store),
        gateway(url) as (address, _),
        httpx.Client(base_url=address, timeout=PATIENCE_S) as http,
        Worker(
            url,
            model=f"{MODEL}={packaged()[MODEL]}",
            engine_factory="workers.runtime.worker:load_engine",
            engine=CONFIG,
            warm=True,
            LOG_LEVEL="WARNING",
            **steps.environment,
        ) as worker,
    ):
        worker.wait_until(lambda: bool(worker.incarnations), 400)
        made = System(address, url, store, http, steps)
        sweeper = Forked(
            [sys.executable, "-m", "workers.cli", "sweeper", "--broker", url, "--log-level", "warning"],
            {},
            tmp_path_factory.mktemp("sweeper") / "log",
        )
        autoscaler = Forked(
            [
                *(sys.executable, "-m", "workers.cli", "autoscaler", "--model", MODEL, "--max", "1", "--broker", url),
                *("--health-port", "0", "--log-level", "warning"),
            ],
            {},
            tmp_path_factory.mktemp("autoscaler") / "log",
        )
        ended = threading.Event()

        def load() -> None:
            while not ended.is_set():
                waiting = made.totals().get("waiting", BACKLOG)
                for tenant in islice(cycle(("acme", "acme", "globex")), max(0, BACKLOG - waiting)):
                    made.submit(tenant)
                ended.wait(0.5)

        loading = threading.Thread(target=load, daemon=True)
        loading.start()
        until(lambda: made.totals().get("tasks", {}).get("completed"))
        yield made
        ended.set()
        loading.join(PATIENCE_S)
        for process in (sweeper, autoscaler):
            process.terminate()
            process.wait(PATIENCE_S)


@pytest_asyncio.fixture(loop_scope="session")
async def complaints() -> AsyncIterator[Complaints]:
    """None is left but of a gateway that the model left no core for seconds: its store was late, and the page asks
    again."""
    heard = Complaints()
    yield heard
    assert [text for text in heard if "status of 503" not in text] == []


class Reader:
    """Somebody at the overview, whose clicks are counted."""

    def __init__(self, page: Page) -> None:
        self.page, self.clicks = page, 0
        self.main = page.locator("main")

    async def click(self, what: Locator) -> None:
        self.clicks += 1
        assert self.clicks <= 2
        await what.click()

    async def go(self, page: str) -> None:
        await self.click(self.page.locator("#nav").get_by_role("link", name=page, exact=True))
        await expect(self.page.get_by_role("heading", level=1, name=page)).to_be_visible()

    def card(self, title: str) -> Locator:
        return self.page.locator(".card").filter(has=self.page.get_by_role("heading", name=title, exact=True))


async def begin(look: Look, system: System) -> Reader:
    page = await look(system)
    await expect(page.get_by_role("heading", level=1, name="Overview")).to_be_visible()
    await expect(page.locator(".tile").first).to_be_visible()  # the model has both cores
    return Reader(page)


async def test_the_page_asks_ten_questions() -> None:
    rows = re.findall(r"^\| (\d+)\. .+\? \| .+ \| \d( to \d)? \|$", PAGE.read_text(), re.MULTILINE)
    assert [number for number, _ in rows] == [str(number) for number in range(1, 11)]


async def test_1_is_anything_wrong(look: Look, system: System) -> None:
    bury(system.store, "{")
    reader = await begin(look, system)
    findings = reader.page.get_by_role("list", name="What needs somebody")
    await expect(findings).to_contain_text("dead letters")
    await expect(findings).to_contain_text("replay or purge")
    system.store.delete("penstock:dead")
    await expect(findings.filter(has_text="dead letters")).to_have_count(0)


async def test_2_how_loaded_is_it_and_is_that_more_than_before(look: Look, system: System) -> None:
    reader = await begin(look, system)
    tile = reader.page.locator(".tile").filter(has_text="Running")
    await expect(tile).to_contain_text("of 2")
    await expect(tile.locator("svg path.line.run")).to_have_count(1)
    chart = reader.page.get_by_role("img", name=re.compile("Tasks that wait, and sequences that run"))
    await expect(chart.locator("path.line")).to_have_count(2)
    # Points at the gateway's own interval, of which there are a few by now.
    await expect(reader.page.locator(".axis").first).to_contain_text(re.compile("s ago|min"))

    def points() -> list[float]:
        at: list[float] = system.http.get("/v1/overview").json().get("series", {}).get("at", [])
        return at

    await asyncio.to_thread(until, lambda: len(points()) > 2)
    assert min(late - early for early, late in pairwise(points())) < 6 * INTERVAL_S


async def test_3_why_does_this_wait(look: Look, system: System) -> None:
    task_id = system.submit(tier="batch")
    reader = await begin(look, system)
    await reader.click(reader.page.get_by_label("Find a task by its id"))
    await reader.page.keyboard.type(f"{task_id}\n")
    await expect(reader.card("What keeps it")).to_contain_text("go first")
    await expect(reader.card("What keeps it")).to_contain_text("Starts in about")


async def test_4_what_waits_longest_and_where(look: Look, system: System) -> None:
    reader = await begin(look, system)
    await reader.go("Queues")
    row = reader.page.get_by_role("region", name="Queues").get_by_role("row").filter(has_text=f"{MODEL}@").first
    await expect(row).to_contain_text(re.compile(r"\d\s(ms|s|min)"))


async def test_5_who_uses_all_of_it(look: Look, system: System) -> None:
    reader = await begin(look, system)
    await reader.go("Usage")
    rows = reader.page.get_by_role("region", name="Usage").locator("tbody tr")
    await expect(rows.first).to_contain_text("acme")
    await expect(rows.nth(1)).to_contain_text("globex", timeout=90_000)  # it asks every 30 s
    await expect(rows.first).to_contain_text("%")


async def test_6_what_failed_last_and_with_what_error(look: Look, system: System) -> None:
    task_id = system.submit(tier="batch", timeout=0.05)
    reader = await begin(look, system)
    failed = reader.card("Failed last").get_by_role("link", name=f"{task_id[:6]}…")
    await expect(failed).to_be_visible()
    await reader.click(failed)
    await expect(reader.card("Error")).to_contain_text("expired")


async def test_7_is_a_worker_sick_or_full(look: Look, system: System) -> None:
    reader = await begin(look, system)
    await reader.go("Workers")
    row = reader.page.get_by_role("region", name="Workers").locator("tbody tr")
    await expect(row).to_contain_text("ready")
    await expect(row).to_contain_text("2 of 2")


async def test_8_why_are_there_so_many_workers(look: Look, system: System) -> None:
    reader = await begin(look, system)
    await reader.go("Scaling")
    await expect(reader.card("Pools")).to_contain_text(re.compile("1 is the most|1 would be enough|in flight|queued"))
    await expect(reader.card("Changes")).to_contain_text(re.compile("in flight|queued"))


async def test_9_what_did_last_nights_rollout_do(look: Look, system: System) -> None:
    """Its candidate had no worker that came up in time: the sweeper ended it."""
    card = json.loads(system.store.hget(keys.MODELS, MODEL) or b"{}")
    cards.add_version(system.store, {**card, "version": "candidate1"}, {})
    begun = system.http.post(f"/v1/rollouts/{MODEL}/start", json={"to": "candidate1", "timeout_s": 1})
    assert begun.status_code == 200, begun.text
    reader = await begin(look, system)
    await reader.go("Models")
    row = reader.page.get_by_role("region", name="Rollouts").locator("tbody tr")
    await expect(row).to_contain_text("failed")
    await expect(row).to_contain_text(re.compile("worker"))
    decisions = reader.page.get_by_role("region", name=f"Decisions on {MODEL}")
    await expect(decisions).to_contain_text("start")
    await expect(decisions).to_contain_text("fail")


def killed(worker: Worker, system: System, task_id: str) -> bool:
    """Whether the worker ran the task, and was killed by it; or had given it up."""

    def state() -> str | None:
        status, owner = system.store.hmget(keys.task(task_id), "status", "owner")
        return str(status) if status != "in_progress" or owner in worker.incarnations else None

    worker.wait_until(lambda: state() in ("failed", "in_progress"))
    if state() == "failed":
        return False
    worker.stop(signal.SIGKILL)
    return True


async def test_10_what_was_given_up_and_can_i_run_it_again(look: Look, system: System, tmp_path: Path) -> None:
    """A task whose workers were killed, each of them while it ran."""
    steps = StepGate(tmp_path)
    fragile = FRAGILE | steps.environment
    body = {"model": "tiny", "prompt": "def f(", "max_tokens": 60, "ignore_eos": True}
    with steps.held():
        with Worker(system.store_url, **fragile) as worker:
            worker.wait_ready()
            task_id = str(system.http.post("/v1/tasks", json=body).raise_for_status().json()["id"])
            killed(worker, system, task_id)
        for _ in range(STRETCH * FRAGILE["max_deaths"]):
            with Worker(system.store_url, **fragile) as worker:
                if not killed(worker, system, task_id):
                    break
    with Worker(system.store_url, **fragile) as worker:
        worker.wait_ready()
        assert system.store.hget(keys.task(task_id), "status") == "failed"
        reader = await begin(look, system)
        await reader.go("Dead letters")
        row = reader.page.get_by_role("region", name="Dead letters").locator("tbody tr").filter(has_text=task_id[:6])
        await expect(row).to_contain_text("worker")
        await reader.click(row.get_by_role("button", name="Replay"))
        dialog = reader.page.get_by_role("dialog")
        await expect(dialog).to_contain_text(f"Task {task_id} is submitted again under a new id")
        await dialog.get_by_role("button", name="Replay it").click()  # it asks once
        await expect(reader.page.get_by_role("status").filter(has_text="It runs as task")).to_be_visible()
        await expect(row).to_have_count(0)
        again = system.http.get("/v1/tasks", params={"model": "tiny", "kind": "all"}).json()["data"][0]["id"]
        assert again != task_id
        worker.wait_until(lambda: system.store.hget(keys.task(again), "status") == "completed")
    assert system.http.get("/v1/audit").json()["data"][0]["did"] == "dead_letter.replay"


async def test_a_task_of_the_model_is_read_while_it_is_written(look: Look, system: System) -> None:
    with system.steps.held(100):  # more tokens than the others' outputs have
        task_id = system.submit(tier="priority", max_tokens=200, ignore_eos=True)
        page = await look(system, f"tasks/{task_id}")
        output = page.get_by_label("Output so far")
        await expect(output).to_contain_text(re.compile(r"\w"), timeout=120_000)
    await expect(page.locator(".head .state")).to_have_text("completed", timeout=240_000)
    answer = system.http.get(f"/v1/tasks/{task_id}").json()
    await expect(page.locator("pre.text")).to_have_text(answer["choices"][0]["text"])
