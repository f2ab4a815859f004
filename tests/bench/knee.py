"""Whether a worker knows its knee: `python -m tests.bench.knee`.

The truth comes from an engine in this process. It runs the jobs of `engine.bench` (128 prompt and 128 output tokens) so
many at once. The knee is the least number at which it makes 85% of its best tokens a second, prompts' included.

Then a worker with the same model, and one thread as well, gets such tasks over a queue, and its lease says what it has
measured: first with few at once, then with all that it takes.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from redis import Redis

from engine import Engine, EngineConfig
from engine.bench.offline import run_jobs, workload
from producers import Client
from producers.contract import keys
from tests.bench.inflated import inflate
from tests.processes import ROOT, Worker, valkey
from workers.measure import KNEE_SHARE

TINY = ROOT / "workers" / "models" / "tiny"
VOCABULARY = 2048


def truth(model: Path, sizes: list[int], repeats: int) -> dict[int, float]:
    """Tokens a second by sequences at once: the best of the repeats."""
    found = dict.fromkeys(sizes, 0.0)
    with Engine.load(model, EngineConfig(threads=1, max_num_seqs=max(sizes))) as engine:
        run_jobs(engine, workload("W4", VOCABULARY, 0, 999))
        for repeat in range(repeats):
            for size in sizes:
                run = run_jobs(engine, workload(f"W{size}", VOCABULARY, 0, repeat))
                rate = (run["prompt_tokens"] + run["output_tokens"]) / run["wall_s"]
                found[size] = max(found[size], rate)
    return found


def knee_of(rates: dict[int, float]) -> tuple[int, float]:
    return next((size, rate) for size, rate in rates.items() if rate >= KNEE_SHARE * max(rates.values()))


def told(redis: Redis) -> dict[str, Any]:
    """The profile in the worker's lease, once that was renewed."""
    (name,) = redis.keys(keys.lease("*"))
    left, deadline = redis.pttl(name), time.monotonic() + 60
    while redis.pttl(name) <= left and time.monotonic() < deadline:  # it falls until it is renewed
        left = redis.pttl(name)
        time.sleep(0.05)
    profile: dict[str, Any] = json.loads(str(redis.get(name)))["profile"]
    return profile


def load(url: str, rng: random.Random, sizes: list[int]) -> float:
    """Tasks, so many at once, in rounds. Returns the last round's tokens a second, by the clock on the wall."""
    with Client(url) as client:
        for size in sizes:
            began = time.perf_counter()
            prompts = [[rng.randint(100, VOCABULARY - 1) for _ in range(128)] for _ in range(size)]
            handles = [
                client.submit(model=MODEL_NAME, prompt=prompt, max_tokens=128, temperature=0, ignore_eos=True)
                for prompt in prompts
            ]
            for handle in handles:
                handle.result(timeout=600)
    return 256 * size / (time.perf_counter() - began)


#: The model's name in the worker.
MODEL_NAME = "measured"
ENGINE = "workers.runtime.worker:load_engine"


def measured(model: Path, most: int) -> dict[str, dict[str, Any]]:
    rng = random.Random(0)
    options: dict[str, Any] = {"engine": {"threads": 1, "max_num_seqs": most}}
    with valkey() as (url, redis):
        worker = Worker(url, model=f"{MODEL_NAME}={model}", lease=4.0, **options, engine_factory=ENGINE)
        try:
            worker.wait_ready(120)
            load(url, rng, [1, 1, 2, 2, 4, 4, 5, 5])
            few = told(redis)
            rate = load(url, rng, [4 * most])
            return {"up to 5 at once": few, f"up to {most} at once, at {rate:.0f} tokens/s in all": told(redis)}
        finally:
            worker.process.kill()
            worker.process.wait()
            worker.log.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="the bundled model at Llama 135M's shape")
    parser.add_argument("--most", type=int, default=64, help="sequences at once")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        if args.large:
            inflate(TINY, model)
        else:
            model = TINY
        sizes = sorted({*(size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if size < args.most), args.most})
        rates = truth(model, sizes, args.repeats)
        for size, rate in rates.items():
            print(f"{size:3} at once: {rate:8.0f} tokens/s, {rate / max(rates.values()):4.0%} of the best")
        knee, rate = knee_of(rates)
        print(f"knee: {knee} at once, {rate:.0f} tokens/s")
        for name, profile in measured(model, args.most).items():
            said = {what: profile.get(what, "unknown") for what in ("knee", "tokens_per_s", "tokens_per_task")}
            print(f"worker, {name}: " + ", ".join(f"{what} {value}" for what, value in said.items()))


if __name__ == "__main__":
    main()
