"""What a model's routing does and costs: `python -m tests.bench.routing`.

A real Valkey and gateway processes (`--gateways`), to which connections POST tasks of token ids without a pause. The
model has two versions with one tokenizer. Measured: the part of the tasks that a split of 20% gives away; the time
from a change of the default until each gateway's last task of the version before, and its first of the other; whether
anything was refused; and a gateway's processor time a submit of two models without a routing and of one with a split,
in blocks by turns: the mean of the differences between blocks that came one after the other, without the largest and
least quarters, and an interval of it by bootstrap. The two without a routing say how far that may be trusted.

`--instructions` counts, in place of processor time, the instructions of the gateway in user mode, by valgrind's
callgrind, on one connection. What is done now and then is left out (`tests.bench.still`): looks into the store that all
submits of some time share, and garbage collection. Needs `valgrind`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import fmean, median
from typing import Any

from redis import Redis

from producers.admin import routes
from producers.store.fleet import cards
from tests.bench.gateways import GATEWAY, cpu_s, gateway, serving
from tests.processes import free_port, valkey
from workers.trials.bench.connection import Connections

TASK = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 1, "ttl": 60}
#: So that none has more tasks waiting than a tenant may.
TENANTS = 100
CONNECTIONS = 4
SHARE = 20.0
#: Models with equal cards: two without a routing, and one with a split.
PLAIN, SAME, SPLIT = "plain", "again", "split"
#: Submits of a block, of some 0.2 s, since a gateway looks at a queue's pressure each 0.05 s; and blocks not counted.
BLOCK, SLOWER = 240, 2
#: Submits of a block whose instructions are counted.
COUNTED_BLOCK = 16
#: Samples of a bootstrap.
RESAMPLED = 1000


class Load:
    """Submits to one gateway until `over`. `seen`: when each answer came (monotonic), and the version that it names."""

    def __init__(self, port: int, model: str = "stub", tenants: int = TENANTS, connections: int = CONNECTIONS) -> None:
        self._task, self._tenants, self._connected = {**TASK, "model": model}, tenants, connections
        self._connections = Connections(f"http://127.0.0.1:{port}")
        self.seen: list[tuple[float, str]] = []
        self.statuses: Counter[int] = Counter()

    async def run(self, requests: int | None, over: asyncio.Event | None = None) -> None:
        async def some(count: int | None) -> None:
            while (count is None or count > 0) and not (over is not None and over.is_set()):
                task = {**self._task, "tenant": f"t{len(self.seen) % self._tenants}"}
                async with self._connections.request("POST", "/v1/tasks", task) as answer:
                    said = await answer.whole()
                self.statuses[answer.status] += 1
                self.seen.append(
                    (time.monotonic(), json.loads(said).get("version") or answer.headers["penstock-version"])
                )
                count = None if count is None else count - 1

        each = None if requests is None else requests // self._connected
        await asyncio.gather(*(some(each) for _ in range(self._connected)))


async def _changes(store: Redis, ports: list[int], versions: list[str], times: int, pause: float) -> dict[str, Any]:
    loads, over = [Load(port) for port in ports], asyncio.Event()
    running = [asyncio.create_task(load.run(None, over)) for load in loads]
    last: list[float] = []
    first: list[float] = []
    await asyncio.sleep(1.0)
    for number in range(times):
        before, after = versions[number % 2], versions[(number + 1) % 2]
        await asyncio.to_thread(routes.set_aliases, store, "stub", {"default": after})
        changed = time.monotonic()
        await asyncio.sleep(pause)
        for _ in range(1000):  # a gateway that is not there yet
            if all(any(at > changed and version == after for at, version in load.seen) for load in loads):
                break
            await asyncio.sleep(0.01)
        since = [[(at - changed, version) for at, version in load.seen if at > changed] for load in loads]
        last.append(max((at for seen in since for at, version in seen if version == before), default=0.0))
        first.append(max(min(at for at, version in seen if version == after) for seen in since))
        for load in loads:
            load.seen.clear()
    over.set()
    await asyncio.gather(*running)
    refused = sum(count for load in loads for status, count in load.statuses.items() if status != 202)
    return {
        "changes": times,
        "gateways": len(ports),
        "last_before_s": _quantiles(last),
        "first_after_s": _quantiles(first),
        "submits": sum(load.statuses.total() for load in loads),
        "refused": refused,
    }


def _quantiles(times: list[float]) -> dict[str, float]:
    """Of the slower gateway of each change (s)."""
    times = sorted(times)
    return {"median": median(times), "p99": times[len(times) * 99 // 100], "most": times[-1]}


async def _cost(used: Callable[[], float], load: Callable[[str], Load], size: int, blocks: int) -> dict[str, Any]:
    """What a submit uses, by model, and what the other two use more than PLAIN. `used`: by the gateway so far; `load`:
    on a model."""
    loads = {model: load(model) for model in (PLAIN, SAME, SPLIT)}
    costs: dict[str, list[float]] = {model: [] for model in loads}
    orders = [*permutations(loads)]
    for number in range(blocks + SLOWER):
        for model in orders[number % len(orders)]:
            before = used()
            await loads[model].run(size)
            costs[model].append((used() - before) / size)
    counted = {model: values[SLOWER:] for model, values in costs.items()}
    plain = _trimmed(counted[PLAIN])
    figures: dict[str, Any] = {"without_a_routing": round(plain, 1)}
    for name, model in (("the_same", SAME), ("a_split", SPLIT)):
        differences = [b - a for a, b in zip(counted[PLAIN], counted[model], strict=True)]
        again = sorted(_trimmed(random.choices(differences, k=blocks)) for _ in range(RESAMPLED))
        interval = again[RESAMPLED // 40], again[-RESAMPLED // 40 - 1]
        figures[f"percent_more_with_{name}"] = round(100 * _trimmed(differences) / plain, 2)
        figures[f"percent_more_with_{name}_95"] = [round(100 * end / plain, 2) for end in interval]
    return figures


def _trimmed(values: list[float]) -> float:
    """The mean without the largest and the least quarter: moments of other work are in these."""
    cut = len(values) // 4
    return fmean(sorted(values)[cut : len(values) - cut])


@contextmanager
def counted(url: str) -> Iterator[tuple[int, Callable[[], float]]]:
    """A gateway's port, and how many instructions it has run so far."""
    with tempfile.TemporaryDirectory() as folder:
        tool = "valgrind", "--tool=callgrind", "--instr-atstart=no", "--fair-sched=yes", f"--log-file={folder}/log"
        under = *tool, f"--callgrind-out-file={folder}/dump"
        with gateway(url, "-m", "tests.bench.still", "gateway", under=under) as (port, pid):

            def control(*argv: str) -> None:
                subprocess.run(["callgrind_control", *argv, str(pid)], check=True, capture_output=True)

            control("--instr=on")
            os.kill(pid, signal.SIGUSR1)
            total = 0

            def used() -> float:
                nonlocal total
                control("--dump")
                for dump in Path(folder).glob("dump.*"):
                    total += int(re.findall(r"^totals: (\d+)", dump.read_text(), re.MULTILINE)[-1])
                    dump.unlink()
                return float(total)

            yield port, used


