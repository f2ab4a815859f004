"""The console's pages in Chromium, over a real gateway and store; workers are played.

Each test begins with what a person would do. `complaints` fails a test whose page says anything on its console, or asks
another host.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, replace

import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from playwright.async_api import Browser, Route, expect
from redis import Redis

from producers.contract import keys
from producers.gateway.samples import Point
from producers.store.fleet import routing
from producers.store.fleet.rollouts import Rollout
from tests.exhaustive import few
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import CARD, QUEUE, Door, Make, Open, Submit
from tests.producers.gateway.console.conftest import Complaints, Look
from tests.producers.gateway.openai.conftest import Answering, says
from tests.producers.gateway.openai.conftest import answering as answering
from tests.producers.gateway.test_dead_letters import bury
from tests.producers.gateway.test_fleet import announce
from tests.producers.gateway.test_keys import make as make
from tests.producers.gateway.test_operations import audited, decide, put
from tests.producers.gateway.test_routing import OTHER
from tests.producers.gateway.test_routing import routed as routed
from tests.producers.proxy import Proxy

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGES = {
    "": "Overview",
    "queues": "Queues",
    "workers": "Workers",
    "models": "Models",
    "tasks": "Tasks",
    "dead-letters": "Dead letters",
    "scaling": "Scaling",
    "batches": "Batches",
    "webhooks": "Webhooks",
    "usage": "Usage",
    "keys": "Keys",
    "playground": "Playground",
}
NOT_FOUND = {"message": "There is no such URL.", "type": "invalid_request_error", "param": None, "code": "not_found"}
#: Markup, and marks that turn the line's direction.
HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>\u202eevil\u2066'


@pytest.fixture
def fleet(valkey: Redis, submit: Submit) -> str:
    """Something of everything, with names as hostile as they come. Returns the id of a task that waits."""
    sequences = [[HOSTILE, 0, tier, 9, 20, 5] for tier in range(4)]
    hostile = {"worker": HOSTILE, "release": HOSTILE, "device": HOSTILE, "gpu": {"name": HOSTILE, HOSTILE: 1}}
    announce(valkey, "w1.x", **hostile, sequences=sequences, kv_blocks_used=30, kv_blocks_cached=20)
    announce(valkey, "w2.x", worker="w2", unready=[HOSTILE])
    bury(valkey, HOSTILE, reason=HOSTILE)
    decide(valkey, "tiny@1", reason=HOSTILE, trouble=HOSTILE, signals={HOSTILE: 1.0})
    put(valkey, "evt_1.own", type=HOSTILE, url=f"https://x.example/{HOSTILE}")
    return submit(tenant=HOSTILE[:200], metadata={"note": HOSTILE, HOSTILE[:64]: "x"}, prompt=HOSTILE)


async def test_an_empty_system_says_that_nothing_is_wrong_and_how_to_begin(look: Look, door: Door) -> None:
    page = await look(door)
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    await expect(page.get_by_role("heading", name="Submit the first task")).to_be_visible()
    await expect(page.locator("main")).to_contain_text(f"curl {door.url}/v1/tasks")
    await expect(page.locator("#live")).to_have_text("Live")
    await page.get_by_role("link", name="try the playground").click()
    await expect(page.get_by_role("heading", name="Playground")).to_be_visible()


@pytest.mark.parametrize("path", few(PAGES, "", "workers", "dead-letters", "scaling"))
async def test_each_page_shows_what_others_wrote_as_text(look: Look, door: Door, fleet: str, path: str) -> None:
    page = await look(door, path)
    await expect(page.get_by_role("heading", level=1, name=PAGES[path])).to_be_visible()
    await expect(page.locator("#nav a[aria-current]")).to_have_text(PAGES[path])
    await expect(page.get_by_text("Reading…")).to_have_count(0)
    assert await page.evaluate("window.broken") is None
    assert await page.locator("main img, main script, main iframe").count() == 0
    assert "\u202e" not in await page.locator("main").inner_text()


async def test_names_of_dots_lead_to_no_other_endpoint(look: Look, door: Door) -> None:
    """Browsers take them for the folder above."""
    page = await look(door, "tasks/..")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for path in ("workers/%2e%2E", "tasks/.."):
        await page.goto(f"{door.url}/console#/{path}")
        await expect(page.get_by_role("alert")).to_contain_text("A name of dots alone is none.")
    assert [url for url in asked if "/v1/" in url] == []


async def test_a_workers_kv_cache_is_drawn_and_its_sequences_lead_to_their_tasks(
    look: Look, door: Door, valkey: Redis, submit: Submit
) -> None:
    task_id = submit()
    rows = [[task_id, 0, 1, 9, 20, 5], ["search", 0, 3, 9, 20, 1], ["search", 0, 3, 9, 20, 1]]
    announce(valkey, "w1.x", sequences=rows, kv_blocks_cached=40)
    page = await look(door, "workers")
    bar = page.get_by_role("img", name="KV cache: 10\u202f% used, 40\u202f% cached")
    await expect(bar).to_be_visible()
    await page.get_by_role("link", name="w1", exact=True).click()
    picture = page.get_by_role("img", name="KV cache of 100 blocks: 10\u202f% held by sequences, 40\u202f% cached")
    await expect(picture.locator(".default rect")).to_have_count(5)
    await expect(picture.locator(".other rect")).to_have_count(3)
    await expect(picture.locator(".cached rect")).to_have_count(40)
    running = page.get_by_role("region", name="Sequences").locator("tbody tr")
    announce(valkey, "w1.x", sequences=[[task_id, 0, 1, 9, 21, 5], *rows[1:]], kv_blocks_cached=40)
    await expect(running.first).to_contain_text("21")
    await expect(running).to_have_count(3)  # beams of one search, too
    await page.get_by_role("region", name="Sequences").get_by_role("link", name=task_id[:6]).click()
    await expect(page.get_by_role("heading", level=1, name="Task")).to_be_visible()


async def test_an_encoder_tells_texts_and_a_divided_model_its_processes(look: Look, door: Door, valkey: Redis) -> None:
    announce(valkey, "e.x", kind="embed", kv_blocks_total=0, kv_blocks_used=0, running=2, sequences=[])
    divided = {"tensor_parallel": 2, "pipeline_parallel": 3, "slow_rank": "the others wait for rank 4"}
    announce(valkey, "r.x", worker="w2", kind="generate", engine_process=True, adapters={"loaded": ["a1"]}, **divided)
    page = await look(door, "workers")
    await expect(page.get_by_role("row").filter(has_text="w2")).to_contain_text("cpu 6 processes")
    await page.goto(f"{door.url}/console#/workers/r.x")
    await expect(page.get_by_text("6 processes: 3 stages, 2 ranks each")).to_be_visible()
    await expect(page.get_by_text("in a process of its own")).to_be_visible()
    await expect(page.locator("main .note")).to_have_text("the others wait for rank 4")
    await page.goto(f"{door.url}/console#/workers/e.x")
    await expect(page.locator(".figure").first).to_contain_text("texts at once")
    await expect(page.get_by_role("heading", name="KV cache")).to_have_count(0)
    await expect(page.locator("main")).not_to_contain_text("earlier release")


async def test_a_task_is_followed_from_its_wait_to_its_last_token(
    look: Look, door: Door, valkey: Redis, submit: Submit
) -> None:
    task_id = submit(prompt="once", tenant="acme")
    page = await look(door)
    await page.keyboard.press("/")
    await page.keyboard.type(task_id)
    await page.keyboard.press("Enter")
    await expect(page.locator("main")).to_contain_text("What keeps it")
    await expect(page.locator(".state").first).to_have_text("queued")
    worker = FakeWorker(valkey)
    assert worker.take(QUEUE) == task_id
    worker.claim(task_id)
    worker.append(task_id, 0, ["<b>", "upon"])
    await expect(page.get_by_label("Output so far")).to_have_text("<b>upon")
    worker.append(task_id, 2, [" a time"])
    await expect(page.get_by_label("Output so far")).to_have_text("<b>upon a time")
    worker.finish(task_id, [3])
    worker.settle(task_id)
    await expect(page.locator(".state").first).to_have_text("completed")
    await expect(page.locator("pre.text")).to_have_text("<b>upon a time")
    await expect(page.get_by_role("button", name="Run again")).to_be_visible()


async def test_a_search_says_why_it_shows_no_token(look: Look, door: Door, valkey: Redis, submit: Submit) -> None:
    task_id = submit(beam_width=3)
    page = await look(door, f"tasks/{task_id}")
    output = page.locator(".card").filter(has=page.get_by_role("heading", name="Output, as it is made"))
    await expect(output).to_contain_text("Nothing yet: a beam search compares its 3 beams to the end")
    worker = FakeWorker(valkey)
    assert worker.take(QUEUE) == task_id
    worker.claim(task_id)
    await expect(page.locator("main .note")).to_contain_text("It runs on fake; a beam search compares")
    await expect(output).to_contain_text("Nothing yet: a beam search")
    worker.append(task_id, 0, ["the", " best"])
    worker.finish(task_id, [2])
    worker.settle(task_id)
    await expect(page.locator("pre.text")).to_have_text("the best")


async def test_what_became_of_what_sources_took_stands_with_batches(look: Look, door: Door, valkey: Redis) -> None:
    page = await look(door, "batches")
    await expect(page.get_by_role("region", name="What sources took")).to_have_count(0)
    valkey.hset(keys.METRICS_SOURCES, mapping={f"source_items {HOSTILE.split()[0]} refused n": 3})
    await page.reload()
    row = page.get_by_role("region", name="What sources took").locator("tbody tr")
    await expect(row).to_have_text("<img030")


async def test_what_is_refused_is_asked_for_less_and_less_often(
    look: Look, door: Door, submit: Submit, complaints: Complaints
) -> None:
    """Its pauses are noted, and a hundredth as long here."""
    page = await look(door, "tasks")
    await page.add_init_script(
        "const pauses = [], later = setTimeout;"
        "window.setTimeout = (act, ms) => {"
        "  if (ms >= 4000) document.documentElement.dataset.pauses = (pauses.push(ms), pauses.join(' '));"
        "  return later(act, ms / 100);"
        "};"
    )
    await page.goto(f"{door.url}/console#/tasks/none")
    await page.reload()
    await expect(page.get_by_role("alert")).to_contain_text("Asked again after longer and longer pauses")
    pauses = re.compile(r"^4000 8000 16000 32000 60000 60000\b")
    await expect(page.locator("html")).to_have_attribute("data-pauses", pauses)
    answered = door.http.get(f"/v1/tasks/{submit()}").json()
    await page.route(re.compile("/v1/tasks/none$"), lambda route: route.fulfill(json=answered))
    await expect(page.locator("#live")).to_have_text("Live")
    await expect(page.get_by_role("alert")).to_have_count(0)
    complaints.clear()  # Chromium tells of each 404


async def test_what_a_page_no_longer_shows_is_no_longer_asked_for(look: Look, door: Door, submit: Submit) -> None:
    task_id, answer = submit(), asyncio.Event()
    page = await look(door, "tasks")
    await page.evaluate("AbortSignal.timeout = () => new AbortController().signal")  # no answer is given up

    async def late(route: Route) -> None:
        await answer.wait()
        await route.fulfill(json={"object": "list", "data": [], "has_more": False})

    await page.route("**/v1/tasks?*status=failed*", late)

    async def go(to: str) -> None:
        await page.evaluate("to => (location.hash = to)", to)

    for then in ("tasks?status=queued", "queues"):
        async with page.expect_request(re.compile("status=failed")) as asked:
            await go("tasks?status=failed")
        request = await asked.value
        async with page.expect_event("requestfailed", lambda failed, mine=request: failed == mine):
            await go(then)
        if then != "queues":
            await expect(page.locator("main")).to_contain_text(task_id[:6])
    async with page.expect_request("**/events?from=0") as asked:
        await go(f"tasks/{task_id}")
    following = await asked.value
    async with page.expect_event("requestfailed", lambda failed: failed == following):
        await go("")
    answer.set()
    await page.unroute_all(behavior="wait")


async def test_what_changes_something_asks_once_says_what_and_is_audited(
    look: Look, door: Door, valkey: Redis, submit: Submit
) -> None:
    task_id = submit()
    page = await look(door, f"tasks/{task_id}")
    await page.get_by_role("button", name="Cancel").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text(task_id)
    await page.keyboard.press("Escape")
    assert door.http.get(f"/v1/tasks/{task_id}").json()["status"] == "queued"
    await page.get_by_role("button", name="Cancel").click()
    await dialog.get_by_role("button", name="Cancel the task").click()
    await expect(page.locator("#said")).to_have_text("It is cancelled.")
    assert door.http.get(f"/v1/tasks/{task_id}").json()["status"] == "cancelled"
    bury(valkey, "{")
    await page.keyboard.press("g")
    await page.keyboard.press("d")
    await page.get_by_role("button", name="Remove").click()
    await dialog.get_by_role("button", name="Remove it").click()
    await expect(page.locator("main")).to_contain_text("no task was given up")
    assert [did for _, did, _ in audited(door.http)] == ["dead_letter.delete"]
    put(valkey, "evt_9.own")
    decide(valkey, "tiny@1", trouble="no machine")
    await page.get_by_role("link", name="Scaling").click()
    await page.get_by_role("button", name="Try again now").click()
    await dialog.get_by_role("button", name="Try again").click()
    await expect(page.locator("#said")).to_have_text("The next try is now.")
    assert audited(door.http)[0][1:] == ("scaling.retry", "tiny@1")
    assert await asyncio.to_thread(valkey.exists, keys.SCALE_RETRIES)
    await page.get_by_role("button", name="Pin", exact=True).click()
    await expect(dialog).to_contain_text("in place of the 3 that it wants now")
    await dialog.get_by_label("Workers").fill("1")
    await dialog.get_by_role("button", name="Pin it").click()
    await expect(page.locator("#said")).to_have_text("It is pinned at 1.")
    assert audited(door.http)[0][1:] == ("scaling.pin", "tiny@1: 1")
    decide(valkey, "tiny@1", reason="1: pinned by local", pin={"workers": 1, "by": "local", "at": 1.0})
    await page.get_by_role("button", name="Unpin").click()
    await dialog.get_by_role("button", name="Unpin it").click()
    await expect(page.locator("#said")).to_have_text("The policy decides again.")


async def test_an_alias_the_split_and_a_rollout_are_changed_from_the_page(
    look: Look, door: Door, routed: Redis
) -> None:
    waiting = Rollout("tiny", "tiny=/new", OTHER.version, CARD.version, 1, time.time(), time.time())
    routed.hset(keys.ROLLOUTS, "tiny", waiting.to_json())
    page = await look(door, "models")
    dialog, said = page.get_by_role("dialog"), page.locator("#said")
    await page.get_by_role("button", name="Change an alias").click()
    await expect(dialog).to_contain_text("New tasks that name tiny@ALIAS")
    await dialog.get_by_label("Alias").fill("next")
    await dialog.get_by_label("Version").select_option(OTHER.version)
    read = asyncio.Event()

    async def slowly(route: Route) -> None:
        await read.wait()
        await route.continue_()

    await page.route("**/v1/routing", slowly)
    await dialog.get_by_role("button", name="Change the alias").click()
    await expect(said).to_have_text(f"next names {OTHER.version} now.")
    await page.get_by_role("button", name="Change the split").click()
    await dialog.get_by_label("candidate").fill("12.5")
    await dialog.get_by_role("button", name="Change the split").click()
    await expect(said).to_have_text("The split is candidate 12.5 %.")
    read.set()
    await page.get_by_role("button", name="End it").click()
    await expect(dialog).to_contain_text(f"they go on to {CARD.version}")
    await dialog.get_by_role("button", name="End it").click()
    await expect(said).to_have_text("The rollout is cancelled.")
    now = routing.read(routed, "tiny")
    assert now is not None
    assert (now.aliases["next"], now.split) == (OTHER.version, {"candidate": 12.5})
    assert [did for _, did, _ in audited(door.http)][:3] == ["rollout.abort", "model.route", "model.route"]


async def test_a_rollout_is_begun_moved_and_read_on_the_page_and_a_rule_and_the_default_are_changed(
    look: Look, door: Door, routed: Redis
) -> None:
    page = await look(door, "models")
    dialog, said = page.get_by_role("dialog"), page.locator("#said")

    async def ask(button: str, *words: str, **fields: str) -> None:
        await page.get_by_role("button", name=button, exact=True).click()
        for word in words:
            await expect(dialog).to_contain_text(word)
        for label, value in fields.items():
            await dialog.get_by_label(label.replace("_", " ")).fill(value)
        await dialog.locator("button[type=submit]").click()

    await ask("Start a rollout", f"compares it with {CARD.version}", Steps="10 50")
    await expect(said).to_have_text(f"The rollout to {OTHER.version} is preparing.")
    await ask("Next step", "gets 10\u202f% of the new tasks of tiny")
    await expect(said).to_have_text("The rollout is judging.")
    decisions = page.get_by_role("region", name="Decisions on tiny")
    await expect(decisions).to_contain_text("an operator promoted it")
    await expect(page.get_by_role("region", name="Metrics of tiny")).to_contain_text("not found worse")
    await ask("Pause it", "stays at 10\u202f%")
    await expect(said).to_have_text("The rollout is paused.")
    await ask("End it", f"they go to {CARD.version}")
    await expect(said).to_have_text("The rollout is aborted.")
    await expect(decisions).to_contain_text("an operator aborted it")
    await expect(page.get_by_role("button", name="End it")).to_have_count(0)
    await ask("Add a rule", "before the split", Which="acme")
    await expect(said).to_have_text("It has 1 rules now.")
    await ask("Change the default", f"It is {CARD.version} now")
    await expect(said).to_have_text(f"The default is {OTHER.version} now.")
    now = routing.read(routed, "tiny")
    assert now is not None
    assert ([rule.tenant for rule in now.rules], now.default) == (["acme"], OTHER.version)
    assert [did for _, did, _ in audited(door.http) if did.startswith("rollout")] == [
        f"rollout.{name}" for name in ("abort", "pause", "promote", "start")
    ]


@dataclass(frozen=True)
class Keyed:
    """A gateway that asks for keys, and two of them."""

    door: Door
    reader: str
    admin: str


@pytest.fixture
def keyed(open_door: Open, model: str, make: Make) -> Keyed:
    return Keyed(open_door(auth="keys"), make("acme", ("read",)), make("ops", ("admin",)))


async def test_a_key_is_asked_for_and_kept_in_memory_alone(look: Look, keyed: Keyed, complaints: Complaints) -> None:
    reader, admin = keyed.reader, keyed.admin
    bearer = {"authorization": f"Bearer {admin}"}
    assert keyed.door.http.post("/v1/tenants/acme/limits", json={"rpm": 7}, headers=bearer).status_code == 200
    page = await look(keyed.door)
    await page.get_by_label("API key").fill("psk_wrong")
    await page.get_by_role("button", name="Use it").click()
    await expect(page.get_by_role("dialog")).to_contain_text("does not work")
    await page.get_by_label("API key").fill(f"{reader}\u200b")
    await page.get_by_role("button", name="Use it").click()
    await expect(page.get_by_role("dialog")).to_contain_text("a character that no key has")
    await page.get_by_label("API key").fill(reader)
    await page.get_by_role("button", name="Use it").click()
    await expect(page.get_by_role("heading", level=1, name="Tasks")).to_be_visible()
    links = await page.locator("#nav a").all_inner_texts()
    assert {"Overview", "Workers", "Keys", "Dead letters", "Playground"} & set(links) == set()
    stored = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
    assert reader not in await page.evaluate(stored)
    await page.get_by_role("button", name="Key of acme").click()
    await page.get_by_label("API key").fill(admin)
    await page.get_by_role("button", name="Use it").click()
    await page.get_by_role("link", name="Keys").click()
    await expect(page.get_by_role("region", name="Limits of tenants")).to_contain_text("7 requests/min")
    row = page.get_by_role("row").filter(has_text=reader.split("_")[1])
    await row.get_by_role("button", name="Revoke").click()
    await expect(page.get_by_role("dialog")).to_contain_text("cannot be undone")
    await page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    await expect(row.locator(".state")).to_have_text("revoked")
    await page.reload()
    await expect(page.get_by_label("API key")).to_be_visible()
    complaints.clear()  # Chromium tells of each 401


async def test_a_gateway_that_is_away_makes_the_page_stale_and_it_goes_on_by_itself(
    look: Look, door: Door, submit: Submit, complaints: Complaints
) -> None:
    submit()
    page = await look(door, "tasks")
    await expect(page.locator("tbody tr")).to_have_count(1)
    await page.context.set_offline(True)
    await expect(page.locator("main")).to_contain_text("Not up to date.")
    await expect(page.locator("#live")).to_contain_text("Stale for")
    await expect(page.locator("tbody tr")).to_have_count(1)
    submit()
    await page.context.set_offline(False)
    await expect(page.locator("tbody tr")).to_have_count(2)
    await expect(page.locator("#live")).to_have_text("Live")
    complaints.clear()  # Chromium tells of each request that failed


@pytest.mark.exhaustive
async def test_a_gateway_that_is_started_again_goes_on_with_the_page_that_is_open(
    look: Look, open_door: Open, model: str, valkey: Redis, complaints: Complaints
) -> None:
    announce(valkey)
    door = open_door()
    page = await look(door)
    await expect(page.locator(".fleet li")).to_have_count(1)
    await asyncio.to_thread(door.close)
    await expect(page.locator("main")).to_contain_text("Not up to date.")
    await expect(page.locator(".fleet li")).to_have_count(1)
    announce(valkey, "w2.x", worker=f"{'of-a-machine-with-a-long-name' * 3}-w2")
    open_door(port=door.port)
    await expect(page.locator(".fleet li")).to_have_count(2)
    long = page.locator(".fleet li > :first-child", has_text="machine")
    tile, name = await long.bounding_box(), await long.locator("bdi").bounding_box()
    assert tile
    assert name
    assert name["x"] < tile["x"], "its beginning is cut"
    assert name["x"] + name["width"] == pytest.approx(tile["x"] + tile["width"], abs=1), "its end is not"
    await expect(page.locator("#live")).to_have_text("Live")
    await page.context.close()
    complaints.clear()  # Chromium tells of each request that failed


@pytest.mark.exhaustive
async def test_a_store_that_is_away_is_said_with_what_was_read_before_until_it_is_back(
    look: Look, open_door: Open, model: str, valkey: Redis, proxy: Proxy, complaints: Complaints
) -> None:
    announce(valkey)
    page = await look(open_door(store=proxy.url, broker=proxy.url), "workers")
    await expect(page.locator("tbody tr")).to_have_count(1)
    proxy.fail(b"", "before", times=10**9)
    proxy.cut()
    await expect(page.locator("main")).to_contain_text("Not up to date.")
    await expect(page.locator("main")).to_contain_text("What is below was read")
    await expect(page.locator("tbody tr")).to_have_count(1)
    announce(valkey, "w2.x", worker="w2")
    proxy.heal()
    await expect(page.locator("tbody tr")).to_have_count(2)
    await expect(page.locator("#live")).to_have_text("Live")
    complaints.clear()  # Chromium tells of each 503


@pytest.mark.exhaustive
async def test_lines_of_a_megabyte_are_cut_and_make_no_page_wide(
    look: Look, door: Door, valkey: Redis, submit: Submit
) -> None:
    line = "W\u202e" * (1 << 19)
    task_id = submit()
    worker = FakeWorker(valkey)
    assert worker.take(QUEUE) == task_id
    worker.claim(task_id)
    worker.append(task_id, 0, [line])
    worker.finish(task_id, [1])
    worker.settle(task_id)
    bury(valkey, line, reason=line)
    for path in (f"tasks/{task_id}", "dead-letters"):
        page = await look(door, path, viewport={"width": 390, "height": 844})
        if path == "dead-letters":
            await page.locator("tbody a").first.click()
        await expect(page.locator("pre.text")).to_contain_text("W⟨U+202E⟩W")
        assert len(await page.locator("main").inner_text()) < 400_000
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        await page.context.close()


async def test_a_gateway_that_begins_anew_cuts_no_line_of_an_open_page(look: Look, door: Door, valkey: Redis) -> None:
    """So does another gateway behind the same address, which began later. What comes does so as events: the page has no
    answer to what it asks."""
    announce(valkey)
    samples, now = door.app.state.gateway.samples, door.http.get("/v1/overview").json()["at"]
    before = list(samples.points)
    samples.points.clear()
    point = Point(now, 3, 2, 64, 0, 0, 0, (0,), (0,))
    samples.points.extend(replace(point, at=now - 300 + 10 * number) for number in range(25))
    page = await look(door)
    axis = page.locator(".axis").first
    await expect(axis).to_contain_text(re.compile("[45]\u202fmin"))
    await expect(page.locator(".fleet li")).to_have_count(1)
    await page.route(re.compile(r"/v1/(overview|fleet)(\?|$)"), lambda route: route.abort())
    samples.points.clear()
    samples.points.append(replace(point, at=now))
    for count in (2, 3):
        announce(valkey, f"w{count}.x", worker=f"w{count}")
        await expect(page.locator(".fleet li")).to_have_count(count)
    await expect(axis).to_contain_text(re.compile("[45]\u202fmin"))
    samples.points.clear()
    samples.points.extend(before)


async def test_clocks_that_differ_change_no_age(look: Look, door: Door, valkey: Redis, submit: Submit) -> None:
    """A reader's clock that is an hour late makes a task that has just begun to wait no hour old."""
    task_id = submit()
    announce(valkey)
    page = await look(door, "workers")
    await expect(page.locator("tbody tr")).to_have_count(1)
    await page.clock.install(time=time.time() - 3600)
    await page.goto(f"{door.url}/console#/queues")
    await page.reload()
    await page.get_by_role("link", name="Tasks", exact=True).first.click()
    row = page.get_by_role("row").filter(has_text=task_id[:6])
    await expect(row).to_contain_text("queued")
    assert not re.search(r"\d\s(h|min)\b", await row.inner_text())


