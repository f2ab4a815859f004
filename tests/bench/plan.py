"""What a step costs before and after its forward pass: `python -m tests.bench.plan`.

Sequences that all decode, with the bundled model's tokenizer; tokens come from a list. Per step: `schedule` plans it,
`update` enters its tokens (detokeniser, stop conditions, prefix cache, events). With --ahead each step is planned
before the tokens of the one before it are entered: `foresee` and `schedule`, then `update` of the step before.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from engine.kv import KvSpace
from engine.params import SamplingParams
from engine.plan import Sampled, StepPlan
from engine.request import Request
from engine.text import Tokenizer
from tests.engine.stepping import made
from tests.processes import ROOT


def measure(sequences: int, steps: int, ahead: bool) -> dict[str, float]:
    tokenizer = Tokenizer.from_folder(ROOT / "workers" / "models" / "tiny")
    prompt = 128
    scheduler = made(
        spaces=[KvSpace(2 * sequences * -(-(prompt + steps + 8) // 16))],
        block_size=16,
        max_num_seqs=sequences,
        max_num_batched_tokens=sequences * prompt,
        max_model_len=prompt + steps + 8,
        new_detokenizer=tokenizer.new_detokenizer,
    )
    rng = random.Random(1)
    draw = tokenizer.vocab_size - 1
    for number in range(sequences):
        ids = [rng.randint(0, draw) for _ in range(prompt)]
        scheduler.add(
            Request(str(number), ids, SamplingParams(max_tokens=steps + 4, stop=("nowhere in it",), seed=number))
        )
    plans, updates = [], []
    before: StepPlan | None = None
    for step in range(steps + 1):
        start = time.thread_time()
        if before is not None:
            scheduler.foresee(before, lambda seq: False)
        plan = scheduler.schedule(time.monotonic())
        middle = time.thread_time()
        if plan is None or len(plan.rows) < sequences:
            raise RuntimeError("the sequences do not all run")
        sampled = [Sampled(rng.randint(0, draw)) for _ in plan.rows]
        ready = time.thread_time()
        # The tokens are as good for the one as for the other.
        entered = before if ahead else plan
        if entered is not None:
            scheduler.update(entered, sampled, time.monotonic())
        before = plan if ahead else None
        if step:  # the first computes the prompts
            plans.append((middle - start) * 1e3)
            updates.append((time.thread_time() - ready) * 1e3)
    both = [a + b for a, b in zip(plans, updates, strict=True)]
    return {
        "sequences": sequences,
        "schedule_ms_p50": round(statistics.median(plans), 3),
        "update_ms_p50": round(statistics.median(updates), 3),
        "both_ms_p50": round(statistics.median(both), 3),
        "both_ms_p95": round(statistics.quantiles(both, n=20)[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ahead", action="store_true", help="plan each step before the one before it is entered")
    args = parser.parse_args()
    print(json.dumps(measure(args.sequences, args.steps, args.ahead), indent=2))


if __name__ == "__main__":
    main()
