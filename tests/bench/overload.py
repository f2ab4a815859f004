"""How a system bears more than it can do: `python -m tests.bench.overload`.

A real gateway, Valkey and worker with the bundled model, or one of real cost (`--model`): the bundled one's steps are
so short that gateway, senders and their turns on the processors are most of what is seen; where a step takes long, it
is scheduling. First the capacity: output tokens a second in a closed loop of the same mix; and priority tasks one after
the other, with nothing else to do (of few tokens: it is the first that is timed). Then Poisson arrivals at each share
of the capacity, in an open loop, mixed tiers and several tenants of which one sends most. Printed are ratios within the
run, since the machine may do other things meanwhile:

- `priority_ttft`: the priority tier's TTFT, 95th percentile, at the highest load, by that of those that ran alone;
- `goodput`: output tokens a second of tasks that ended within their tier's deadline at the highest load, by the most
  that was seen at any load. Who is told 429 comes again as late as it was told, as the SDKs do, while there is time.

A tier's deadline is so many times what a task takes at the capacity, all rows being taken (`task_s`), so that models of
every speed have as much time. `--ageing`, of worker and engine, is in seconds as an operator sets it: where it is not
many times `task_s`, whoever waits has soon aged to the best tier, and nobody is put out for a priority task any more.

`queued` and `first` are parts of the priority tier's TTFT by the store's clock: until its run starts, and from then on.
`cores` says how many processor cores each process kept busy (this one, which sends and reads, is `senders`): where they
add up to what the machine has, latencies are those of a queue for processors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from tests.bench.gateways import GATEWAY, serving
from tests.fuzz.watch import processor_s
from tests.processes import Worker, free_port, valkey
from workers.trials.bench.connection import Connections
from workers.trials.chaos.checker.rest import at_rest

#: Share of the requests, and the time within which its tasks are worth anything, in times of `task_s`.
TIERS = {"priority": (0.15, 5.0), "default": (0.45, 15.0), "flex": (0.2, 37.5), "batch": (0.2, 75.0)}
TENANTS = {"big": 0.7, "small": 0.2, "": 0.1}
#: Tokens of tasks that run alone, on average; and seconds for each where the capacity is not known yet.
SHORT, LONG_S = 8, 600.0


@dataclass(slots=True)
class One:
    """A request: when it was due, its first token and its end (s); `tokens` that it gave."""

    tier: str
    due: float
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    refused: int = 0
    task_id: str = ""


@dataclass(slots=True)
class Load:
    rng: random.Random
    vocab: int
    prompt: int
    """Tokens on average, from half of that to half more."""
    output: int
    task_s: float | None = None
    """What a task takes at the capacity (s); None before that is known."""
    done: list[One] = field(default_factory=list)

    def task(self, tier: str) -> dict[str, Any]:
        (tenant,) = self.rng.choices(list(TENANTS), list(TENANTS.values()))
        task = {
            "model": "model",
            "prompt": self.rng.choices(range(self.vocab), k=self.rng.randint(self.prompt // 2, self.prompt * 3 // 2)),
            "max_tokens": self.rng.randint(self.output // 2, self.output * 3 // 2),
            "ignore_eos": True,
            "tier": tier,
            "timeout": self.deadline_s(tier),
        }
        return {**task, "tenant": tenant} if tenant else task

    def deadline_s(self, tier: str) -> float:
        return LONG_S if self.task_s is None else TIERS[tier][1] * self.task_s

    def tier(self) -> str:
        (tier,) = self.rng.choices(list(TIERS), [share for share, _ in TIERS.values()])
        return tier

    async def one(self, http: Connections, tier: str, due: float) -> None:
        one, task = One(tier, due), self.task(tier)
        deadline = due + self.deadline_s(tier)
        while True:
            async with http.request("POST", "/v1/tasks", task) as answer:
                told = await answer.json()
            if answer.status == 202:
                break
            if answer.status != 429:
                raise RuntimeError(str(told))
            one.refused += 1
            wait = int(answer.headers["retry-after-ms"]) / 1000
            if time.perf_counter() + wait >= deadline:
                self.done.append(one)
                return
            await asyncio.sleep(wait)
            task["timeout"] = max(0.05, deadline - time.perf_counter())
        one.task_id = told["id"]
        async with http.request("GET", f"/v1/tasks/{one.task_id}/events") as stream:
            async for events in stream.events():
                for event in events:
                    if event.kind == "token":
                        one.tokens += 1
                        one.first = one.first or time.perf_counter()
                    elif event.kind == "end" and '"completed"' in event.data:
                        one.ended = time.perf_counter()
        self.done.append(one)


async def closed(load: Load, http: Connections, rows: int, seconds: float) -> float:
    """Output tokens a second with as many under way as the engine has rows, and as many that wait."""
    until = time.perf_counter() + seconds
    start = time.perf_counter()

    async def again() -> None:
        while time.perf_counter() < until:
            await load.one(http, load.tier(), time.perf_counter())

    await asyncio.gather(*(again() for _ in range(2 * rows)))
    return sum(one.tokens for one in load.done if one.ended) / (time.perf_counter() - start)


async def alone(redis: Redis, load: Load, http: Connections, count: int) -> dict[str, Any]:
    """Priority tasks that have the system for themselves, each in its turn."""
    for _ in range(count):
        await load.one(http, "priority", time.perf_counter())
    return _priority(redis, load)


async def open_loop(redis: Redis, load: Load, http: Connections, rate: float, seconds: float) -> dict[str, Any]:
    start = due = time.perf_counter()
    going = []
    while (due := due + load.rng.expovariate(rate)) < start + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        going.append(asyncio.create_task(load.one(http, load.tier(), due)))
    await asyncio.gather(*going)
    # Good is what ended in time within the window: what is worked off afterwards is not what the load was borne with.
    good = [
        one for one in load.done if one.ended and one.ended <= min(one.due + load.deadline_s(one.tier), start + seconds)
    ]
    return {
        **_priority(redis, load),
        "offered_per_s": round(len(load.done) / seconds, 2),
        "good_tokens_per_s": round(sum(one.tokens for one in good) / seconds, 1),
        "in_time": {
            tier: f"{sum(one.tier == tier for one in good)}/{sum(one.tier == tier for one in load.done)}"
            for tier in TIERS
        },
        "refused": sum(one.refused for one in load.done),
    }


def _priority(redis: Redis, load: Load) -> dict[str, float]:
    ttfts = [one.first - one.due for one in load.done if one.tier == "priority" and one.first]
    parts = [
        [int(at) for at in times]
        for one in load.done
        if one.tier == "priority" and one.task_id
        if all(times := redis.hmget(f"penstock:task:{one.task_id}", "created", "started", "first"))
    ]
    return {
        "priority_queued_ms_p95": _p95([started - created for created, started, _ in parts]),
        "priority_first_ms_p95": _p95([first - started for _, started, first in parts]),
        "priority_ttft_ms_p50": round(1e3 * statistics.median(ttfts or [0.0]), 1),
        "priority_ttft_ms_p95": _p95([1e3 * seconds for seconds in ttfts]),
    }


def _p95(values: list[float]) -> float:
    return round(statistics.quantiles(values, n=20)[-1], 1) if len(values) > 1 else 0.0


@dataclass(slots=True)
class Cores:
    """How many cores each process keeps busy. `pids`, by name."""

    pids: dict[str, int]
    _began: float = 0.0
    _before: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        self._began, self._before = time.perf_counter(), self._had()

    def since(self) -> dict[str, float]:
        wall = time.perf_counter() - self._began
        return {name: round((had - self._before[name]) / wall, 2) for name, had in self._had().items()}

    def _had(self) -> dict[str, float]:
        return {"senders": time.process_time()} | {name: processor_s(pid) for name, pid in self.pids.items()}


async def measure(redis: Redis, port: int, args: argparse.Namespace, vocab: int, cores: Cores) -> None:
    http = Connections(f"http://127.0.0.1:{port}")

    def load(seed: object, task_s: float | None = None, output: int = args.output) -> Load:
        return Load(random.Random(str(seed)), vocab, args.prompt, output, task_s)

    await closed(load(args.seed), http, args.rows, min(3.0, args.seconds))  # warms everything up
    capacity = await closed(load(args.seed), http, args.rows, args.seconds / 2)
    task_s = args.rows * args.output / capacity
    print(json.dumps({"capacity_tokens_per_s": round(capacity, 1), "task_s": round(task_s, 2)}), flush=True)
    cores.begin()
    idle = await alone(redis, load(f"{args.seed} alone", output=min(SHORT, args.output)), http, args.alone)
    print(json.dumps({"alone": args.alone, **idle, "cores": cores.since()}), flush=True)
    found = []
    for share in args.loads:
        rate = share * capacity / args.output
        cores.begin()
        figures = await open_loop(redis, load(f"{args.seed} {share}", task_s), http, rate, args.seconds)
        found.append(figures)
        print(json.dumps({"load": share, **figures, "cores": cores.since()}), flush=True)
    best = max(one["good_tokens_per_s"] for one in found) or math.inf  # none where nothing ended in time
    ratio = found[-1]["priority_ttft_ms_p95"] / idle["priority_ttft_ms_p95"]
    print(json.dumps({"priority_ttft": round(ratio, 2), "goodput": round(found[-1]["good_tokens_per_s"] / best, 3)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0, 2.0, 3.0])
    parser.add_argument("--alone", type=int, default=40, help="priority tasks that run one after the other")
    parser.add_argument("--max-queued", type=int, default=100, help="0: no bound")
    parser.add_argument("--model", default="tiny", metavar="DIR", help="bundled name, or folder (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--rows", type=int, default=16, help="max_num_seqs of the engine")
    parser.add_argument("--batched-tokens", type=int, default=64, help="max_num_batched_tokens of the engine")
    parser.add_argument("--max-non-priority-step-tokens", type=int, help="max_non_priority_step_tokens of the engine")
    parser.add_argument("--ageing", type=float, default=30.0, help="seconds of waiting that raise a task by one tier")
    parser.add_argument("--prompt", type=int, default=64, help="tokens, on average")
    parser.add_argument("--output", type=int, default=96, help="tokens, on average")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    port = free_port()
    engine = {
        "threads": args.threads,
        "max_num_seqs": args.rows,
        "max_num_batched_tokens": args.batched_tokens,
        "max_non_priority_step_tokens": args.max_non_priority_step_tokens,
        "ageing_s": args.ageing,
    }
    served = {
        "model": f"model={args.model}",
        "engine_factory": "workers.runtime.worker:load_engine",
        "engine": engine,
    }
    with (
        valkey() as (url, redis),
        serving(*GATEWAY, "--broker", url, "--max-queued", str(args.max_queued), port=port) as gateway,
        Worker(url, ageing=args.ageing, **served) as worker,
    ):
        worker.wait_ready(120)
        vocab = json.loads(redis.hget("penstock:models", "model"))["vocab_size"]
        server: Any = redis.info("server")
        pids = {"gateway": gateway.pid, "worker": worker.process.pid, "server": server["process_id"]}
        asyncio.run(measure(redis, port, args, vocab, Cores(pids)))
        stats = at_rest(redis)
        print(json.dumps([{k: one[k] for k in ("preemptions", "steps", "generated_tokens")} for one in stats]))


if __name__ == "__main__":
    main()
