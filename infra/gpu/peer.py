"""Runs transformers' continuous batching on requests like those of bench.py's `short`.

    python infra/gpu/peer.py OUT.json --like SHORT.json

SHORT.json, written by bench.py, has the model's shape, and the number and sizes of the requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from engine.bench.peer import run_jobs
from infra.gpu.random_engine import random_peer
from infra.gpu.shapes import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--like", type=Path, required=True)
    args = parser.parse_args()
    ours = json.loads(args.like.read_text())
    shape, wanted = ours["shape"], ours["measures"]["short"]
    count, prompt, output = (wanted[name] for name in ("requests", "prompt", "output"))
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    model = random_peer(shape, device)
    model.generation_config.eos_token_id = None
    model.generation_config.do_sample = False
    page = 256 if device.type == "cuda" else 32
    settings: dict[str, Any] = {
        "page_size": page,
        # The name of the same setting in other versions.
        "block_size": page,
        "num_blocks": count * -(-(prompt + output + 1) // page) + count + 8,
        "max_batch_tokens": 8192 if device.type == "cuda" else 1024,
        "max_requests_per_batch": count + 1,
        "allow_block_sharing": False,
        "auto_switch_to_flash": False,
    }
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    if "page_size" in known:
        known.discard("block_size")
    ids = random.Random(99)  # noqa: S311  # data, not secrets

    def jobs(outputs: int) -> list[tuple[list[int], int]]:
        vocabulary = SHAPES[shape]["vocab_size"]
        return [([ids.randrange(2, vocabulary) for _ in range(prompt)], outputs) for _ in range(count)]

    library: Any = transformers
    with model.continuous_batching_context_manager(
        generation_config=library.GenerationConfig(
            max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**{k: v for k, v in settings.items() if k in known}),
        block=True,
        timeout=5,
    ) as manager:
        run_jobs(manager, jobs(4))
        run = run_jobs(manager, jobs(output))
        found = {"requests": count, "prompt": prompt, "output": output, "transformers": transformers.__version__}
        found |= {name: run[name] for name in ("wall_s", "output_tokens_per_s", "ttft_p50_s", "tpot_mean_ms")}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found), flush=True)
        # Its threads do not always end by themselves, and the figures are written.
        os._exit(0)


if __name__ == "__main__":
    main()
