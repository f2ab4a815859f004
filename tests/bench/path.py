"""What a streamed token costs by process and thread: `python -m tests.bench.path`.

A real worker and a real Valkey; the engine's scheduler, pipeline and detokenisation around a device that takes a given
time for a step and draws tokens at random. Each stream is read by a client as it is made, all in one process. Processor
time counts from when all sequences run until one has ended, so that starts and ends are left out.

`--engine-process on` runs the engine in a process of its own; `both` measures in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.execution.loop import StepLoop
from engine.kv import Capacity, KvSpace
from engine.plan import Sampled, StepPlan
from engine.scheduling.limits import ModelTraits
from engine.scheduling.policy import Policy
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence
from engine.text import ModelCard, Tokenizer
from producers.client.aio import AsyncClient
from producers.contract import keys
from tests.processes import ROOT, Worker, fill, queues_of, valkey

TINY = ROOT / "workers" / "models" / "tiny"
BLOCK = 16
PROMPT = 4


class Device:
    """An executor: a step takes so long from its launch, however little the processor does meanwhile."""

    def __init__(self, seconds: float, vocabulary: int) -> None:
        rng = random.Random(1)
        self._seconds = seconds
        self._tokens = [rng.randrange(vocabulary) for _ in range(1 << 16)]
        self._at = 0
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> tuple[int, float]:
        self._free_at = max(self._free_at, time.monotonic()) + self._seconds
        return sum(row.samples for row in plan.rows), self._free_at

    def collect(self, launched: tuple[int, float]) -> list[Sampled]:
        count, ends = launched
        time.sleep(max(0.0, ends - time.monotonic()))
        self._at = (self._at + count) % (len(self._tokens) - count)
        return [Sampled(token) for token in self._tokens[self._at : self._at + count]]

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None: ...
    def forget(self) -> None: ...
    def needs_token(self, sequence: Sequence) -> bool:
        return False


class DeviceEngine(StepLoop):
    """Behaves as `engine.Engine`, with such a device; plans a step ahead, as on a GPU."""

    kind, texts, watermarks, adapter_bytes = "generate", None, None, 0
    fingerprint, marked_block = "device", 0

    def __init__(self, sequences: int, seconds: float) -> None:
        self.folder = TINY
        self.tokenizer = Tokenizer.from_folder(TINY)
        self.card = ModelCard.from_folder(TINY, tokenizer=self.tokenizer)
        self.max_num_seqs, self.max_model_len, self.step_tokens = sequences, 4096, 8192
        blocks = sequences * self.max_model_len // BLOCK
        self.kv_tokens_total = self.kv_capacity = blocks * BLOCK
        capacity = Capacity([KvSpace(blocks)], BLOCK, sequences, 8192, self.max_model_len)
        traits = ModelTraits("v1", self.tokenizer.vocab_size).with_text(self.tokenizer)
        super().__init__(
            Scheduler(capacity, traits, Policy()),
            Device(seconds, self.tokenizer.vocab_size - 1),
            lambda: None,
            overlap=1,
        )
        self.adapters: dict[str, Any] = {}

    def stats(self) -> Any:
        from types import SimpleNamespace

        from workers.engine_process.child import values_of

        return SimpleNamespace(**values_of(super().stats()), device="cpu")


def load(model: str, options: dict[str, Any]) -> tuple[DeviceEngine, dict[str, bytes]]:
    """What `WorkerSettings.engine_factory` names."""
    engine = DeviceEngine(int(os.environ["DEVICE_SEQS"]), float(os.environ["DEVICE_S"]))
    return engine, ModelCard.tokenizer_files(TINY)


def name_threads() -> None:
    """Let the kernel know threads by their names: a plugin of the worker."""
    run: Callable[[Any], None] = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def named(self: threading.Thread) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(self.name.removeprefix("penstock-")[:15])
        run(self)

    threading.Thread._bootstrap_inner = named  # type: ignore[attr-defined]


def used(pid: int) -> Counter[str]:
    """Processor time (s) of a process, by thread."""
    seconds: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            exact = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            continue
        seconds[name if fields else ""] += exact
    return seconds


def read(url: str, ids: list[str]) -> None:
    """Read all streams to their ends."""

    async def all_of_them() -> None:
        async with AsyncClient(url) as client:

            async def follow(task_id: str) -> None:
                async for _ in client.get(task_id).stream():
                    pass

            await asyncio.gather(*map(follow, ids))

    asyncio.run(all_of_them())


def measure(sequences: int, tokens: int, seconds: float, process: bool) -> dict[str, Any]:
    env = {"DEVICE_SEQS": str(sequences), "DEVICE_S": str(seconds), "WORKER_PLUGINS": "tests.bench.path:name_threads"}
    with (
        valkey() as (url, redis),
        Worker(
            url, model="tiny", engine_factory="tests.bench.path:load", engine_process=process, lease=60.0, **env
        ) as it,
    ):
        it.wait_ready()
        server = int(redis.info("server")["process_id"])
        fields = {"model": "tiny", "max_tokens": tokens, "ignore_eos": True, "prompt": [1, 2, 3, 4]}
        ids = fill(redis, queues_of(redis, "tiny")[1], sequences, **fields)
        reader = multiprocessing.get_context("fork").Process(target=read, args=(url, ids), daemon=True)
        reader.start()
        counts = lambda: [redis.xlen(keys.stream(task_id)) for task_id in ids]  # noqa: E731
        it.wait_until(lambda: min(counts()) > tokens // 10, 600)
        pids = {"worker": it.process.pid, "store": server, "reader": reader.pid or 0}
        if process:
            pids["engine"] = _child_of(it.process.pid)
        before, first = {name: used(pid) for name, pid in pids.items()}, sum(counts())
        it.wait_until(lambda: max(counts()) > tokens * 9 // 10, 600)
        spent, made = {name: used(pid) - before[name] for name, pid in pids.items()}, sum(counts()) - first
        reader.join()
    if not made:
        raise SystemExit(f"all {tokens} tokens were made before the first look; give more --tokens")
    us = {name: {thread: round(1e6 * s / made, 2) for thread, s in by.most_common(8)} for name, by in spent.items()}
    sums = {name: round(1e6 * sum(by.values()) / made, 2) for name, by in spent.items()}
    return {"engine_process": process, "tokens": made, "us_a_token": sums, "threads": us}


def _child_of(pid: int) -> int:
    listed = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return next(int(child) for children in listed for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=3.4, help="what the device takes for a step")
    parser.add_argument("--engine-process", choices=["on", "off", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    turns = [False, True] if args.engine_process == "both" else [args.engine_process == "on"]
    for _ in range(args.rounds):
        for process in turns:
            print(json.dumps(measure(args.sequences, args.tokens, args.step_ms / 1e3, process)), flush=True)


if __name__ == "__main__":
    main()
