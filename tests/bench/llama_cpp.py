"""GGUF files served by Penstock's engine and by llama.cpp, in turns on one machine.

    python -m tests.bench.llama_cpp SmolLM2.Q4_0.gguf SmolLM2.Q8_0.gguf --llama-cpp BUILD/bin --threads 2

Of each file and number of requests at one time: output tokens a second, prompts included, of the best round. llama.cpp
is its `llama-batched-bench`, with a prompt of its own for each request. Without --llama-cpp Penstock runs alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

from engine import Engine, EngineConfig, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="GGUF files")
    parser.add_argument("--llama-cpp", type=Path, help="the folder of llama-batched-bench")
    parser.add_argument("--requests", default="1,8,32", help="at one time; several by commas")
    parser.add_argument("--tokens", type=int, default=128, help="of a prompt, and of an output")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    counts = [int(count) for count in args.requests.split(",")]
    print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
    for model in args.models:
        ours, theirs = dict.fromkeys(counts, 0.0), dict.fromkeys(counts, 0.0)
        for turn in range(args.rounds):
            _keep_best(ours, _penstock(model, counts, args.tokens, args.threads, turn))
            if args.llama_cpp is not None:
                _keep_best(theirs, _llama_cpp(args.llama_cpp, model, counts, args.tokens, args.threads))
        for count in counts:
            times = f", llama.cpp {theirs[count]:.0f}: {ours[count] / theirs[count]:.2f} times" if theirs[count] else ""
            print(f"{Path(model).name}: {count} requests: {ours[count]:.0f} output tokens/s{times}", flush=True)
    print(f"load average {os.getloadavg()[0]:.1f}", flush=True)


def _keep_best(best: dict[int, float], rates: dict[int, float]) -> None:
    for count, rate in rates.items():
        best[count] = max(best[count], rate)


def _penstock(model: str, counts: list[int], tokens: int, threads: int, turn: int) -> dict[int, float]:
    """Output tokens a second by the number of requests. Prompts differ, so that none is in the prefix cache."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    config = EngineConfig(device="cpu", threads=threads, kv_cache_bytes=512 << 20, max_model_len=2 * tokens + 16)
    rates = {}
    with Engine.load(model, config) as engine:
        for count in counts:
            prompts = [
                [5 + (turn * 7919 + count * 131 + i + at * (i + 3)) % 250 for at in range(tokens)] for i in range(count)
            ]
            engine.generate([[6 + i] * 8 for i in range(count)], SamplingParams(max_tokens=4, ignore_eos=True))
            start = time.perf_counter()
            outputs = engine.generate(prompts, params)
            rates[count] = sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - start)
    return rates


def _llama_cpp(folder: Path, model: str, counts: list[int], tokens: int, threads: int) -> dict[int, float]:
    command = [str(folder / "llama-batched-bench"), "-m", model, "-c", str(2 * tokens * max(counts) + 64)]
    command += ["-npp", str(tokens), "-ntg", str(tokens), "-npl", ",".join(map(str, counts))]
    command += ["-t", str(threads), "-tb", str(threads), "--output-format", "jsonl"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return {row["pl"]: row["pl"] * row["tg"] / row["t"] for row in rows}


if __name__ == "__main__":
    main()
