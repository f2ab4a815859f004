"""Measures what open consoles cost: `python -m tests.bench.consoles`.

Some workers' leases say that each generates ten sequences. Consoles follow the overview's events, or with `--ask` ask
for it every two seconds; what gateway and store use of a core with them, less what they use without, is theirs. With
`--browser`
Chromium shows the workers, and tells what its page's main thread worked (Chrome DevTools Protocol, Performance). It
also visits the overview for the first time, several times with nothing kept, and tells when it first painted something
and when the tiles stood there, by its own clock from the start of the visit, and what it loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from statistics import median
from typing import Any

import httpx
from playwright.async_api import Browser, async_playwright
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.bench.gateways import cpu_s, gateway
from tests.processes import valkey
from tests.producers.gateway.conftest import POOL, publish
from tests.producers.gateway.console.conftest import FLAGS, chromium
from tests.producers.gateway.test_metrics import LEASE

#: Seconds between two questions of a page.
EVERY_S = 2.0
#: First visits.
VISITS = 9
ASKED = ("/v1/overview", "/v1/fleet?max_age=2")


def announce(store: Redis, workers: int) -> None:
    """Leases of workers that last for an hour."""
    publish(store)
    lease: dict[str, Any] = {**LEASE, "version": POOL.version, "running": 10}
    with store.pipeline() as pipe:
        for number in range(workers):
            pipe.hset(broker_keys.INCARNATIONS, f"w{number}.x", POOL.queue)
            pipe.set(keys.lease(f"w{number}.x"), json.dumps({**lease, "worker": f"w{number}"}), px=3_600_000)
        pipe.execute()


def used(pid: int, store: Redis) -> tuple[float, float]:
    """Processor time (s) of gateway and store."""
    info = store.info("cpu")
    return cpu_s(pid), info["used_cpu_user"] + info["used_cpu_sys"]


def shares(pid: int, store: Redis, seconds: float) -> list[float]:
    """Shares of a core that gateway and store use."""
    before, began = used(pid, store), time.monotonic()
    time.sleep(seconds)
    after, took = used(pid, store), time.monotonic() - began
    return [(late - early) / took for early, late in zip(before, after, strict=True)]


def looking(url: str, ended: threading.Event, ask: bool) -> None:
    """One console."""
    with httpx.Client(base_url=url, timeout=60) as http:
        if not ask:
            with http.stream("GET", "/v1/overview/events") as answer:
                answer.raise_for_status()
                for _ in answer.iter_raw():
                    if ended.is_set():
                        return
        while not ended.wait(EVERY_S):
            for path in ASKED:
                http.get(path).raise_for_status()


async def visited(browser: Browser, url: str) -> tuple[float, float, int]:
    """Milliseconds until the first paint and until the overview's tiles, and bytes loaded, of a first visit."""
    context = await browser.new_context(viewport={"width": 1440, "height": 900})
    page = await context.new_page()
    await page.goto(f"{url}/console")
    await page.wait_for_selector(".tile")
    drawn = float(await page.evaluate("performance.now()"))
    painted = float(await page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    sizes = "performance.getEntries().filter((entry) => entry.name.includes('/console'))"
    loaded = int(await page.evaluate(f"{sizes}.reduce((sum, entry) => sum + (entry.transferSize ?? 0), 0)"))
    await context.close()
    return painted, drawn, loaded


async def browsing(url: str, seconds: float) -> float:
    """The share of a core that the main thread of the workers' page works; prints what first visits took."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        visits = [await visited(browser, url) for _ in range(VISITS)]
        for name, times in (("first paint", [visit[0] for visit in visits]), ("tiles", [visit[1] for visit in visits])):
            print(f"first visit, {name}: median {median(times):.0f} ms, worst of {VISITS} {max(times):.0f} ms")
        print(f"first visit: {max(visit[2] for visit in visits) / 1000:.0f} KB loaded")
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        await page.goto(f"{url}/console#/workers")
        await page.wait_for_selector("tbody tr")
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable")

        async def worked() -> float:
            metrics = (await session.send("Performance.getMetrics"))["metrics"]
            return float({metric["name"]: metric["value"] for metric in metrics}["TaskDuration"])

        before, began = await worked(), time.monotonic()
        await asyncio.sleep(seconds)
        share = (await worked() - before) / (time.monotonic() - began)
        await browser.close()
        return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--consoles", type=int, default=20)
    parser.add_argument("--workers", type=int, default=100, help="workers with ten sequences each")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("--ask", action="store_true", help="consoles ask, as of an earlier release")
    parser.add_argument("--browser", action="store_true", help="what Chromium works to show the workers, too")
    options = parser.parse_args()
    with valkey() as (url, store), gateway(url) as (port, pid):
        announce(store, options.workers)
        address = f"http://127.0.0.1:{port}"
        alone = shares(pid, store, options.seconds)
        ended = threading.Event()
        consoles = [
            threading.Thread(target=looking, args=(address, ended, options.ask)) for _ in range(options.consoles)
        ]
        for console in consoles:
            console.start()
        time.sleep(EVERY_S)
        watched = shares(pid, store, options.seconds)
        ended.set()
        for console in consoles:
            console.join(60)
        print(f"{options.consoles} consoles, {options.workers} workers, {10 * options.workers} sequences")
        for name, before, after in zip(("gateway", "store"), alone, watched, strict=True):
            print(f"{name}: {after - before:.2%} of a core ({before:.2%} without consoles)")
        if options.browser:
            print(f"a page with all workers: {asyncio.run(browsing(address, options.seconds)):.2%} of a core")


if __name__ == "__main__":
    main()
