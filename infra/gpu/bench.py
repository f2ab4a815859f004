"""Measures an engine with random weights, and writes each figure as soon as it is known.

python infra/gpu/bench.py OUT.json --shape llama-8b --measures decode:1,decode:64,prefill,profile,offline

   decode:N    milliseconds for a step in which N sequences decode, at a context of about 1,024 tokens
   prefill     prompt tokens a second, with prompts of 1,024 tokens
   offline     256 requests at once of 1,000 prompt and 1,000 output tokens each; offline:16:1000:100 has other numbers
   profile:N   the device's time in a step of N sequences (without a number: 64), by kernels
   host:N      the host's time in such a step; run it last, because its timers stay in the engine

On a GPU, kernels are compiled first, as by `penstock warm`, and kernels compiled after that are reported. A short
run goes before each measure, so that graphs are recorded. With `--tiny`, everything is so small that a CPU runs it
in seconds, to test the bench itself. With `--quantization`, `--kv-cache-dtype` or `--deterministic` the engine computes
in that way, and no limits are given. If the KV cache does not hold that many requests, `offline` makes as many as it
holds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from engine import Engine, EngineConfig
from engine.bench.breakdown import Meter
from engine.bench.offline import Job, run_jobs
from engine.roofline import Speed, Work, speed_of
from infra.gpu.compiled import count_compiled
from infra.gpu.random_engine import random_engine
from infra.gpu.shapes import SHAPES
from infra.gpu.step_parts import load_profiler, profiled
from infra.gpu.steps import Steps

#: The wanted shares of the limit.
GOALS = {"decode:1": 0.80, "decode:16": 0.75, "decode:64": 0.72, "decode:256": 0.70, "prefill": 0.60, "offline": 0.60}


class Bench:
    """Takes figures of one engine. `measure` adds to `figures` and writes them."""

    def __init__(self, out: Path, shape: str, device: torch.device, mode: dict[str, Any], *, tiny: bool) -> None:
        """`mode`: the options of EngineConfig that change the arithmetic, and with it the limits: none are given."""
        self._out, self._shape, self._device, self._mode, self._tiny = out, shape, device, mode, tiny
        self._config = SHAPES[shape]
        self._work = Work.of(self._config)
        self._speed: Speed | None = None
        self.figures: dict[str, Any] = {"shape": shape, "device": str(device), "measures": {}} | mode
        if device.type == "cuda":
            self.figures["gpu"] = torch.cuda.get_device_name(device)
            self._speed = None if mode else speed_of(self.figures["gpu"])
        self._ids = random.Random(1234)  # noqa: S311  # data, not secrets
        self.sequences, self.length = (8, 160) if tiny else (256, 2304)
        self.context, self.outputs = (64, 24) if tiny else (1024, 192)

    def warm(self) -> None:
        """Compile the shape's kernels into Triton's cache."""
        if self._device.type != "cuda" or find_spec("triton") is None:
            return
        from engine.execution.warm import architecture_here, default_cache, warm

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self._config))
            made = warm(Path(folder), architecture_here(), default_cache(), max_num_seqs=self.sequences, **self._mode)
        built = sum(not one.cached for one in made.builds)
        self.figures["warm"] = {
            "kernels": len(made.builds),
            "built": built,
            "seconds": made.seconds,
            "verified": made.verified,
        }
        self.save()

    def load(self) -> Engine:
        began = time.perf_counter()
        config = EngineConfig(
            max_num_seqs=self.sequences,
            max_model_len=self.length,
            enable_prefix_caching=False,
            # A CPU's profiler only sees torch's operations. There, this only tests the bench itself.
            kernels="auto" if self._device.type == "cuda" else "cpu",
            **self._mode,
        )
        engine = random_engine(self._shape, config, self._device)
        stats = engine.stats()
        self.figures["engine"] = {
            "load_s": time.perf_counter() - began,
            "kernels": stats.kernels,
            "compute_dtype": stats.compute_dtype,
            "kv_tokens": stats.kv_tokens_total,
        }
        self.save()
        return engine

    def save(self) -> None:
        beside = self._out.with_suffix(".part")
        beside.write_text(json.dumps(self.figures, indent=1) + "\n")
        beside.replace(self._out)

    def measure(self, engine: Engine, name: str) -> None:
        kind, *counts = name.split(":")
        began = time.perf_counter()
        try:
            found = getattr(self, f"_{kind}")(engine, *map(int, counts))
        except Exception as error:  # noqa: BLE001  # a failed measure must not lose the other figures
            found = {"error": f"{type(error).__name__}: {error}"}
        found["took_s"] = time.perf_counter() - began
        if name in GOALS and found.get("share") is not None:
            found |= {"goal": GOALS[name], "met": found["share"] >= GOALS[name]}
        self.figures["measures"][name] = found
        self.save()
        print(name, json.dumps(found), flush=True)

    def _prompt(self, length: int) -> list[int]:
        return [self._ids.randrange(2, self._config["vocab_size"]) for _ in range(length)]

    def _jobs(self, count: int, prompt: int, output: int) -> list[Job]:
        return [(self._prompt(prompt), output) for _ in range(count)]

    def _decode(self, engine: Engine, batch: int) -> dict[str, Any]:
        batch = min(batch, self.sequences)
        prompt = self.context - self.outputs // 2
        run_jobs(engine, self._jobs(batch, prompt, 8))
        steps = Steps(engine, batch, self.outputs)
        steps.run(self._jobs(batch, prompt, self.outputs))
        spans, made = steps.whole()
        context = prompt + statistics.fmean(made)
        step_s = statistics.median(spans)
        found: dict[str, Any] = {
            "batch": batch,
            "context": context,
            "step_ms": step_s * 1e3,
            "step_ms_p95": sorted(spans)[int(0.95 * len(spans))] * 1e3,
            "steps": len(spans),
            "tokens_per_s": batch / step_s,
        }
        if self._speed is not None:
            limit = self._work.step_s(self._speed, batch, context)
            found |= {"limit_ms": limit * 1e3, "share": limit / step_s}
        return found

    def _prefill(self, engine: Engine) -> dict[str, Any]:
        length, count = self.context, min(64, self.sequences)
        run_jobs(engine, self._jobs(count // 4, length, 1))
        wall = min(run_jobs(engine, self._jobs(count, length, 1))["wall_s"] for _ in range(2))
        found: dict[str, Any] = {"prompt": length, "prompts": count, "tokens_per_s": count * length / wall}
        if self._speed is not None:
            limit = self._work.prefill_tokens_per_s(self._speed, length)
            found |= {"limit_tokens_per_s": limit, "share": found["tokens_per_s"] / limit}
        return found

    def _offline(self, engine: Engine, most: int = 256, prompt: int = 1000, output: int = 1000) -> dict[str, Any]:
        if self._tiny:
            prompt, output = min(prompt, 60), min(output, 60)
        count = held(engine.stats().kv_tokens_total, min(most, self.sequences), prompt + output)
        run_jobs(engine, self._jobs(count, prompt, 2))
        run = run_jobs(engine, self._jobs(count, prompt, output))
        found: dict[str, Any] = {"requests": count, "prompt": prompt, "output": output}
        found |= {name: run[name] for name in ("wall_s", "output_tokens_per_s", "ttft_p50_s", "tpot_mean_ms")}
        if self._speed is not None:
            limit = self._work.offline_tokens_per_s(self._speed, count, prompt, output)
            found |= {"limit_tokens_per_s": limit, "share": run["output_tokens_per_s"] / limit}
        return found

    def _host(self, engine: Engine, batch: int = 64) -> dict[str, Any]:
        batch, meter = min(batch, self.sequences), Meter()
        prompt = self.context - self.outputs // 2
        meter.watch(engine)
        run_jobs(engine, self._jobs(batch, prompt, self.outputs))
        return {"batch": batch, **meter.report()["decode"]}

    def _profile(self, engine: Engine, batch: int = 64) -> dict[str, Any]:
        batch = min(batch, self.sequences)
        prompt = self.context - self.outputs // 2
        steps = Steps(engine, batch, self.outputs)
        with profiled(steps, count=min(20, self.outputs // 4)) as found:
            steps.run(self._jobs(batch, prompt, self.outputs))
        return {"batch": batch, **found}


def held(kv_tokens: int, most: int, tokens: int) -> int:
    """The number of sequences of `tokens` tokens that a KV cache of `kv_tokens` holds at once, from 1 to `most`."""
    return max(1, min(most, kv_tokens // (tokens + EngineConfig().block_size)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--measures", required=True, help="separated by commas")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--kv-cache-dtype", choices=["int8", "fp8"])
    parser.add_argument("--deterministic", action="store_true", default=None)
    args = parser.parse_args()
    modes = {name: getattr(args, name) for name in ("quantization", "kv_cache_dtype", "deterministic")}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    mode = {name: value for name, value in modes.items() if value is not None}
    bench = Bench(args.out, args.shape, device, mode, tiny=args.tiny)
    bench.save()
    load_profiler()
    bench.warm()
    with count_compiled() as compiled, bench.load() as engine:
        for name in args.measures.split(","):
            bench.measure(engine, name)
            bench.figures["compiled"] = {"built": compiled.built, "from_cache": compiled.cached}
            bench.save()
    return int(any("error" in found for found in bench.figures["measures"].values()))


if __name__ == "__main__":
    sys.exit(main())
