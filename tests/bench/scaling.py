"""An hour's load in minutes, on real processes that come and go: `python -m tests.bench.scaling`.

`penstock up --min 0 --max 4` on this machine. First what one worker makes with all its rows taken. Then a synthetic
hour (`workers.trials.simulate.traces`: quiet at both ends, bursts between) in `--seconds`, at a load of so many
workers on average; the cool-down is 300 s of that hour. Then `--rollout`: the next version replaces this one while
tasks come. Every task is sent to the gateway and read as it is made, over one connection.

The run fails unless every task completed, every stream was whole, nothing was computed twice but what draining workers
handed back, no worker is left at the end, and every kept decision is what the policy makes of the inputs kept with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

from producers.client.aio import AsyncClient
from producers.connection.local import urls_in
from producers.contract import keys
from producers.store.fleet.scaling import decisions
from tests.bench.streamed import System
from workers.library import ResolvedModel, find_model
from workers.processes import PENSTOCK
from workers.trials.bench.connection import Connections
from workers.trials.simulate.replay import replay
from workers.trials.simulate.traces import TIERS, Synthetic

HOUR_S, COOL_DOWN_S = 3600.0, 300.0
PROMPT, OUTPUT, CONTEXT = 30, 150, 1000
MIX = {"priority": 30.0, "default": 70.0}


@asynccontextmanager
async def running(args: argparse.Namespace, cool_down: float, folder: Path) -> AsyncIterator[System]:
    """A system with no worker; stopped at the end."""
    model = find_model(args.model)
    argv = [*PENSTOCK, "up", "--port", "0", "--data-dir", str(folder), "--model", model.reference, "--min", "0"]
    argv += ["--max", str(args.max), "--cool-down", str(cool_down), "--max-num-seqs", str(args.rows), "--threads", "1"]
    with (folder / "log").open("w+") as log:
        process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
        try:
            while not (ready := re.search(r"ready at (\S+)", (folder / "log").read_text())):
                if process.returncode is not None:
                    raise SystemExit((folder / "log").read_text())
                await asyncio.sleep(0.05)
            server, _ = urls_in(folder)
            async with AsyncClient(server) as client:
                yield System(ready[1], server, client, model.name)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def until(true: Callable[[], Awaitable[bool]], what: str, seconds: float = 300.0) -> float:
    """The time (s) until it is true."""
    began = time.monotonic()
    while not await true():
        if time.monotonic() - began > seconds:
            raise SystemExit(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def capacity(system: System, rows: int, seconds: float) -> float:
    """Output tokens a second of one worker whose rows are all taken."""
    connections = Connections(system.url)
    await asyncio.gather(*(system.task(connections, "default", PROMPT, 8) for _ in range(rows)))  # the cold start
    system.sent.clear()
    end = time.monotonic() + seconds

    async def row() -> None:
        while time.monotonic() < end:
            await system.task(connections, "default", PROMPT, OUTPUT)

    began = time.monotonic()
    await asyncio.gather(*(row() for _ in range(rows)))
    return sum(one.tokens for one in system.sent) / (time.monotonic() - began)


async def send(system: System, trace: list[tuple[float, str, int, int]]) -> None:
    """Send all tasks, each in its time, and read them to their ends."""
    connections, began = Connections(system.url), time.monotonic()

    async def one(at: float, tier: str, prompt: int, output: int) -> None:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        await system.task(connections, tier, prompt, output)

    await asyncio.gather(*(one(*arrival) for arrival in trace))


def hour(tokens: float, seconds: float, seed: int) -> list[tuple[float, str, int, int]]:
    """An hour's arrivals of so many output tokens, compressed."""
    trace = Synthetic("diurnal", round(tokens / OUTPUT), HOUR_S, 2.0, 3, MIX, PROMPT, OUTPUT, seed)
    longest = CONTEXT // 2
    return [
        (one.at * seconds / HOUR_S, TIERS[one.rank], min(one.prompt, longest), min(one.output, longest))
        for one in trace.arrivals()
    ]


async def recomputed(system: System) -> tuple[int, int]:
    """Tokens of prompts and outputs that were computed again: of tasks that a draining worker handed back, and of those
    whose worker was lost."""
    drained = lost = 0
    for one in (one for one in system.sent if one.id):
        fields = ("claims", "deaths", "mark", "prompt_tokens")
        said = await system.client.store.hmget(keys.task(one.id), *fields)
        claims, deaths, mark, prompt = (int(value or 0) for value in said)
        if claims > 1:
            print(f"{one.id}: {claims} starts, {deaths} deaths, {mark} tokens at the last start", file=sys.stderr)
            lost += mark + prompt if deaths else 0
            drained += 0 if deaths else mark + prompt
    return drained, lost


async def differences(system: System, folder: Path) -> tuple[int, int]:
    """The kept decisions: how many, and how many of them the policy makes otherwise of the same inputs."""
    lines = []
    for pool in system.pools:
        lines.append(json.dumps({"pool": pool, "history": await decisions(system.client.store, pool, 10_000)}))
    (folder / "decisions").write_text("\n".join(lines))
    found = replay(folder / "decisions")
    return found.decisions, len(found.differences)


