"""What dividing a model among processes costs: ranks, or stages, and one process with as many threads.

    python -m tests.bench.ranks MODEL --ranks 2 --threads 2 --requests 8,32

Processor time says the same on a machine that is busy; tokens a second, by the clock, on a quiet one alone. The lead's
Python is its thread's time in a decode step outside native calls, the median of all. One load differs from the next by
a tenth and more: --turns.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import Engine, EngineConfig, SamplingParams
from engine.kernels.native import load_library

#: Tokens of each prompt and of each output.
PROMPT, OUTPUT = 128, 40
#: The library's functions that compute or wait.
NATIVE = ("layers", "layers_of_rank", "peaks", "peaks_of_ranks", "sum", "send", "gather")


class Steps:
    """The lead's thread time of each step, without that of native calls, in microseconds."""

    def __init__(self) -> None:
        """Make it before the engine: products look native functions up when they are made."""
        self.python: list[float] = []
        self._native = 0
        library = load_library()
        for name in NATIVE:
            setattr(library, name, self._timed(getattr(library, name)))

    def watch(self, engine: Engine) -> None:
        self._step = engine._pipeline.step
        engine._pipeline.step = self._counted  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.thread_time_ns()
            result = function(*arguments)
            self._native += time.thread_time_ns() - began
            return result

        return call

    def _counted(self) -> bool:
        self._native, began = 0, time.thread_time_ns()
        worked = self._step()
        self.python.append((time.thread_time_ns() - began - self._native) / 1e3)
        return worked


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", default="8,32")
    parser.add_argument("--turns", type=int, default=1, help="how often each is loaded and measured, in turns")
    args = parser.parse_args()
    greedy = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    steps = Steps()
    kinds = [(1, 1), (args.ranks, args.stages)]
    counts = [int(count) for count in args.requests.split(",")]
    medians: dict[tuple[bool, int], list[float]] = {
        (divided, count): [] for divided in (False, True) for count in counts
    }
    for turn in range(args.turns):
        for ranks, stages in kinds if turn % 2 == 0 else kinds[::-1]:
            config = EngineConfig(
                tensor_parallel=ranks, pipeline_parallel=stages, threads=args.threads, kv_cache_bytes=512 << 20
            )
            with Engine.load(args.model, config) as engine:
                processes = (os.getpid(), *engine.stats().rank_processes)
                steps.watch(engine)
                ids = random.Random(7)
                engine.generate([[5] * 8], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
                for count in counts:
                    vocabulary = range(100, engine._model.vocab_size)
                    prompts = [ids.choices(vocabulary, k=PROMPT) for _ in range(count)]
                    before = [processor_s(pid) for pid in processes]
                    steps.python.clear()
                    began = time.monotonic()
                    engine.generate(prompts, greedy)
                    seconds = time.monotonic() - began
                    spent = [round(processor_s(pid) - was, 2) for pid, was in zip(processes, before, strict=True)]
                    median = statistics.median(steps.python[-OUTPUT + 2 :])
                    medians[ranks * stages > 1, count].append(median)
                    print(
                        f"{ranks} x {stages} ranks, {count} requests: {count * OUTPUT / seconds:.0f} tokens/s by the "
                        f"clock, {sum(spent):.2f} s of processor time {spent}, Python {median:.0f} us a step",
                        flush=True,
                    )
    for count in counts:
        alone, divided = medians[False, count], medians[True, count]
        print(
            f"Python of {count} requests, mean and range: {statistics.mean(alone):.0f} us ({min(alone):.0f} to "
            f"{max(alone):.0f}), divided {statistics.mean(divided):.0f} ({min(divided):.0f} to {max(divided):.0f}): "
            f"{statistics.mean(divided) / statistics.mean(alone):.2f} times"
        )


if __name__ == "__main__":
    main()
