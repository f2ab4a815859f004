"""Measures throughput and latency of the engine on fixed workloads.

    python -m engine.bench --model DIR --workload W1,W8,W32,W64mix --dtype bfloat16 --threads 2 --json OUT

W1, W8, W32: that many requests of 128 prompt and 128 output tokens, submitted at once. W64mix: 64 requests of 16 to 512
prompt and 16 to 256 output tokens. Sampling is greedy and ignores EOS. Every repeat has fresh token ids, so that no
prefix cache helps. A short warm-up runs first. With `--peer transformers-cb`, transformers' continuous batching then
runs the same requests in a process of its own, and the ratio of the best repeats is printed (for development: needs
transformers). With `--deterministic`, `--speculate` or `--tensor-parallel`, the plain mode runs the same requests in
turns, and the ratio is printed as well. These prompts are random tokens, so drafts are rarely right: `--speculate`
measures here what drafts cost. tests/bench/speculation.py measures what they gain. `--breakdown` prints the time of a
step's parts instead of throughput (breakdown.py), and `--load` latency by the rate of arrivals (load.py). On a CPU each
figure comes with its share of the machine's limit (ceilings.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig
from engine.bench.breakdown import Meter, shown
from engine.bench.ceilings import Ceilings, Work
from engine.bench.load import Arrival, bench_load, longest_of, serve
from engine.bench.options import SETTINGS, checked, every_argument
from engine.engine import device_named
from engine.errors import EngineError
from engine.execution.threads import threads_for
from engine.kernels import Kernels, select
from engine.models import load_model
from engine.text.config import Config, read_config

#: (prompt token ids, output tokens)
Job = tuple[list[int], int]
#: The lowest token id used. Most tokenizers have their special tokens below.
_FIRST_ID = 100
#: The engine's statistics that are told beside the figures.
REPORTED = ("dtype", "compute_dtype", "device", "kernels", "kv_tokens_total", "preemptions")


def workload(name: str, vocab_size: int, seed: int, repeat: int) -> list[Job]:
    """The jobs of a workload. Lengths depend on the seed alone, token ids on seed and repeat number."""
    lengths = random.Random(f"{seed}:{name}:len")  # noqa: S311  # data, not secrets
    ids = random.Random(f"{seed}:{name}:ids:{repeat}")  # noqa: S311
    if name == "W64mix":
        shapes = [(lengths.randint(16, 512), lengths.randint(16, 256)) for _ in range(64)]
    else:
        shapes = [(128, 128)] * int(name[1:])
    highest = min(vocab_size, 49152) - 1
    lowest = _FIRST_ID if highest > _FIRST_ID else 0
    return [([ids.randint(lowest, highest) for _ in range(prompt)], output) for prompt, output in shapes]


def warm_up(name: str, vocab_size: int, seed: int) -> list[Job]:
    return [(prompt[:32], 8) for prompt, _ in workload(name, vocab_size, seed, repeat=999)]


def measure(began: float, jobs: list[Job], times: list[list[float]], cpu_s: float) -> dict[str, float]:
    """The figures of one run, from the delivery time of each token of each job.

    `cpu_s`: the process's processor time. On a busy machine, two runs compare better by it than by wall-clock time.
    """
    wrong = [i for i, (job, at) in enumerate(zip(jobs, times, strict=True)) if len(at) != job[1]]
    if wrong:
        raise RuntimeError(f"jobs {wrong[:5]} ended with another number of tokens than was asked for")
    wall = max(at[-1] for at in times) - began
    output = sum(job[1] for job in jobs)
    first = sorted(at[0] - began for at in times)
    gaps = [(at[-1] - at[0]) / (len(at) - 1) for at in times if len(at) > 1]
    return {
        "wall_s": wall,
        "cpu_s": cpu_s,
        "prompt_tokens": sum(len(job[0]) for job in jobs),
        "output_tokens": output,
        "output_tokens_per_s": output / wall,
        "ttft_p50_s": statistics.median(first),
        "ttft_max_s": first[-1],
        "tpot_mean_ms": 1e3 * statistics.fmean(gaps) if gaps else 0.0,
    }


def run_jobs(engine: Engine, jobs: list[Job]) -> dict[str, float]:
    cpu_began = time.process_time()
    times, _ = serve(engine, [Arrival(0.0, prompt, output) for prompt, output in jobs], "job")
    return measure(0.0, jobs, [request.times for request in times], time.process_time() - cpu_began)


def workloads(args: argparse.Namespace, vocab_size: int) -> dict[str, list[list[Job]]]:
    """The jobs of each repeat of each workload."""
    return {
        name: [workload(name, vocab_size, args.seed, repeat) for repeat in range(args.repeats)]
        for name in args.workload
    }


def settings(args: argparse.Namespace, plans: dict[str, list[list[Job]]]) -> EngineConfig:
    """Settings with room for the jobs of `plans` and no more. Without plans, those of a worker."""
    every = [jobs for repeats in plans.values() for jobs in repeats]
    return EngineConfig(
        max_num_seqs=max(map(len, every), default=EngineConfig().max_num_seqs),
        max_model_len=max((len(prompt) + output for jobs in every for prompt, output in jobs), default=None),
        **{name: getattr(args, name) for name in SETTINGS},
    )


def bench_engines(args: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """Run the workloads. With `--deterministic`, `--speculate`, `--tensor-parallel` or `--pipeline-parallel`, the plain
    engine runs too, in turns, so that other load on the machine affects both."""
    plans = workloads(args, vocab_size)
    config = settings(args, plans)
    configs = {"penstock": config}
    if config.deterministic or config.speculate != "none" or config.ranks > 1:
        plain = replace(
            config,
            deterministic=False,
            speculate="none",
            draft_model=None,
            tensor_parallel=1,
            pipeline_parallel=1,
            nodes=1,
        )
        configs = {"plain": plain, "penstock": config}
    engines: dict[str, Engine] = {}
    results: dict[str, Any] = {}
    least: dict[str, float] = {}
    with ExitStack() as stack:
        for who, engine_config in configs.items():
            began = time.perf_counter()
            engines[who] = stack.enter_context(Engine.load(args.model, engine_config))
            results[who] = {"load_s": time.perf_counter() - began, "results": {}}
        if device_named(config.device).type == "cpu":
            least, results["ceilings"] = at_least(args, engines.get("plain", engines["penstock"]), plans)
        for name, repeats in plans.items():
            runs = in_turns(engines, warm_up(name, vocab_size, args.seed), repeats)
            for who in engines:
                results[who]["results"][name] = summary(name, who, runs[who], least.get(name))
        for who, engine in engines.items():
            stats = asdict(engine.stats())
            results[who] |= {name: stats[name] for name in REPORTED} | {"fingerprint": engine.fingerprint}
    return results


def in_turns(
    engines: dict[str, Engine], first: list[Job], repeats: list[list[Job]]
) -> dict[str, list[dict[str, float]]]:
    """The figures of each engine's runs. `first`: jobs to warm up with."""
    for engine in engines.values():
        run_jobs(engine, first)
    runs: dict[str, list[dict[str, float]]] = {who: [] for who in engines}
    for jobs in repeats:
        for who, engine in engines.items():
            runs[who].append(run_jobs(engine, jobs))
    return runs