def _models(store: Redis) -> list[str]:
    """Publishes a second version of `stub`, and the models that are compared. Returns the versions."""
    card = cards.read(store, "stub")
    assert card is not None
    candidate = {**card, "version": "candidate0000"}
    cards.publish(store, card, {})
    cards.add_version(store, candidate, {})
    for model in (PLAIN, SAME, SPLIT):
        cards.publish(store, {**card, "name": model}, {})
    cards.add_version(store, {**candidate, "name": SPLIT}, {})
    routes.set_split(store, SPLIT, {str(candidate["version"]): SHARE})
    return [str(card["version"]), str(candidate["version"])]


def instructions(blocks: int) -> dict[str, Any]:
    """What a submit costs in instructions in user mode."""
    with valkey() as (url, store), counted(url) as (port, used):
        _models(store)
        return asyncio.run(_cost(used, lambda model: Load(port, model, 4, 1), COUNTED_BLOCK, blocks))


def measure(tasks: int, changes: int, blocks: int, gateways: int = 2, pause: float = 1.2) -> dict[str, Any]:
    with ExitStack() as stack:
        url, store = stack.enter_context(valkey())
        port, pid = stack.enter_context(gateway(url))
        ports = [port, *(free_port() for _ in range(gateways - 1))]
        argv = (*GATEWAY, "--broker", url, "--max-queued", "100000000")
        for other in ports[1:]:
            stack.enter_context(serving(*argv, port=other))
        versions = _models(store)

        async def run() -> dict[str, Any]:
            load = partial(Load, port)
            cost = await _cost(lambda: cpu_s(pid) * 1e6, load, BLOCK, blocks) if blocks else {}
            if not tasks:
                return cost
            routes.set_split(store, "stub", {versions[1]: SHARE})
            await asyncio.sleep(1.0)
            all_tasks = Load(port)
            await all_tasks.run(tasks)
            part = 100 * Counter(version for _, version in all_tasks.seen)[versions[1]] / len(all_tasks.seen)
            routes.set_split(store, "stub", {})
            changed = await _changes(store, ports, versions, changes, pause)
            return {"tasks": len(all_tasks.seen), "split": SHARE, "percent": round(part, 2), **changed, **cost}

        return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=10_000, help="0: only the cost is measured")
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=200, help="blocks of each model by which the cost is measured")
    parser.add_argument("--pause", type=float, default=1.2, help="seconds between two changes")
    parser.add_argument("--instructions", action="store_true", help="only the cost, in instructions")
    arguments = parser.parse_args()
    if arguments.instructions:
        print(json.dumps(instructions(arguments.blocks)))
        return
    counts = arguments.tasks, arguments.changes, arguments.blocks, arguments.gateways
    print(json.dumps(measure(*counts, arguments.pause)))


if __name__ == "__main__":
    main()
