"""What the products of a layer take: native kernels against oneDNN's packed ones, or against another build.

    python -m tests.bench.products [--threads 2] [--against OTHER/_avx2.so]

Shapes of Llama 135M. All take turns, and each weight is used once in between. One thread by its processor time, the
best of the rounds; more by the clock, for waiting for each other counts, and as the median of the rounds' ratios too:
what else the machine does then is done to both. With other work about, `chrt -f 1` before the command keeps both cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.kernels import Kernels
from engine.kernels.fallback import Cpu
from engine.kernels.native import Native, load_library
from engine.kernels.native.library import Library

SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)]
LAYERS = 6
OPERATIONS = 2 * LAYERS * sum(inputs * outputs for inputs, outputs in SHAPES)
Products = list[list[Callable[[torch.Tensor], torch.Tensor]]]


def took(products: Products, rows: dict[int, torch.Tensor], clock: Callable[[], float]) -> float:
    began = clock()
    for layer in products:
        for (inputs, _), product in zip(SHAPES, layer, strict=True):
            product(rows[inputs])
    return clock() - began


def sets(args: argparse.Namespace) -> dict[str, Kernels]:
    library = load_library()
    if library is None:
        raise SystemExit("native kernels are not built for this CPU")
    own: dict[str, Kernels] = {"native, bf16": Native(torch.bfloat16, library, args.threads)}
    if args.against:
        other = Library(args.against, "other")
        return own | {"the other, bf16": Native(torch.bfloat16, other, args.threads)}
    return own | {"native, fp32": Native(torch.float32, library, args.threads), "oneDNN, fp32": Cpu(torch.float32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--against", type=Path, default=None, help="a build of another source, of the same version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="1,4,8,16,32,64,128,256")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    layers = {
        name: [
            [kernels.prepare_linear(torch.randn(o, i).to(kernels.weight_dtype), None) for i, o in SHAPES]
            for _ in range(LAYERS)
        ]
        for name, kernels in sets(args).items()
    }
    for rows in map(int, args.rows.split(",")):
        inputs = {i: torch.randn(rows, i) for i, _ in SHAPES}
        times: dict[str, list[float]] = {name: [] for name in layers}
        for turn in range(args.rounds + 1):
            for name, products in layers.items():
                seconds = took(products, inputs, clock)
                if turn:  # the first warms up
                    times[name].append(seconds)
        own = next(iter(times.values()))
        print(
            f"{rows:4} rows  "
            + "   ".join(
                f"{name} {1e3 * min(found) / LAYERS:.2f} ms ({rows * OPERATIONS / min(found) / 1e9:.0f} GFLOP/s"
                + f", {statistics.median(a / b for a, b in zip(found, own, strict=True)):.2f} times as long)"
                for name, found in times.items()
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
