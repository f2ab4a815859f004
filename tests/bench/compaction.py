"""What compacting a stream saves, and costs: bytes of Valkey for each 1,000 tokens, and processor time (ms).

    python -m tests.bench.compaction

The tokens are those of this repository's own page on the protocol, by the bundled model's tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from pathlib import Path

from redis import Redis
from tokenizers import Tokenizer

from producers import AsyncClient
from producers.connection.script import run
from producers.contract import keys
from producers.contract.stream import encode_token
from producers.store import protocol
from producers.sweeper.compact import compact
from tests.processes import running_valkey

ROOT = Path(__file__).parents[2]
COUNTS = [10, 100, 1000, 10_000]


def tokens(count: int, top: int | None) -> list[str]:
    """Stream entries; with the log probabilities of so many alternatives each."""
    tokenizer = Tokenizer.from_file(str(ROOT / "workers" / "models" / "tiny" / "tokenizer.json"))
    ids = tokenizer.encode((ROOT / "docs" / "how" / "protocol.md").read_text()).ids
    chance = random.Random(1)
    entries = []
    for index, token in zip(range(count), itertools.cycle(ids), strict=False):
        scores = None
        if top is not None:
            values = sorted((-chance.expovariate(1.0) for _ in range(top + 1)), reverse=True)
            scores = (values[0], tuple((chance.randrange(len(ids)), value) for value in values[:top]))
        entries.append(encode_token(0, index, token, tokenizer.decode([token]), scores))
    return entries


def settled(redis: Redis, task_id: str, entries: list[str]) -> None:
    run(redis, protocol.admit(task_id, "", int(redis.time()[0]) * 1000, {"task": "{}", "n": 1}))  # type: ignore[index]
    run(redis, protocol.claim(task_id, "c", "w", keys.Pool("m", "v", "bench")))
    for start in range(0, len(entries), 500):
        batch = [protocol.Append(task_id, "c", 0, start, entries[start : start + 500])]
        run(redis, protocol.append(batch))
    run(redis, protocol.finish(task_id, "c", "completed", reasons='["stop"]', nexts=[len(entries)]))
    run(redis, protocol.settle(task_id))


async def measure(redis: Redis, url: str, counts: list[int]) -> None:
    async with AsyncClient(url) as client:
        for (name, top), count in itertools.product({"plain": None, "5 logprobs": 5}.items(), counts):
            times = max(1, 2000 // count)
            entries = tokens(count, top)
            for k in range(times):
                settled(redis, f"t{k}", entries)
            stream = redis.memory_usage(keys.stream("t0"), samples=0)
            began = time.process_time()
            whole = [event async for event in client.get("t0").stream()]
            read = time.process_time() - began
            began = time.process_time()
            assert (await compact(client, age_ms=0)).streams == times
            took = (time.process_time() - began) / times
            result = redis.memory_usage(keys.result("t0"), samples=0)
            began = time.process_time()
            assert [event async for event in client.get("t0").stream()] == whole
            again = time.process_time() - began
            print(
                json.dumps(
                    {
                        "entries": name,
                        "tokens": count,
                        "stream_bytes_per_1000": round(1000 * stream / count),
                        "result_bytes_per_1000": round(1000 * result / count),
                        "ratio": round(stream / result, 1),
                        "compact_cpu_ms": round(1000 * took, 2),
                        "read_stream_cpu_ms": round(1000 * read, 2),
                        "read_result_cpu_ms": round(1000 * again, 2),
                    }
                )
            )
            redis.flushall()
            redis.set(keys.lease("w"), "{}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=COUNTS, help="of a stream")
    args = parser.parse_args()
    with running_valkey() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        with Redis.from_url(url) as redis:
            redis.set(keys.lease("w"), "{}")
            asyncio.run(measure(redis, url, args.tokens))


if __name__ == "__main__":
    main()
