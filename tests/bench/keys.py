"""What API keys cost a submit: `python -m tests.bench.keys`.

Gateway processes on one Valkey take the same tasks of one tenant in turns: one asks for keys, two do not. A client
process POSTs them, by 16 connections for rates, and by one for the time of a request. Rates are by the clock, and by
the gateway's processor time. Costs are medians over the rounds, each of which compares one turn of either; `noise` is
what the second gateway without keys "costs" beside the first.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing as mp
import statistics
import threading
import time
from typing import Any

from redis.asyncio import Redis

from producers.admin import keys
from producers.store.audit import Actor
from tests.bench.gateways import cpu_s, gateway
from tests.bench.submits import BODY
from tests.processes import valkey

CONNECTIONS = 16
TENANT = "bench"


def post(port: int, headers: dict[str, str], requests: int, connections: int, done: Any) -> None:
    """A process that sends the requests, and gives the seconds that all took, and each of them."""
    each: list[float] = []

    def some() -> None:
        link = http.client.HTTPConnection("127.0.0.1", port)
        for _ in range(requests // connections):
            began = time.perf_counter()
            link.request("POST", "/v1/tasks", BODY, headers)
            reply = link.getresponse()
            said = reply.read()
            each.append(time.perf_counter() - began)
            if reply.status != 202:
                raise SystemExit(f"{reply.status}: {said!r}")

    threads = [threading.Thread(target=some) for _ in range(connections)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.put((time.perf_counter() - began, each))


def posted(port: int, headers: dict[str, str], requests: int, connections: int) -> tuple[float, list[float]]:
    spawn = mp.get_context("spawn")
    done = spawn.Queue()
    process = spawn.Process(target=post, args=(port, headers, requests, connections, done))
    process.start()
    told: tuple[float, list[float]] = done.get(timeout=600)
    process.join()
    if len(told[1]) != requests:
        raise SystemExit(f"{requests - len(told[1])} of {requests} requests failed")
    return told


def turn(port: int, pid: int, headers: dict[str, str], tasks: int) -> dict[str, float]:
    """One gateway's figures, as `python -m tests.bench.keys` names them."""
    headers = {"content-type": "application/json", **headers}
    before = cpu_s(pid)
    seconds, _ = posted(port, headers, tasks, CONNECTIONS)
    used = cpu_s(pid) - before
    _, each = posted(port, headers, tasks // CONNECTIONS, 1)
    return {"per_s": tasks / seconds, "per_cpu_s": tasks / max(used, 0.01), "p50_ms": 1000 * statistics.median(each)}


async def made(url: str) -> str:
    async with Redis.from_url(url) as store:
        return (await keys.create(store, {"tenant": TENANT}, Actor("bench")))[1]


def measure(tasks: int, rounds: int) -> dict[str, Any]:
    tasks -= tasks % CONNECTIONS
    turns: dict[str, list[dict[str, float]]] = {"none": [], "same": [], "keys": []}
    plain = {"penstock-tenant": TENANT}
    with valkey() as (url, redis), gateway(url) as one, gateway(url) as two, gateway(url, "--auth", "keys") as keyed:
        header = {"authorization": f"Bearer {asyncio.run(made(url))}"}
        doors = {"none": (*one, plain), "keys": (*keyed, header), "same": (*two, plain)}
        for door in doors.values():  # the first requests of a gateway are slower
            posted(door[0], {"content-type": "application/json", **door[2]}, CONNECTIONS, CONNECTIONS)
        for number in range(rounds):
            for name in list(doors)[:: 1 if number % 2 else -1]:
                turns[name].append(turn(*doors[name], tasks))
        assert redis.dbsize() > tasks, "every task has a record"
    figures: dict[str, Any] = {"tasks": tasks, "rounds": rounds}
    for name, found in turns.items():
        figures |= {f"{name}_{figure}": statistics.median(one[figure] for one in found) for figure in found[0]}
    return figures | _costs("cost", turns["keys"], turns["none"]) | _costs("noise", turns["same"], turns["none"])


def _costs(name: str, turns: list[dict[str, float]], others: list[dict[str, float]]) -> dict[str, float]:
    """The shares of its rate that one lacks beside another, and the further time of a request."""
    pairs = list(zip(turns, others, strict=True))
    lost = {
        f"{name}_{figure}": 1 - statistics.median(one[figure] / two[figure] for one, two in pairs)
        for figure in ("per_s", "per_cpu_s")
    }
    return lost | {f"{name}_p50_ms": statistics.median(one["p50_ms"] - two["p50_ms"] for one, two in pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=3200)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    print(json.dumps(measure(asked.tasks, asked.rounds)))


if __name__ == "__main__":
    main()
