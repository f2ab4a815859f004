"""What a full store costs running streams: `python -m tests.bench.full_store`.

A Valkey with `maxmemory`, a worker with the stub engine, and default-tier streams that one process reads, in three
rounds: alone; beside batch work of clients, whom ADMIT refuses; beside batch work of plain Celery senders, whom only
the server refuses once it is full. Printed are the longest gap between two tokens of a stream, and of the senders how
many tasks were accepted, how many refused, and how long the slowest refusal took. At the end the store gets room, and
all that was accepted has to end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass

from kombu.exceptions import OperationalError
from redis import Redis

from producers import AsyncClient, Client, SubmitFailed, Token
from producers.contract import keys
from tests.processes import ROOT, Worker, valkey
from tests.workers.rig import Rig

#: Kind of sender -> what the round is called.
ROUNDS = {"": "alone", "clients": "beside batch work of clients", "celery": "beside batch work of Celery senders"}
#: Token ids of a batch task's prompt, some 12 kB.
PROMPT = [999] * 3000


@dataclass(slots=True)
class Sent:
    """What a sender did: ids of accepted tasks, refusals, and the time (s) of the slowest one."""

    ids: list[str]
    refused: int = 0
    slowest: float = 0.0


def send(kind: str, url: str, seconds: float) -> Sent:
    """Send batch work for so long; a refused sender comes again after 10 ms."""
    sent, over = Sent([]), time.monotonic() + seconds
    with Client(url, patience=1.0) as client, Redis.from_url(url, decode_responses=True) as redis:
        app = Rig(url, redis).sender(task_publish_retry=False)
        while time.monotonic() < over:
            began = time.monotonic()
            task = {"model": "stub", "prompt": PROMPT, "max_tokens": 200, "tier": "batch"}
            try:
                if kind == "clients":
                    sent.ids.append(client.submit(**task).id)
                else:
                    sent.ids.append(app.send_task("penstock.generate", kwargs=task, priority=9, ignore_result=True).id)
            except (SubmitFailed, OperationalError):
                sent.refused += 1
                sent.slowest = max(sent.slowest, time.monotonic() - began)
                time.sleep(0.01)
        app.close()
    return sent


async def longest_gap(client: AsyncClient, streams: int, over: asyncio.Event, tokens: int) -> tuple[float, int]:
    """The longest time (s) between two tokens of a stream, of so many at a time; and how many were read to their end.

    Streams are begun again until `over`. While the store refuses a new one, it is tried again.
    """
    longest, ended = 0.0, 0

    async def reader() -> None:
        nonlocal longest, ended
        while not over.is_set():
            try:
                handle = await client.submit(model="stub", prompt=[1], max_tokens=tokens)
            except SubmitFailed:
                await asyncio.sleep(0.05)
                continue
            last = None
            async for batch in handle.batches():
                if any(isinstance(event, Token) for event in batch):
                    now = time.monotonic()
                    longest, last = max(longest, now - (last or now)), now
            ended += 1

    await asyncio.gather(*(reader() for _ in range(streams)))
    return longest, ended


async def measured(url: str, kind: str, streams: int, tokens: int, seconds: float) -> tuple[float, int, Sent]:
    over = asyncio.Event()
    async with AsyncClient(url) as client:
        reading = asyncio.create_task(longest_gap(client, streams, over, tokens))
        await asyncio.sleep(1)
        sent = Sent([])
        if kind:
            argv = [sys.executable, "-m", "tests.bench.full_store", "--send", kind, url, str(seconds)]
            process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=subprocess.PIPE)
            said, _ = await process.communicate()
            sent = Sent(**json.loads(said))
        else:
            await asyncio.sleep(seconds)
        over.set()
        gap, ended = await reading
    return gap, ended, sent


def all_ended(redis: Redis, ids: list[str]) -> int:
    """Wait until all tasks are settled, once the store has room. Returns how many completed."""
    redis.config_set("maxmemory", 0)
    left = set(ids)
    while left:
        left = {task_id for task_id in left if not redis.hexists(keys.task(task_id), "settled")}
        time.sleep(0.1)
    return sum(redis.hget(keys.task(task_id), "status") == "completed" for task_id in ids)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a full store costs running streams.")
    parser.add_argument("--megabytes", type=int, default=40, help="the store's maxmemory")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a round")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="of a stream")
    parser.add_argument("--step", type=float, default=0.01, help="seconds of a step of the engine")
    parser.add_argument("--send", nargs=3, metavar=("KIND", "URL", "SECONDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send:
        kind, url, seconds = args.send
        sent = send(kind, url, float(seconds))
        print(json.dumps({"ids": sent.ids, "refused": sent.refused, "slowest": sent.slowest}))
        return
    for kind, name in ROUNDS.items():
        bound = {"maxmemory": f"{args.megabytes}mb", "maxmemory-policy": "noeviction"}
        with valkey(**bound) as (url, redis), Worker(url, STUB_STEP_S=args.step) as worker:
            worker.wait_ready()
            gap, ended, sent = asyncio.run(measured(url, kind, args.streams, args.tokens, args.seconds))
            used = redis.info("memory")["used_memory"] / (args.megabytes * 1024 * 1024)
            completed = all_ended(redis, sent.ids)
        print(f"{name}: longest gap {gap:.2f} s of {ended} streams, {used:.0%} of maxmemory in use at the end")
        if kind:
            print(f"  {len(sent.ids)} tasks accepted, {completed} of them completed once there was room;", end=" ")
            print(f"{sent.refused} refused, the slowest after {sent.slowest:.2f} s")


if __name__ == "__main__":
    main()
