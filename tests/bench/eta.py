"""How right the times are at which tasks are said to end.

    python -m tests.bench.eta [--tasks 500] [--over 0] [--seed 7] [--json FILE]

Workers with the stub engine, whose sequences make a token a step, first run some tasks, by which they measure
themselves. Then a mixed load comes: four tiers, tenants that are not alike, prompts and outputs from short to long, a
third of which end early. Each task's end is asked for right after its submission (printed in all and by tier), and of
all that have not ended once more in the middle. The ends are the records'. With `--over` the tasks come over so many
seconds, better tiers among them, which no earlier estimate can know.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from redis import Redis

from producers import AsyncClient, Client
from producers.admin.eta import Eta, read_eta
from producers.contract import keys
from producers.contract.profile import Profile
from producers.contract.record import FINAL
from tests.processes import Worker, valkey

TIERS: Final = {"priority": 10, "default": 50, "flex": 25, "batch": 15}
TENANTS: Final = {"a": 50, "b": 30, "c": 15, "d": 5}
#: Task -> what was told: at which time of the store (s), and what.
Told = dict[str, tuple[float, Eta]]


def draw_task(draw: random.Random, number: int) -> dict[str, Any]:
    output = round(10 * 20 ** draw.random())
    prompt = [1] * draw.randint(10, 400)
    (tier,) = draw.choices([*TIERS], [*TIERS.values()])
    (tenant,) = draw.choices([*TENANTS], [*TENANTS.values()])
    return {"prompt": prompt, "max_tokens": output, "tier": tier, "tenant": tenant, "seed": number}


def ended(store: Redis, ids: Sequence[str]) -> float:
    """The share of tasks that have ended."""
    pipe = store.pipeline(transaction=False)
    for task_id in ids:
        pipe.hget(keys.task(task_id), "status")
    return sum(status in FINAL for status in pipe.execute()) / len(ids)


def wait(store: Redis, ids: Sequence[str], share: float = 1.0) -> None:
    while ended(store, ids) < share:
        time.sleep(0.2)


async def ask(client: AsyncClient, store: Redis, ids: Sequence[str], told: Told) -> None:
    for task_id in ids:
        seconds, micros = store.time()
        if (eta := await read_eta(client, task_id)) is not None:
            told[task_id] = seconds + micros / 1e6, eta


async def load(url: str, store: Redis, tasks: int, over: float, seed: int) -> tuple[list[str], Told, Told]:
    """Ids, what was told of each after its submission, and in the middle."""
    draw, first, later = random.Random(seed), dict[str, tuple[float, Eta]](), dict[str, tuple[float, Eta]]()
    ids: list[str] = []
    began = time.monotonic()
    async with AsyncClient(url, url) as client:
        for number in range(tasks):
            await asyncio.sleep(max(0.0, began + over * number / tasks - time.monotonic()))
            ids.append((await client.submit(model="stub", **draw_task(draw, number))).id)
            if over:
                await ask(client, store, ids[-1:], first)
                if number == tasks // 2:
                    await ask(client, store, ids, later)
        if not over:
            await ask(client, store, ids, first)
            await asyncio.to_thread(wait, store, ids, 0.5)
            await ask(client, store, ids, later)
    return ids, first, later


def figures(store: Redis, told: Told) -> dict[str, float]:
    """`late`: the share of tasks that ended after their p90; `off`: the median of how far off the p50 was, as a share
    of the time that it took; `wide`: the median of p90 / p50. Empty where all tasks were ending."""
    late, off, bias, wide = [], [], [], []
    for task_id, (at, eta) in told.items():
        took = int(store.hget(keys.task(task_id), "finished") or 0) / 1000 - at
        if took <= 0.05:  # it was ending
            continue
        late.append(took > eta.p90_s)
        off.append(abs(eta.p50_s - took) / took)
        bias.append(eta.p50_s / took)
        wide.append(eta.p90_s / max(eta.p50_s, 1e-3))
    if not off:
        return {}
    return {
        "tasks": len(off),
        "late": statistics.mean(late),
        "off": statistics.median(off),
        "bias": statistics.median(bias),
        "wide": statistics.median(wide),
    }


def measured(
    tasks: int, over: float, workers: int, seqs: int, step: float, warm: int, seed: int
) -> dict[str, dict[str, float]]:
    with ExitStack() as stack:
        url, store = stack.enter_context(valkey())
        settings: dict[str, Any] = {"STUB_STEP_S": step, "STUB_SEQS": seqs, "STUB_EARLY": 1}
        times = json.dumps({"workers.leases.housekeeper:KEEP_S": 1.0})
        pool = [stack.enter_context(Worker(url, WORKER_TIMES=times, **settings)) for _ in range(workers)]
        for worker in pool:
            worker.wait_ready()
        draw = random.Random(5)
        with Client(url, url) as client:
            wait(store, [client.submit(model="stub", **draw_task(draw, number)).id for number in range(warm)])
        while Profile.from_json(store.hget(keys.PROFILES, "stub@v1")).task_times is None:
            time.sleep(0.1)
        ids, first, later = asyncio.run(load(url, store, tasks, over, seed))
        wait(store, ids)
        tiers = dict(zip(ids, (str(store.hget(keys.task(task_id), "tier")) for task_id in ids), strict=True))
        by_tier = {tier: {name: value for name, value in first.items() if tiers[name] == tier} for tier in TIERS}
        groups = {"after submission": first, **by_tier, "in the middle": later}
        return {name: its for name, told in groups.items() if (its := figures(store, told))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--over", type=float, default=0.0, help="seconds over which they come; 0: at once")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seqs", type=int, default=8, help="sequences of a worker at once")
    parser.add_argument("--step", type=float, default=0.01, help="seconds of a step")
    parser.add_argument("--warm", type=int, default=100, help="tasks by which workers measure themselves before")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--seed", type=int, default=7, help="of the tasks that come")
    options = parser.parse_args()
    pool = options.workers, options.seqs, options.step, options.warm
    result = measured(options.tasks, options.over, *pool, options.seed)
    print("| told | tasks | ended after p90 | p50 off by, median | p50 / actual, median | p90 / p50, median |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, its in result.items():
        row = f"{its['tasks']} | {its['late']:.1%} | {its['off']:.1%} | {its['bias']:.2f} | {its['wide']:.2f}"
        print(f"| {name} | {row} |")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
