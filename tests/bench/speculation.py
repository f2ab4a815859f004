"""What guessing tokens gains: the bundled model at Llama 135M's shape, with itself, small and disturbed, as its draft.

    python -m tests.bench.speculation --agreement 0.8,0.5,0.0 --workload W1,W8,W32 --threads 2
    python -m tests.bench.speculation --lookup --workload W1,W8

Of each workload (so many sequences at once, prompts of this repository's own text, sampled), engines with and without
run the same jobs in turns: without, with, without. They have the very same weights in memory, for two copies of them
differ in speed by up to three percent, by where they lie. Given are the ratios of output tokens by the clock and by
processor time, and what the first of the engine without was of its second: what of the ratio is chance. The medians
of the rounds. How much noise gives which agreement is found out first, on the small model, which says the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.models import Model, load_model
from tests.bench.inflated import disturb, inflate

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "workers" / "models" / "tiny-v2"
PROMPT = 96


def jobs(
    engine: Engine, count: int, turn: int, how: argparse.Namespace
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts cut out of this repository's own code, other ones each turn."""
    assert engine.tokenizer is not None
    source = random.Random(turn)
    files = sorted((REPOSITORY / "engine").glob("*.py"))
    prompts = []
    while len(prompts) < count:
        ids = engine.tokenizer.encode(source.choice(files).read_text())
        if len(ids) > PROMPT:
            start = source.randrange(len(ids) - PROMPT)
            prompts.append(ids[start : start + PROMPT])
    params = [
        SamplingParams(
            max_tokens=how.output, temperature=how.temperature, top_p=0.95, seed=source.getrandbits(32), ignore_eos=True
        )
        for _ in prompts
    ]
    return prompts, params


def agreement(draft: Path, how: argparse.Namespace) -> float:
    """The part of single guesses that are right."""
    config = EngineConfig(
        device="cpu",
        threads=1,
        kv_cache_bytes=64 << 20,
        speculate="draft",
        draft_model=str(draft),
        speculate_tokens=1,
        speculate_adaptive=False,
    )
    with Engine.load(MODEL, config) as engine:
        engine.generate(*jobs(engine, 16, 0, how))
        stats = engine.stats()
    return stats.draft_accepted / stats.drafted


def draft_of(wanted: float, folder: Path, how: argparse.Namespace) -> tuple[Path, float]:
    """A draft model that agrees about as often as is `wanted`."""
    low, high = 0.0, 4.0
    for _ in range(7):
        noise = (low + high) / 2
        found = agreement(disturb(MODEL, folder, noise), how)
        if abs(found - wanted) < 0.015:
            break
        low, high = (noise, high) if found > wanted else (low, noise)
    return folder, found


def timed(engine: Engine, count: int, turn: int, how: argparse.Namespace) -> tuple[float, float, list[list[int]]]:
    prompts, params = jobs(engine, count, turn, how)
    began, cpu = time.perf_counter(), time.process_time()
    found = engine.generate(prompts, params)
    return time.perf_counter() - began, time.process_time() - cpu, [one.token_ids for one in found]


def loaded(folder: Path, config: EngineConfig) -> Model:
    return load_model(folder, config.dtype, torch.device("cpu"), config.kernels)


def compare(large: Path, config: EngineConfig, plain: EngineConfig, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    model = loaded(large, plain)
    draft = None if config.draft_model is None else loaded(Path(config.draft_model), config)
    with (
        Engine(model, plain, folder=large, version="") as without,
        Engine(model, config, folder=large, version="", draft=draft) as guessing,
    ):
        for name in args.workload.split(","):
            count = int(name[1:])
            for engine in (without, guessing):
                timed(engine, count, 10_000, args)
            before = guessing.stats()
            clock, processor, itself, same = [], [], [], 0
            for turn in range(args.rounds):
                first = timed(without, count, turn, args)
                ours = timed(guessing, count, turn, args)
                last = timed(without, count, turn, args)
                clock.append((first[0] + last[0]) / 2 / ours[0])
                processor.append((first[1] + last[1]) / 2 / ours[1])
                itself.append(first[1] / last[1])
                same += sum(a == b for a, b in zip(first[2], ours[2], strict=True))
            after = guessing.stats()
            drafted = after.drafted - before.drafted
            tokens = after.generated_tokens - before.generated_tokens
            rows.append(
                {
                    "workload": name,
                    "clock": statistics.median(clock),
                    "processor": statistics.median(processor),
                    "processor_rounds": processor,
                    "clock_rounds": clock,
                    "without_against_itself": itself,
                    "drafted": drafted,
                    "accepted": after.draft_accepted - before.draft_accepted,
                    "tokens": tokens,
                    "steps": after.steps - before.steps,
                    "equal_outputs": same / (count * args.rounds),
                }
            )
            print(
                f"  {name:4} {rows[-1]['clock']:.2f} by the clock, {rows[-1]['processor']:.2f} by processor time   "
                f"{drafted / tokens:.2f} guessed and {rows[-1]['accepted'] / tokens:.2f} of these accepted a token   "
                f"equal outputs {rows[-1]['equal_outputs']:.3f}   "
                f"without against itself {min(itself):.2f} to {max(itself):.2f}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agreement", default="0.8,0.5,0.0", help="of single guesses of the draft; several by commas")
    parser.add_argument("--lookup", action="store_true", help="prompt lookup in place of a draft model")
    parser.add_argument("--workload", default="W1,W8,W32", help="W and how many sequences; several by commas")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--tokens", type=int, default=5, help="guessed at a time, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--json", default=None, help="write all figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    plain = EngineConfig(
        device="cpu",
        threads=args.threads,
        kv_cache_bytes=256 << 20,
        max_num_seqs=64,
        kernels=args.kernels,
        # The same jobs come several times.
        enable_prefix_caching=False,
    )
    report: dict[str, Any] = {"load_average_before": os.getloadavg(), "threads": args.threads}
    with tempfile.TemporaryDirectory() as place:
        large = inflate(MODEL, Path(place) / "large")
        how: dict[str, dict[str, Any]] = {"lookup": {"speculate": "lookup"}}
        if not args.lookup:
            how = {}
            for wanted in map(float, args.agreement.split(",")):
                folder, found = draft_of(wanted, Path(place) / f"draft-{wanted}", args)
                how[f"draft, agreement {found:.2f}"] = {"speculate": "draft", "draft_model": str(folder)}
        for name, settings in how.items():
            print(name, flush=True)
            guessing = replace(plain, speculate_tokens=args.tokens, **settings)
            report[name] = compare(large, guessing, plain, args)
    report["load_average_after"] = os.getloadavg()
    if args.json is not None:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
