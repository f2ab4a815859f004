"""Checkpoints of one model, say in bf16, 8 and 4 bits, by the same jobs in turns in one process.

    python -m tests.bench.checkpoints qwen3-b qwen3-b-int8 qwen3-b-int4 --workload W1,W8 --threads 2

The first is what the others are compared with: output tokens by the clock and by processor time, the medians of the
ratios of each round, and of each checkpoint the best round.
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import ExitStack

import torch

from engine import Engine, EngineConfig
from engine.bench.offline import run_jobs, warm_up, workload
from engine.bench.options import WORKLOADS
from engine.text.config import Config, read_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders; the first is compared with")
    parser.add_argument("--workload", default="W1,W8", help=f"several by commas, of {', '.join(WORKLOADS)}")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = EngineConfig(
        dtype=args.dtype, device="cpu", threads=args.threads, kv_cache_bytes=256 << 20, max_model_len=1024
    )
    print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine.load(model, config)) for model in args.models]
        vocab_size = Config.of_model(read_config(args.models[0])).integer("vocab_size")
        for name in args.workload.split(","):
            for engine in engines:
                run_jobs(engine, warm_up(name, vocab_size, 0))
            rounds = [
                [run_jobs(engine, workload(name, vocab_size, 0, turn)) for engine in engines]
                for turn in range(args.rounds)
            ]
            for i, model in enumerate(args.models):
                clock = statistics.median(one[0]["wall_s"] / one[i]["wall_s"] for one in rounds)
                processor = statistics.median(one[0]["cpu_s"] / one[i]["cpu_s"] for one in rounds)
                best = max((one[i] for one in rounds), key=lambda run: run["output_tokens_per_s"])
                least = min(one[i]["cpu_s"] for one in rounds)
                print(
                    f"{name:4} {model}: {best['output_tokens_per_s']:.1f} output tokens/s, {least:.1f} s of processor "
                    f"  {clock:.2f} times by the clock, {processor:.2f} by processor time",
                    flush=True,
                )
    print(f"load average {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