async def test_an_earlier_release_behind_the_same_address_is_told_and_not_stumbled_over(
    look: Look, door: Door, complaints: Complaints
) -> None:
    page = await look(door, "models")
    await expect(page.get_by_role("heading", name="Rollouts")).to_be_visible()
    for path in ("scaling/decisions", "rollouts", "overview"):
        await page.route(f"**/v1/{path}*", lambda route: route.fulfill(status=404, json={"error": NOT_FOUND}))
    await page.reload()
    await expect(page.get_by_role("heading", name="Rollouts")).to_have_count(0)
    await expect(page.get_by_role("heading", name="tiny", exact=True)).to_be_visible()
    await page.get_by_role("link", name="Scaling").click()
    await expect(page.locator("main")).to_contain_text("earlier release")
    complaints.clear()  # Chromium tells of each 404


async def test_the_playground_streams_a_chat(look: Look, door: Door, answering: Answering) -> None:
    answering.scripts = [says("Hel", "lo <i>", "there</i>")]
    page = await look(door, "playground")
    await expect(page.get_by_label("Model")).to_have_value("tiny")
    await page.get_by_label("Message", exact=True).press_sequentially("Write f.")
    await page.keyboard.press("Tab")
    await expect(page.get_by_label("Message", exact=True)).not_to_be_focused()
    await page.get_by_label("Message", exact=True).press("Control+Enter")
    await expect(page.locator(".talk .assistant")).to_have_text("Hello <i>there</i>")
    await expect(page.get_by_role("status").filter(has_text="tokens")).to_contain_text("first token after")
    assert answering.records[0].task["max_tokens"] == 300


