"""Runs transformers' continuous batching on requests like those of bench.py's `offline`.

    python infra/gpu/peer.py OUT.json --like SHORT.json

SHORT.json, written by bench.py, has this one measure, with the model's shape, and the number and sizes of the requests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from engine.bench.offline import Job
from engine.bench.peer import batching, run_jobs
from infra.gpu.random_engine import random_peer
from infra.gpu.shapes import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--like", type=Path, required=True)
    args = parser.parse_args()
    ours = json.loads(args.like.read_text())
    shape, (wanted,) = ours["shape"], ours["measures"].values()
    count, prompt, output = (wanted[name] for name in ("requests", "prompt", "output"))
    import transformers

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    ids = random.Random(99)  # noqa: S311  # data, not secrets

    def jobs(outputs: int) -> list[Job]:
        vocabulary = SHAPES[shape]["vocab_size"]
        return [([ids.randrange(2, vocabulary) for _ in range(prompt)], outputs) for _ in range(count)]

    page, step_tokens = (256, 8192) if device.type == "cuda" else (32, 1024)
    room = [([0] * prompt, output)] * count
    with batching(random_peer(shape, device), [room], page=page, step_tokens=step_tokens) as manager:
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
