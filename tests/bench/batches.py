"""How fast a batch's input becomes queued tasks: `python -m tests.bench.batches`.

A real Valkey, the sweeper's part in batches in this process, no worker: the input is checked, then its lines are made
and sent, as many as are to be in the store at a time (`--window`; unset: all). The check has a rate of its own. Memory
is this process's peak: with a large input and a small window it is what a sweeper needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from itertools import repeat
from typing import Any, Final

from redis import Redis

from producers import AsyncClient
from producers.contract import keys
from producers.gateway.batch_endpoints import LineEndpoints
from producers.store import batches
from producers.store.blobs import FolderBlobs
from producers.sweeper.batches.duty import Batches
from tests.chaos.batching import lines, make
from tests.processes import valkey

CARD: Final = {
    "v": 1,
    "name": "m",
    "version": "1",
    "context_length": 4096,
    "vocab_size": 50_000,
    "parameters": 1,
    "capabilities": ["generate", "chat"],
    "eos_token_ids": [0],
    "bos_token_id": None,
    "defaults": {},
    "files": {},
}
TEXT: Final = "The penstock feeds the turbine, and the turbine feeds the grid. "
URLS: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


def _body(url: str, text: str) -> dict[str, Any]:
    if url == "/v1/completions":
        return {"prompt": text, "max_tokens": 64}
    if url == "/v1/responses":
        return {"input": text, "max_output_tokens": 64}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 64}


async def measure(redis_url: str, redis: Redis, url: str, count: int, window: int, text: str) -> dict[str, Any]:
    redis.flushall()
    redis.hset(keys.MODELS, "m", json.dumps(CARD))
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncClient(redis_url) as client:
            blobs, endpoints = FolderBlobs(folder), LineEndpoints(client)
            body = {"model": "m", "temperature": 0.0, **_body(url, text)}
            batch_id, file_id = make(redis, blobs, url, lines(repeat(body, count), url))

            size = blobs.size(file_id)

            async def counted(done: dict[str, int]) -> None:
                pass

            begun, cpu = time.perf_counter(), time.process_time()
            sweeping = asyncio.create_task(Batches(client, blobs, endpoints, counted, window=window).run(0.05))
            queue, checked, sent = keys.version_queue("m", "1"), 0.0, 0
            while sent < window:
                await asyncio.sleep(0.02)
                batch = await batches.read(client.store, batch_id)
                if batch is not None and batch.status == "in_progress" and not checked:
                    checked, cpu = time.perf_counter(), time.process_time()
                sent = sum((await client.broker.waiting(queue)).tiers.values())
            ended, cpu = time.perf_counter(), time.process_time() - cpu
            sweeping.cancel()
            await asyncio.wait((sweeping,))
            endpoints.close()
    return {
        "url": url,
        "lines": count,
        "checked_lines_per_s": round(count / (checked - begun)),
        "input_mb": round(size / 1e6),
        "expanded_lines_per_s": round(window / (ended - checked)),
        "expanded_lines_per_cpu_s": round(window / cpu),
        "store_bytes_per_line": round(redis.info("memory")["used_memory"] / window),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--window", type=int, help="lines that are made; unset: all")
    parser.add_argument("--repeat", type=int, default=4, help="prompts have 64 times as many characters")
    parser.add_argument("--urls", default=",".join(URLS), help="endpoints, separated by commas")
    arguments = parser.parse_args()
    with valkey() as (url, redis):
        for endpoint in arguments.urls.split(","):
            window = min(arguments.window or arguments.lines, arguments.lines)
            found = measure(url, redis, endpoint, arguments.lines, window, TEXT * arguments.repeat)
            print(json.dumps(asyncio.run(found)), flush=True)


if __name__ == "__main__":
    main()
