"""What the products of a layer take on one thread: native kernels against oneDNN's packed ones.

    python -m tests.bench.products

Shapes of Llama 135M. Processor time, the best of five, each weight used once in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.kernels import Kernels
from engine.kernels.cpu import Cpu
from engine.kernels.native import Native, load_library

SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)]
LAYERS = 6


def best_ms(call: Callable[[], None]) -> float:
    call()
    times = []
    for _ in range(5):
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return 1e3 * min(times) / LAYERS


def main() -> None:
    torch.set_num_threads(1)
    library = load_library()
    if library is None:
        raise SystemExit("native kernels are not built for this CPU")
    sets: dict[str, Kernels] = {
        "native, bf16": Native(torch.bfloat16, library, 1),
        "native, fp32": Native(torch.float32, library, 1),
        "oneDNN, fp32": Cpu(torch.float32),
    }
    layers = {
        name: [
            [kernels.prepare_linear(torch.randn(o, i).to(kernels.weight_dtype), None) for i, o in SHAPES]
            for _ in range(LAYERS)
        ]
        for name, kernels in sets.items()
    }
    for rows in (1, 4, 8, 16, 32, 64, 128, 256):
        inputs = {i: torch.randn(rows, i) for i, _ in SHAPES}

        def run(products: list[list[Callable[[torch.Tensor], torch.Tensor]]]) -> None:
            for layer in products:
                for (i, _), product in zip(SHAPES, layer, strict=True):
                    product(inputs[i])  # noqa: B023  # called within the round

        found = {name: best_ms(lambda products=products: run(products)) for name, products in layers.items()}
        print(f"{rows:4} rows  " + "   ".join(f"{name} {ms:.2f} ms" for name, ms in found.items()))


if __name__ == "__main__":
    main()
