"""Native products with weights in bf16, 8 and 4 bits, by turns in one process.

    python -m tests.bench.quantised --threads 1 [--against OTHER/_avx512bf16.so]

Each of so many matrices, together larger than any cache, is multiplied once a turn: at one row that is how a step
reads. Against another build of the same version, its products take turns with this one's, and the bits are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.kernels.native import Native, load_library
from engine.kernels.native.library import Library
from engine.kernels.packed import Int4Weight, Int8Weight

Products = dict[str, list[Callable[[torch.Tensor], torch.Tensor]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--matrices", type=int, default=16)
    parser.add_argument("--outputs", type=int, default=6144)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--against", type=Path, default=None, help="a build of another source, of the same version")
    args = parser.parse_args()
    built = load_library()
    if built is None:
        raise SystemExit("native kernels are not built for this CPU")
    torch.set_num_threads(1)
    given = torch.Generator().manual_seed(0)
    weights = [torch.randn(args.outputs, args.inputs, generator=given).bfloat16() for _ in range(args.matrices)]
    products = packed(Native(torch.bfloat16, built, args.threads), weights)
    if args.against:
        other = packed(Native(torch.bfloat16, Library(args.against, "other"), args.threads), weights)
        products |= {f"the other's {name}": runs for name, runs in other.items()}
    for rows in map(int, args.rows.split(",")):
        x = torch.randn(rows, args.inputs, generator=given)
        least = times(products, x, args.turns if rows < 32 else max(1, args.turns // 3))
        told = (f"{name} {1e3 * took:.1f} ms ({least['bf16'] / took:.2f}x)" for name, took in least.items())
        print(f"{rows:4d} rows: {', '.join(told)}{differing(products, x)}", flush=True)


def packed(kernels: Native, weights: list[torch.Tensor]) -> Products:
    return {
        "bf16": [kernels.prepare_linear(weight, None) for weight in weights],
        "int8": [kernels.prepare_quantised(Int8Weight.quantise(weight), None) for weight in weights],
        "int4, groups of 128": [
            kernels.prepare_quantised(Int4Weight.quantise(weight, 128), None) for weight in weights
        ],
    }


def times(products: Products, x: torch.Tensor, turns: int) -> dict[str, float]:
    least = dict.fromkeys(products, float("inf"))
    for _ in range(turns):
        for name, runs in products.items():
            began = time.perf_counter()
            for run in runs:
                run(x)
            least[name] = min(least[name], time.perf_counter() - began)
    return least


def differing(products: Products, x: torch.Tensor) -> str:
    """Tell which products of both builds differ."""
    pairs = [(name, runs[0], products.get(f"the other's {name}")) for name, runs in products.items()]
    odd = [name for name, run, other in pairs if other and not torch.equal(run(x), other[0](x))]
    return f"; DIFFERENT: {', '.join(odd)}" if odd else ""


if __name__ == "__main__":
    main()