async def test_the_playground_shows_reasoning_apart_and_makes_json_and_vectors(
    look: Look, door: Door, answering: Answering
) -> None:
    deltas = [{"reasoning_content": "<b>Hm"}, {"reasoning_content": ", a fox."}, {"content": "A fox"}]
    chunks = [json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) for delta in deltas]
    body = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
    page = await look(door, "playground")
    await page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    await page.get_by_label("Message", exact=True).fill("Who?")
    await page.keyboard.press("Control+Enter")
    await expect(page.locator(".talk .assistant")).to_have_text("A fox")
    thoughts = page.locator(".talk details")
    await expect(thoughts.locator("pre")).to_be_hidden()
    await thoughts.locator("summary").click()
    await expect(thoughts.locator("pre")).to_have_text("<b>Hm, a fox.")
    await expect(page.locator(".code pre")).to_contain_text('"content": "A fox"')
    await expect(page.locator(".code pre")).not_to_contain_text("Hm")
    await page.unroute("**/v1/chat/completions")
    answering.scripts = [says('{"a"', ": 1}")]
    await page.get_by_role("link", name="Structured output").click()
    await page.get_by_label("JSON schema").fill('{"type": "object"}')
    await expect(page.locator(".code pre")).to_contain_text('"json_schema"')
    await page.get_by_label("Message", exact=True).fill("Say it.")
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator(".talk .assistant")).to_have_text('{"a": 1}')
    vectors = {"data": [{"embedding": [1, 0]}, {"embedding": [1, 1]}], "usage": {"prompt_tokens": 7}}
    await page.route("**/v1/embeddings", lambda route: route.fulfill(json=vectors))
    await page.get_by_role("link", name="Embeddings").click()
    await page.get_by_label("Texts, one a line").fill("one\ntwo")
    await page.get_by_role("button", name="Make vectors").click()
    await expect(page.get_by_role("region", name="Similarities")).to_contain_text("0.707")