def table(system: System, began: float, seconds: float, rows: int = 20) -> Iterator[str]:
    """Workers, queue and TTFT over time."""
    yield f"{'min of the hour':>15} {'wanted':>6} {'up':>3} {'queued':>6} {'tasks':>5} {'TTFT p50':>8} {'p95 (s)':>8}"
    step = seconds / rows
    end = max(at for at, *_ in system.seen)
    for k in range(int((end - began) / step) + 1):
        low, high = began + k * step, began + (k + 1) * step
        seen = [one for one in system.seen if low <= one[0] < high]
        ttft = [one.first - one.sent for one in system.sent if low <= one.sent < high and one.first]
        wanted, up, queued = (max((one[i] for one in seen), default=0) for i in (1, 2, 3))
        p50, p95 = (f"{at(ttft, share):8.2f}" if ttft else f"{'':8}" for share in (50, 95))
        yield f"{k * 60 / rows:15.0f} {wanted:6} {up:3} {queued:6} {len(ttft):5} {p50} {p95}"


def at(values: list[float], percent: int) -> float:
    """A percentile."""
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


@contextmanager
def another(model: str) -> Iterator[ResolvedModel]:
    """The same weights as another version."""
    found = find_model(model)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(found.folder, folder, dirs_exist_ok=True)
        (Path(folder) / "manifest.json").unlink(missing_ok=True)
        (Path(folder) / "version.json").write_text('"next"')
        yield ResolvedModel(found.name, Path(folder))


async def roll(system: System, load: float, seconds: float) -> None:
    """Let the next version replace this one while tasks come, and wait until it has."""
    with another(system.model) as new:
        stop, connections = asyncio.Event(), Connections(system.url)

        async def row() -> None:
            while not stop.is_set():
                await system.task(connections, "default", PROMPT, OUTPUT)

        readers = [asyncio.create_task(row()) for _ in range(round(load))]
        await asyncio.sleep(seconds)
        rollout = await asyncio.create_subprocess_exec(*PENSTOCK, "rollout", new.reference, "--broker", system.server)
        status = await rollout.wait()
        stop.set()
        await asyncio.gather(*readers)
        if status:
            raise SystemExit(f"penstock rollout: {status}")


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All of it. Returns the figures; `wrong` lists what failed."""
    cool_down = args.seconds * COOL_DOWN_S / HOUR_S
    async with running(args, cool_down, folder) as system:
        each = await capacity(system, args.rows, args.capacity_seconds)
        await until(_none_up(system), "no worker is up")
        one = list(system.sent)
        system.sent.clear()
        watching = asyncio.create_task(system.watch())
        began = time.monotonic()
        await send(system, hour(each * args.load * args.seconds, args.seconds, args.seed))
        left = await until(_none_up(system), "no worker is up")
        print("\n".join(table(system, began, args.seconds)))
        figures = {"tokens_per_s_of_one": round(each, 1), "tasks": len(system.sent), "to_zero_s": round(left, 1)}
        figures |= {"most_up": max(up for _, _, up, _ in system.seen), "cool_down_s": cool_down}
        for tier in MIX:
            ttft = [one.first - one.sent for one in system.sent if one.tier == tier and one.first]
            figures[f"ttft_p50_p95_s_{tier}"] = [round(at(ttft, share), 2) for share in (50, 95)] if ttft else []
        if args.rollout:
            before = len(system.sent)
            await roll(system, args.rows * 2, args.seconds / 20)
            figures["tasks_while_rolling"] = len(system.sent) - before
            await until(_none_up(system), "no worker is up")
        watching.cancel()
        figures["decisions"], differing = await differences(system, folder)
        wrong = [f"{task.id}: {task.wrong}" for task in (*one, *system.sent) if task.wrong]
        drained, lost = await recomputed(system)
        if lost:
            wrong.append(f"{lost} tokens were computed again, since a worker was lost")
        if differing:
            wrong.append(f"{differing} decisions differ from the policy's")
        if wrong:
            print((folder / "log").read_text(), file=sys.stderr)
        return {**figures, "recomputed_by_drains": drained, "recomputed_beyond": lost, "wrong": wrong}


def _none_up(system: System) -> Callable[[], Awaitable[bool]]:
    async def none() -> bool:
        return await system.workers() == 0

    return none


def main() -> None:
    """Run it and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seconds", type=float, default=240.0, help="the length of the hour")
    parser.add_argument("--capacity-seconds", type=float, default=10.0)
    parser.add_argument("--load", type=float, default=1.3, help="mean load, in workers")
    parser.add_argument("--max", type=int, default=4, help="most workers")
    parser.add_argument("--rows", type=int, default=2, help="sequences in one worker's batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rollout", action="store_true", help="then a rolling update under load")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(args, Path(folder)))
    print(json.dumps(figures, indent=2))
    sys.exit(1 if figures["wrong"] else 0)


if __name__ == "__main__":
    main()
