"""How many tasks a second one gateway process takes: `python -m tests.bench.submits`.

A real Valkey and a gateway process, to which several connections POST tasks of token ids, one after the other each. In
the same run: the same requests to a bare FastAPI application that parses the JSON and answers it, and the same number
of Celery's `apply_async` to the same server. Rates are by the clock, and by the processor time of the process that
serves (of this one, for Celery); the client is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing as mp
import time
from typing import Any

from celery import Celery
from fastapi import FastAPI, Request, Response

from tests.bench.gateways import cpu_s, gateway, serving
from tests.processes import free_port, valkey
from workers.trials.bench.connection import Connections

TASK = {"model": "stub", "prompt": list(range(100)), "max_tokens": 64}
CONNECTIONS = 16

echo = FastAPI()


@echo.get("/readyz")
async def ready() -> dict[str, str]:
    return {}


@echo.post("/v1/tasks")
async def answer(request: Request) -> Response:
    return Response(json.dumps(await request.json()), 202, media_type="application/json")


def post(port: int, requests: int, done: Any) -> None:
    """A process that sends the requests, and gives the seconds that all took."""
    began = time.monotonic()
    asyncio.run(_post(Connections(f"http://127.0.0.1:{port}"), requests // CONNECTIONS))
    done.put(time.monotonic() - began)


async def _post(connections: Connections, requests: int) -> None:
    async def some() -> None:
        for _ in range(requests):
            async with connections.request("POST", "/v1/tasks", TASK) as answer:
                said = await answer.whole()
            if answer.status != 202:
                raise SystemExit(f"{answer.status}: {said!r}")

    await asyncio.gather(*(some() for _ in range(CONNECTIONS)))


def rates(port: int, pid: int, requests: int) -> tuple[float, float]:
    """Requests a second by the clock, and by the process's processor time."""
    _posted(port, CONNECTIONS)
    before = cpu_s(pid)
    seconds = _posted(port, requests)
    return requests / seconds, requests / (cpu_s(pid) - before)


def _posted(port: int, requests: int) -> float:
    spawn = mp.get_context("spawn")
    done = spawn.Queue()
    # By its module's name, which is another one than `__main__` wherever it is run.
    process = spawn.Process(target=importlib.import_module("tests.bench.submits").post, args=(port, requests, done))
    process.start()
    seconds: float = done.get(timeout=600)
    process.join()
    return seconds


def celery(url: str, tasks: int) -> tuple[float, float]:
    """Messages a second that Celery sends, with the task in them."""
    app = Celery(broker=url)
    with app.producer_pool.acquire(block=True) as producer:
        app.send_task("bench", kwargs=TASK, queue="bench", producer=producer, ignore_result=True)
        began, before = time.monotonic(), time.process_time()
        for _ in range(tasks):
            app.send_task("bench", kwargs=TASK, queue="bench", producer=producer, ignore_result=True)
        return tasks / (time.monotonic() - began), tasks / (time.process_time() - before)


def measure(tasks: int) -> dict[str, float]:
    tasks -= tasks % CONNECTIONS
    with valkey() as (url, _):
        with gateway(url) as (port, pid):
            penstock = rates(port, pid, tasks)
        port = free_port()
        with serving("-m", "uvicorn", "tests.bench.submits:echo", "--no-access-log", port=port) as process:
            bare = rates(port, process.pid, tasks)
        plain = celery(url, tasks)
    pairs = {"gateway": penstock, "echo": bare, "celery": plain}
    return {"tasks": tasks} | {
        f"{name}_per_{unit}": rate
        for name, two in pairs.items()
        for unit, rate in zip(("s", "cpu_s"), two, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=4800)
    print(json.dumps(measure(parser.parse_args().tasks)))


if __name__ == "__main__":
    main()