async def test_what_is_selected_and_focused_stays_while_the_page_goes_on(
    look: Look, door: Door, valkey: Redis, submit: Submit
) -> None:
    submit()
    page = await look(door, "tasks")
    await page.get_by_label("Model").fill("ti")
    await expect(page.locator("tbody tr")).to_have_count(1)
    submit()
    await expect(page.locator("tbody tr")).to_have_count(2)
    await expect(page.get_by_label("Model")).to_have_value("ti")
    await expect(page.get_by_label("Model")).to_be_focused()


@pytest.mark.exhaustive
async def test_a_thousand_sequences_on_a_hundred_workers_are_drawn_in_a_fraction_of_the_time(
    look: Look, door: Door, valkey: Redis
) -> None:
    """By the browser's own account of what its main thread worked, which waits for nothing."""
    for number in range(100):
        announce(valkey, f"w{number}.x", worker=f"w{number}", running=10)
    page = await look(door, "workers")
    await expect(page.locator("tbody tr")).to_have_count(100)
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable")

    async def worked() -> tuple[float, float]:
        metrics = (await session.send("Performance.getMetrics"))["metrics"]
        values = {metric["name"]: metric["value"] for metric in metrics}
        return values["Timestamp"], values["LayoutCount"]

    began, layouts = await worked()
    announce(valkey, "late.x", worker="late")  # it comes with the next reading but one
    await expect(page.locator("tbody tr")).to_have_count(101)
    ended, later = await worked()
    # A page that goes on lays out a few times for each answer, not once for each worker.
    assert later - layouts < 20 * max(1.0, ended - began)