def bench_breakdown(args: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """For each workload, break down the host's time and, on CUDA, the device's, with every kernel launched by
    itself."""
    plans = workloads(args, vocab_size)
    config = settings(args, plans)
    device = device_named(config.device)
    if device.type == "cpu":
        torch.set_num_threads(threads_for(config.threads, torch.get_num_threads()))
    runs: list[tuple[str, EngineConfig, torch.device | None]] = [("host", config, None)]
    if device.type == "cuda":
        runs.append(("device", replace(config, graphs=False, overlap=0), device))
    reports: dict[str, Any] = {name: {} for name in plans}
    for whose, how, timed in runs:
        meter = Meter(timed)
        model = load_model(args.model, config.dtype, device, partial(_timed, meter, config, device))
        draft = None if how.draft_model is None else load_model(how.draft_model, how.dtype, device, how.kernels)
        with Engine(model, how, folder=Path(args.model), version="", draft=draft) as engine:
            meter.watch(engine)
            for name, repeats in plans.items():
                run_jobs(engine, warm_up(name, vocab_size, args.seed))
                meter.forget()
                for jobs in repeats:
                    run_jobs(engine, jobs)
                reports[name][whose] = meter.report()
                print(shown(f"{name}, {whose}", reports[name][whose]), flush=True)
    return reports


def _timed(meter: Meter, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Kernels:
    return meter.kernels(
        select(device, dtype, config.kernels, config.quantization, config.deterministic, config.kv_cache_dtype)
    )


def at_least(
    args: argparse.Namespace, engine: Engine, plans: dict[str, list[list[Job]]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (the seconds that each workload takes at the machine's limits, these limits). Call it before anything
    else runs."""
    model = engine._model
    ceilings, work = Ceilings.measure(model.dtype), Work.of(model, args.model)
    print(
        f"limits: {ceilings.read_bytes_per_s / 1e9:.1f} GB/s read, {ceilings.operations_per_s / 1e9:.0f} GFLOP/s "
        f"on {torch.get_num_threads()} threads",
        flush=True,
    )
    least = {
        name: work.least_s([(len(prompt), output) for prompt, output in repeats[0]], ceilings)
        for name, repeats in plans.items()
    }
    return least, asdict(ceilings)


def summary(name: str, who: str, runs: list[dict[str, float]], least: float | None = None) -> dict[str, Any]:
    """Print and return the figures of a workload's runs. `least`: the seconds that it takes at the machine's limits, if
    known."""
    best = max(runs, key=lambda run: run["output_tokens_per_s"])
    share = {} if least is None else {"share_of_limit": least / best["wall_s"]}
    print(
        f"{name:7} {who:16} {best['output_tokens_per_s']:9.1f} output tokens/s   "
        f"TTFT p50 {best['ttft_p50_s']:.3f} s   TPOT {best['tpot_mean_ms']:.1f} ms   CPU {best['cpu_s']:.1f} s"
        + "".join(f"   {100 * part:.0f}% of the limit" for part in share.values()),
        flush=True,
    )
    return {"best_output_tokens_per_s": best["output_tokens_per_s"], "runs": runs} | share


def ratios(report: dict[str, Any], names: list[str], other: str) -> dict[str, float]:
    """The ratio of Penstock's output tokens/s to another's, for each workload."""
    quotients = {}
    for name in names:
        ours, theirs = (report[who]["results"][name]["best_output_tokens_per_s"] for who in ("penstock", other))
        quotients[name] = ours / theirs
        print(f"{name:7} {quotients[name]:.2f} times {other}", flush=True)
    return quotients


def bench_peer(args: argparse.Namespace) -> dict[str, Any]:
    """Run the same workloads on transformers, in a process of its own, so that the threads of both do not compete."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.json"
        command = [sys.executable, "-m", "engine.bench.peer", "--model", args.model, "--json", str(out)]
        command += ["--workload", ",".join(args.workload), "--dtype", args.peer_dtype or args.dtype]
        command += ["--repeats", str(args.repeats), "--seed", str(args.seed), "--device", args.device]
        if args.threads is not None:
            command += ["--threads", str(args.threads)]
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
        results: dict[str, Any] = json.loads(out.read_text())
        return results


def main() -> None:
    parser = every_argument(__doc__)
    args = checked(parser)
    try:
        report = run(args)
    except EngineError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except subprocess.CalledProcessError as error:
        parser.exit(1, f"{parser.prog}: {args.peer} ended with status {error.returncode}; what it said is above\n")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted\n")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Take all figures that `args` ask for. Raises EngineError if that is not possible."""
    config = Config.of_model(read_config(args.model))
    vocab_size = config.integer("vocab_size")
    _fit(args, vocab_size, config.context_length())
    report: dict[str, Any] = {"torch": torch.__version__, "seed": args.seed, "threads": args.threads}
    report["load_average_before"] = os.getloadavg()
    if args.load:
        report["load"] = bench_load(args, settings(args, {}), vocab_size)
    elif args.breakdown:
        report["breakdown"] = bench_breakdown(args, vocab_size)
    else:
        report |= bench_engines(args, vocab_size)
        if "plain" in report:
            report["ratio_to_plain"] = ratios(report, args.workload, "plain")
    if args.peer is not None:
        report[args.peer] = bench_peer(args)
        report["ratio"] = ratios(report, args.workload, args.peer)
    report["load_average_after"] = os.getloadavg()
    return report


def _fit(args: argparse.Namespace, vocab_size: int, context: int) -> None:
    """Raise EngineError, before anything is measured, if the model's context is too short for a workload or mix."""
    if args.load:
        option, longest = "mix", {name: longest_of(name) for name in args.mix}
    else:
        option = "workload"
        longest = {
            name: max(len(prompt) + output for prompt, output in workload(name, vocab_size, args.seed, repeat=0))
            for name in args.workload
        }
    for name, tokens in longest.items():
        if tokens > context:
            raise EngineError(
                f"{name} has requests of {tokens} tokens, and the model a context of {context}; leave it out of "
                f"--{option}"
            )
