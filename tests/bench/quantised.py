"""Native products with weights in bf16, 8 and 4 bits, by turns in one process.

    python -m tests.bench.quantised --threads 1

Each of so many matrices, together larger than any cache, is multiplied once a turn: at one row that is how a step
reads.
"""

from __future__ import annotations

import argparse
import time

import torch

from engine.kernels.native import Native, load_library
from engine.kernels.packed import Int4Weight, Int8Weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--matrices", type=int, default=16)
    parser.add_argument("--outputs", type=int, default=6144)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=12)
    args = parser.parse_args()
    built = load_library()
    if built is None:
        raise SystemExit("native kernels are not built for this CPU")
    torch.set_num_threads(1)
    kernels = Native(torch.bfloat16, built, args.threads)
    given = torch.Generator().manual_seed(0)
    weights = [torch.randn(args.outputs, args.inputs, generator=given).bfloat16() for _ in range(args.matrices)]
    products = {
        "bf16": [kernels.prepare_linear(weight, None) for weight in weights],
        "int8": [kernels.prepare_quantised(Int8Weight.quantise(weight), None) for weight in weights],
        "int4, groups of 128": [
            kernels.prepare_quantised(Int4Weight.quantise(weight, 128), None) for weight in weights
        ],
    }
    for rows in (1, 8, 32, 128):
        x = torch.randn(rows, args.inputs, generator=given)
        least = dict.fromkeys(products, float("inf"))
        for _ in range(args.turns if rows < 32 else max(1, args.turns // 3)):
            for name, runs in products.items():
                began = time.perf_counter()
                for run in runs:
                    run(x)
                least[name] = min(least[name], time.perf_counter() - began)
        told = (f"{name} {1e3 * took:.1f} ms ({least['bf16'] / took:.2f}x)" for name, took in least.items())
        print(f"{rows:4d} rows: {', '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
