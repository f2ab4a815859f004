"""Measures what API keys cost a submit over HTTP: `python -m tests.bench.keys`.

Two gateways in one process, on one Valkey, take the same task of one tenant: one asks for keys, one does not. A client
process sends each a block of tasks by turns, over as many connections as `--connections` says. A figure is the median
of all blocks; a cost is the median of the differences between two blocks, one after the other.
With `--limits` the key has every limit that is counted. With `--bounds` the gateway with keys also has the usual bounds
on what waits, and the other has none; `--without-keys`: neither asks for keys.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing as mp
import socket
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from typing import Any

import uvicorn
import uvloop
from redis.asyncio import Redis

from producers.admin import keys
from producers.gateway import GatewaySettings, create_app
from producers.gateway.server import configured
from producers.store.access.api_keys import COUNTED
from producers.store.access.audit import Actor
from tests.processes import valkey
from tests.producers.gateway.conftest import publish
from workers.trials.bench.connection import Connections

TENANT = "bench"
#: Settings of a gateway without bounds.
UNBOUNDED: dict[str, Any] = {"max_queued": 0, "max_queued_per_tenant": 0, "max_queued_in_all": 0}
TASK = {"model": "tiny", "tenant": TENANT, "prompt": list(range(100)), "max_tokens": 64}
#: Tasks of a block, and blocks of each gateway that are not counted: the first ones are slower.
BLOCK, SLOWER = 64, 4


class Client:
    """One gateway as its clients meet it. `headers`: of each request."""

    def __init__(self, port: int, connections: int, **headers: str) -> None:
        self._http = Connections(f"http://127.0.0.1:{port}", headers)
        self._at_a_time = connections

    async def block(self) -> tuple[float, float]:
        """Submit a block of tasks. Returns the gateway's processor time of each (ms), and the median wait (ms)."""
        before, waits = await self._used(), list[float]()
        await asyncio.gather(*(self._submit(waits) for _ in range(self._at_a_time)))
        return 1000 * (await self._used() - before) / len(waits), 1000 * statistics.median(waits)

    async def _submit(self, waits: list[float]) -> None:
        for _ in range(BLOCK // self._at_a_time):
            began = time.perf_counter()
            async with self._http.request("POST", "/v1/tasks", TASK) as answer:
                said = await answer.whole()
            waits.append(time.perf_counter() - began)
            if answer.status != 202:
                raise SystemExit(f"{answer.status}: {said!r}")

    async def _used(self) -> float:
        async with self._http.request("GET", "/used") as answer:
            return float(await answer.whole())


def turns(ports: list[int], key: str, tasks: int, connections: int, done: Any) -> None:
    """A process that gives what `Client.block` does of both gateways, block by block."""
    done.put(asyncio.run(_turns(ports, key, tasks, connections)))


async def _turns(ports: list[int], key: str, tasks: int, connections: int) -> list[list[tuple[float, float]]]:
    clients = Client(ports[0], connections), Client(ports[1], connections, Authorization=f"Bearer {key}")
    found: list[list[tuple[float, float]]] = [[], []]
    for number in range(max(1, tasks // BLOCK) + SLOWER):
        for which in (0, 1) if number % 2 else (1, 0):
            found[which].append(await clients[which].block())
    return [blocks[SLOWER:] for blocks in found]


async def used() -> float:
    """Processor time of the thread that serves, seconds."""
    return time.thread_time()


async def measure(url: str, folder: str, asked: argparse.Namespace) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        ports = []
        asks, bounds = "none" if asked.without_keys else "keys", {} if asked.bounds else UNBOUNDED
        for more in ({"auth": "none", **UNBOUNDED}, {"auth": asks, **bounds}):
            settings = GatewaySettings(url, url, sweep=False, files_dir=folder, **more)
            ports.append(await _served(settings, stack))
        store = await stack.enter_async_context(Redis.from_url(url))
        plenty = {
            name: keys.MAX_LIMIT for name in COUNTED if asked.limits and name != "budget_money"
        }  # which needs prices
        _, key = await keys.create(store, {"tenant": TENANT, **plenty}, Actor("bench"))
        return figures(*await asyncio.to_thread(_in_turns, ports, key, asked.tasks, asked.connections))


async def _served(settings: GatewaySettings, stack: AsyncExitStack) -> int:
    """Serve a gateway on a port until the stack is left."""
    app, listener = create_app(settings), socket.create_server(("127.0.0.1", 0))
    app.add_api_route("/used", used)
    server = uvicorn.Server(configured(app, settings))
    serving = asyncio.create_task(server.serve([listener]))
    stack.push_async_callback(asyncio.wait_for, serving, 60)
    stack.callback(setattr, server, "should_exit", True)
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    return int(listener.getsockname()[1])


def _in_turns(ports: list[int], key: str, tasks: int, connections: int) -> list[list[tuple[float, float]]]:
    spawn = mp.get_context("spawn")
    done = spawn.Queue()
    # By its module's name, which is another one than `__main__` wherever it is run.
    process = spawn.Process(
        target=importlib.import_module("tests.bench.keys").turns, args=(ports, key, tasks, connections, done)
    )
    process.start()
    found: list[list[tuple[float, float]]] = done.get(timeout=600)
    process.join()
    return found


def figures(none: list[tuple[float, float]], keyed: list[tuple[float, float]]) -> dict[str, float]:
    """The medians of all blocks, and of the differences."""
    found: dict[str, float] = {}
    for place, name in enumerate(("cpu_ms", "p50_ms")):
        found[f"none_{name}"] = statistics.median(one[place] for one in none)
        found[f"keys_{name}"] = statistics.median(one[place] for one in keyed)
        pairs = zip(none, keyed, strict=True)
        found[f"cost_{name}"] = statistics.median(two[place] - one[place] for one, two in pairs)
    return found | {"cost_share": found["cost_cpu_ms"] / found["none_cpu_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=16, help="requests at a time (default 16)")
    parser.add_argument("--limits", action="store_true", help="give the key limits, too high to be reached")
    parser.add_argument("--bounds", action="store_true", help="measure the bounds on what waits, too")
    parser.add_argument("--without-keys", action="store_true", help="ask for no keys in either")
    asked = parser.parse_args()
    with valkey() as (url, redis), tempfile.TemporaryDirectory() as folder:
        publish(redis)
        print(json.dumps(uvloop.run(measure(url, folder, asked))))


if __name__ == "__main__":
    main()
