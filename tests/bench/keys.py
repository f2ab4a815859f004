"""What API keys cost a submit: `python -m tests.bench.keys`.

Two gateways in one process, on one Valkey, take the same task of one tenant by turns: one asks for keys, one does not.
They are called as a server calls them, without sockets and beside nothing else, so that a difference of microseconds
shows. Times are medians over all submits; costs are medians of the differences, submit by submit.
With `--limits` the key has every limit that is counted. With `--bounds` the gateway with keys also has the usual bounds
on what waits, and the other has none; `--without-keys`: neither asks for keys.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from typing import Any

from fastapi import FastAPI
from redis.asyncio import Redis

from producers.admin import keys
from producers.gateway import GatewaySettings, create_app
from producers.store.access.audit import Actor
from producers.store.access.principal import COUNTED
from tests.processes import valkey
from tests.producers.gateway.conftest import publish

TENANT = "bench"
#: Settings of a gateway without bounds.
UNBOUNDED: dict[str, Any] = {"max_queued": 0, "max_queued_per_tenant": 0, "max_queued_in_all": 0}
BODY = json.dumps({"model": "tiny", "tenant": TENANT, "prompt": list(range(100)), "max_tokens": 64}).encode()


async def submit(app: FastAPI, *key: tuple[bytes, bytes]) -> tuple[float, float]:
    """Submit a task. Returns milliseconds by the clock, and of processor time."""
    said: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": BODY}

    async def send(message: Any) -> None:
        said.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY)), *key]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    scope |= {"path": "/v1/tasks", "raw_path": b"/v1/tasks", "query_string": b"", "root_path": "", "headers": headers}
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "state": {}}
    began, used = time.perf_counter(), time.thread_time()
    await app(scope, receive, send)
    taken = 1000 * (time.perf_counter() - began), 1000 * (time.thread_time() - used)
    if said[0]["status"] != 202:
        raise SystemExit(f"{said}")
    return taken


async def measure(url: str, folder: str, tasks: int, limits: bool, bounds: bool, asks: str) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        apps = []
        for more in ({"auth": "none", **UNBOUNDED}, {"auth": asks, **({} if bounds else UNBOUNDED)}):
            app = create_app(GatewaySettings(url, url, sweep=False, files_dir=folder, **more))
            await stack.enter_async_context(app.router.lifespan_context(app))
            apps.append(app)
        store = await stack.enter_async_context(Redis.from_url(url))
        plenty = {name: keys.MOST for name in COUNTED if limits and name != "budget_money"}  # which needs prices
        _, key = await keys.create(store, {"tenant": TENANT, **plenty}, Actor("bench"))
        ways = [(), ((b"authorization", f"Bearer {key}".encode()),) if asks == "keys" else ()]
        times: list[list[tuple[float, float]]] = [[], []]
        for number in range(tasks + 100):  # the first ones are slower
            for which in (0, 1) if number % 2 else (1, 0):
                times[which].append(await submit(apps[which], *ways[which]))
    none, keyed = (found[100:] for found in times)
    figures: dict[str, float] = {"tasks": tasks}
    for place, name in enumerate(("p50_ms", "cpu_ms")):
        figures[f"none_{name}"] = statistics.median(one[place] for one in none)
        figures[f"keys_{name}"] = statistics.median(one[place] for one in keyed)
        pairs = zip(none, keyed, strict=True)
        figures[f"cost_{name}"] = statistics.median(two[place] - one[place] for one, two in pairs)
    return figures | {"cost_share": figures["cost_cpu_ms"] / figures["none_cpu_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--limits", action="store_true", help="give the key limits, too high to be reached")
    parser.add_argument("--bounds", action="store_true", help="measure the bounds on what waits, too")
    parser.add_argument("--without-keys", action="store_true", help="ask for no keys in either")
    asked = parser.parse_args()
    asks = "none" if asked.without_keys else "keys"
    with valkey() as (url, redis), tempfile.TemporaryDirectory() as folder:
        publish(redis)
        print(json.dumps(asyncio.run(measure(url, folder, asked.tasks, asked.limits, asked.bounds, asks))))


if __name__ == "__main__":
    main()