#: Of a desk, a phone and a wall.
LOOKS = (("light", 1280), ("dark", 390), ("light", 390), ("dark", 2560))
SCHEMES = [(path, scheme, width) for path in PAGES for scheme, width in LOOKS]


@pytest.mark.parametrize(
    ("path", "scheme", "width"), few(SCHEMES, ("", "light", 1280), ("tasks", "dark", 390), ("workers", "light", 1280))
)
async def test_axe_finds_nothing_and_nothing_is_wider_than_the_screen(
    browser: Browser, door: Door, fleet: str, path: str, scheme: str, width: int
) -> None:
    """Also a task's page. Scripts of others are let in here alone, for axe."""
    viewport = {"width": width, "height": 844}
    async with await browser.new_context(viewport=viewport, color_scheme=scheme, bypass_csp=True) as context:  # type: ignore[arg-type]
        for where in (path, *{"tasks": [f"tasks/{fleet}"], "workers": ["workers/w1.x"]}.get(path, [])):
            page = await context.new_page()
            await page.goto(f"{door.url}/console#/{where}")
            await expect(page.locator("main .card").first).to_be_visible()
            await page.evaluate(AXE_FILE_PATH.read_text())
            found = await page.evaluate("axe.run().then(({violations}) => violations)")
            assert [(rule["id"], [node["target"] for node in rule["nodes"]][:5]) for rule in found] == []
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            await page.close()


@pytest.mark.exhaustive
async def test_who_asks_for_no_motion_and_uses_no_mouse_reaches_every_page(look: Look, door: Door) -> None:
    page = await look(door, reduced_motion="reduce")
    await expect(page.get_by_role("heading", level=1, name="Overview")).to_be_visible()
    for letter, path in zip("qwmtdsbhukp", list(PAGES)[1:], strict=True):
        await page.keyboard.press("g")
        await page.keyboard.press(letter)
        await expect(page.get_by_role("heading", level=1, name=PAGES[path])).to_be_visible()
