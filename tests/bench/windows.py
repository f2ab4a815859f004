"""What sliding windows save: `python -m tests.bench.windows`.

A Gemma 3 of random weights, five of six layers behind a window, and the same weights with a window that no sequence
outgrows. Four sequences of `--prompt` tokens decode; times are of the processor, on one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from engine.execution.runner import Runner
from engine.kv import KvSpace
from engine.models import load_model
from engine.params import SamplingParams
from engine.request import Request
from tests.engine.random_models import FAMILIES, write_model
from tests.engine.stepping import made

CONTEXT = 8192
SHAPE = {
    "num_hidden_layers": 6,
    "sliding_window_pattern": 6,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
}


def measure(window: int, sequences: int, prompt: int, steps: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        changes = FAMILIES["gemma3"] | SHAPE | {"sliding_window": window}
        model = load_model(write_model(Path(folder), tokenizer=False, **changes), "float32", torch.device("cpu"))
    spaces = [KvSpace(sequences * (prompt + steps) // 16 + 64, group.window) for group in model.kv_groups]
    runner = Runner(model, spaces=spaces, block_size=16, max_num_seqs=sequences)
    scheduler = made(
        spaces=spaces, block_size=16, max_num_seqs=sequences, max_num_batched_tokens=512, max_model_len=CONTEXT
    )
    generator = torch.Generator().manual_seed(0)
    for number in range(sequences):
        ids = torch.randint(model.vocab_size, (prompt,), generator=generator).tolist()
        scheduler.add(Request(str(number), ids, SamplingParams(max_tokens=steps + sequences * 8, temperature=0.0)))
    began = time.thread_time()
    times: list[float] = []
    while len(times) < steps:
        start = time.thread_time()
        plan = scheduler.schedule(0.0)
        if plan is None:
            raise RuntimeError("the sequences ended early")
        scheduler.update(plan, runner.execute(plan), 0.0)
        if plan.num_tokens > sequences:
            prefill = time.thread_time() - began
        else:
            times.append(time.thread_time() - start)
            held = [len(table.blocks) for table in plan.rows[0].seq.tables]
    return {
        "window": window,
        "layers": [group.layers for group in model.kv_groups],
        "blocks_of_a_sequence": held,
        "prefill_s": round(prefill, 2),
        "decode_step_ms_p50": round(statistics.median(times) * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for window in (args.window, CONTEXT):
        print(json.dumps(measure(window, 4, args.prompt, args.steps)))


if __name__ == "__main__":
    main()
