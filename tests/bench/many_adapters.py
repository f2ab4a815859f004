"""What adapters cost that are registered and not used: `python -m tests.bench.many_adapters`.

A Valkey and a worker of `tiny` on this machine. First tasks by turns over `--hot` adapters while so many are in the
store, and while there are `--registered`: processor time of the worker and of the server for each task. By turns in one
system; the least of the rounds.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from producers import Client
from producers.store.fleet import adapters
from tests.bench.cold_start import cpu_seconds
from tests.workers.rig import Rig, rig
from tests.workers.test_adapters import adapter_of_tiny, add


def seconds_a_task(made: Rig, client: Client, names: Sequence[str], tasks: int) -> tuple[float, float]:
    """Processor time of the worker and of the server."""
    processes = made.workers[0].process.pid, int(made.redis.info("server")["process_id"])
    before = [cpu_seconds(pid) for pid in processes]
    turns = itertools.islice(itertools.cycle(names), tasks)
    ids = [client.submit(model=name, prompt="def f(n):", max_tokens=16, temperature=0.0).id for name in turns]
    made.until_settled(ids, 600)
    worker, server = (cpu_seconds(pid) - start for pid, start in zip(processes, before, strict=True))
    return worker / tasks, server / tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registered", type=int, default=1000)
    parser.add_argument("--hot", type=int, default=64)
    parser.add_argument("--tasks", type=int, default=640, help="tasks of a round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    options = {"threads": 1, "kv_cache_bytes": 1 << 26, "adapter_bytes": 1 << 30}
    with TemporaryDirectory() as root, rig() as made, Client(made.url, made.store_url) as client:
        made.worker(
            model="tiny",
            engine_factory="workers.runtime.worker:load_engine",
            engine=options,
            warm=False,
            LOG_LEVEL="ERROR",
        )
        other = adapter_of_tiny(Path(root) / "other")
        hot = [f"a{i}" for i in range(arguments.hot)]
        for seed, name in enumerate(hot):
            add(made, name, adapter_of_tiny(Path(root) / name, seed))
        others = [f"b{i}" for i in range(arguments.registered - arguments.hot)]
        times: dict[int, list[tuple[float, float]]] = {arguments.hot: [], arguments.registered: []}
        seconds_a_task(made, client, hot, len(hot))
        for _ in range(arguments.rounds):
            times[arguments.hot].append(seconds_a_task(made, client, hot, arguments.tasks))
            for i, name in enumerate(others):
                adapters.add(made.store, name, "tiny", f"{i:012x}", 2, other)
            times[arguments.registered].append(seconds_a_task(made, client, hot, arguments.tasks))
            for name in others:
                adapters.remove(made.store, name)
        for count, rounds in times.items():
            worker, server = (min(column) * 1e3 for column in zip(*rounds, strict=True))
            print(
                f"{count:5} registered, {len(hot)} hot: {worker:.2f} ms of the worker a task, {server:.3f} of the store"
            )


if __name__ == "__main__":
    main()
