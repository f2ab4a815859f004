"""Steps as they come, launched where kernels were compiled ahead: python -m ... MODEL CACHE ARCH SEQUENCES [KV_DTYPE]

Prints as JSON what was compiled for them, which should be nothing. A process of its own, since Triton chooses when it
is imported whether kernels are compiled or interpreted, and since it must know of the kernels by the cache alone.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path

import torch

from engine.execution.device import DeviceRunner
from engine.execution.device.rehearsal import dummy_adapter, dummy_sequence
from engine.kernels.gpu import Gpu
from engine.kernels.triton.ahead import compiling_for
from engine.kv import KvSpace
from engine.models import shape_of
from engine.params import SamplingParams
from engine.plan import ScheduledSeq, StepPlan

WAYS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=20, min_p=0.1),
    SamplingParams(temperature=0.7, typical_p=0.9, frequency_penalty=0.5),
    SamplingParams(presence_penalty=0.3, logit_bias=((3, 1.0), (5, -2.0))),
    SamplingParams(temperature=1.3, top_p=0.5, logprobs=5),
]


@torch.inference_mode()
def main() -> None:
    folder, cache, arch, slots = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    draw = random.Random(1)
    kind = sys.argv[5] if len(sys.argv) > 5 else "auto"
    launches = 0
    with compiling_for(arch, cache) as builds:
        model = shape_of(folder, "auto", partial(Gpu, kv_cache_dtype=kind))
        runner = DeviceRunner(
            model,
            spaces=[KvSpace(5000, group.window) for group in model.kv_groups],
            block_size=16,
            max_num_seqs=slots,
            max_num_batched_tokens=700,
            max_model_len=model.context_length,
        )
        adapters = [dummy_adapter(model), dummy_adapter(model)]
        for _ in range(40):
            adapted = draw.random() < 0.5
            decodes = draw.random() < 0.5
            rows = []
            for slot in draw.sample(range(slots), draw.randint(1, slots)):
                tokens = draw.randint(1, 1000)
                count = 1 if decodes else draw.randint(1, min(tokens, 150))
                sequence = dummy_sequence(slot, tokens, draw.choice(WAYS), len(model.kv_groups), 16)
                sequence.adapter = draw.choice([None, *adapters]) if adapted else None
                rows.append(ScheduledSeq(sequence, tokens - count, count, samples=draw.random() < 0.8))
            runner.launch(StepPlan(rows, num_tokens=sum(row.count for row in rows)))
            launches += 1
    print(json.dumps({"steps": launches, "kernels": len(builds), "built": [b.kernel for b in builds if not b.cached]}))


if __name__ == "__main__":
    main()
