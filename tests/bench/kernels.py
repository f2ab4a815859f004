"""What kernels other than attention take on a GPU: `python -m tests.bench.kernels [--json OUT]`.

Of the shape of Llama 3.1 8B, for steps of 1 to 4096 tokens: norms, gate, rope with the cache's writing, and the layer's
four products with weights in bfloat16 (cuBLAS), 8-bit floats, and 8 and 4 bits. Each figure is the median of replays of
one CUDA graph over so many copies that none is left in L2. Shares are of what a GPU is taken to reach (default: an
H200's 4.3 TB/s, 780 TFLOP/s of bf16), whichever of the two takes longer. Exits with 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.kernels.packed import Int4Weight, Int8Weight
from tests.bench.attention import COLD, median_ms

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
#: Outputs and inputs of a layer's products.
PRODUCTS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH),
    "output": (WIDTH, HEADS * HEAD_DIM),
    "gate_up": (2 * HIDDEN, WIDTH),
    "down": (WIDTH, HIDDEN),
}
TOKENS = (1, 16, 64, 256, 1024, 4096)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def copies(size: int) -> int:
    """Of what takes `size` bytes, so that all together are several times L2."""
    return min(max(-(-COLD // size), 2), 64)


def parts(tokens: int) -> dict[str, tuple[float, int]]:
    """Milliseconds of one launch, and bytes that it has to move."""
    from engine.kernels.triton.fp8 import quantise_rows
    from engine.kernels.triton.gated import silu_mul
    from engine.kernels.triton.norm import add_rms_norm, rms_norm
    from engine.kernels.triton.rope_kv import rope_and_write

    weight, eps = noise(WIDTH), 1e-5
    row = 2 * tokens * WIDTH
    packed_heads = HEADS + 2 * KV_HEADS
    angles = noise(tokens, 1, HEAD_DIM)
    cache, slots = noise(2, -(-tokens // 16), 16, KV_HEADS, HEAD_DIM), torch.arange(tokens, device="cuda")
    makes: dict[str, tuple[int, Callable[[], tuple[Tensor, ...]], Callable[..., object]]] = {
        "rms_norm": (2 * row, lambda: (noise(tokens, WIDTH),), lambda x: rms_norm(x, weight, eps)),
        "add_rms_norm": (
            4 * row,
            lambda: (noise(tokens, WIDTH), noise(tokens, WIDTH)),
            lambda x, residual: add_rms_norm(x, residual, weight, eps),
        ),
        "silu_mul": (3 * 2 * tokens * HIDDEN, lambda: (noise(tokens, 2 * HIDDEN),), silu_mul),
        "rope_and_write": (
            2 * 2 * tokens * packed_heads * HEAD_DIM,
            lambda: (noise(tokens, packed_heads, HEAD_DIM),),
            lambda heads: rope_and_write(heads, angles, angles, cache, slots),
        ),
        "quantise_rows": (3 * tokens * WIDTH, lambda: (noise(tokens, WIDTH),), quantise_rows),
    }
    found = {}
    for name, (moved, make, run) in makes.items():
        inputs = [make() for _ in range(copies(moved))]
        found[name] = (_each(run, inputs), moved)
    return found


def _each(run: Callable[..., object], inputs: list[tuple[Any, ...]]) -> float:
    def all_of_them() -> None:
        for one in inputs:
            run(*one)

    return median_ms(all_of_them) / len(inputs)


def products(name: str, kind: str) -> dict[int, tuple[float, int, int]]:
    """By tokens: milliseconds, bytes of weights and activations, operations."""
    from engine.kernels.fp8 import fp8_linear
    from engine.kernels.gpu import Gpu
    from engine.kernels.triton.fp8 import quantise_rows

    outputs, inputs = PRODUCTS[name]
    gpu = Gpu(torch.bfloat16)
    weight = noise(outputs, inputs)
    size = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}[kind] * outputs * inputs
    linears = []
    packed = Int8Weight.quantise(weight) if kind == "int8" else Int4Weight.quantise(weight, 128)
    for _ in range(copies(int(size))):
        if kind == "bf16":
            linears.append(gpu.prepare_linear(weight.clone(), None))
        elif kind == "fp8":
            linears.append(fp8_linear(weight, None, quantise_rows))
        else:
            linears.append(gpu.prepare_quantised(replace(packed, packed=packed.packed.clone()), None))
    found = {}
    for tokens in TOKENS:
        x = noise(tokens, inputs)
        ms = _each(lambda linear, x: linear(x), [(linear, x) for linear in linears])
        found[tokens] = ms, int(size) + 2 * tokens * (inputs + outputs), 2 * tokens * inputs * outputs
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s")
    parser.add_argument("--tflops", type=float, default=780.0, help="of bf16; those of 8-bit floats count twice")
    parser.add_argument("--json", default=None, help="write all figures here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device to measure on", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "kernels": {}, "products": {}}

    def note(
        into: dict[int, Any], name: str, tokens: int, ms: float, moved: int, operations: int, tflops: float
    ) -> None:
        limit_ms = max(moved / args.bandwidth / 1e9, operations / tflops / 1e9)
        into[tokens] = {"ms": ms, "bytes": moved, "operations": operations, "share": limit_ms / ms}
        rate = f"{operations / ms / 1e9:6.1f} TFLOP/s" if operations / tflops > moved / args.bandwidth else ""
        print(
            f"{name:22} {tokens:5} tokens {1e3 * ms:9.1f} us {moved / ms / 1e6:7.0f} GB/s {limit_ms / ms:5.0%} {rate}",
            flush=True,
        )

    for tokens in TOKENS:
        for name, (ms, moved) in parts(tokens).items():
            note(found["kernels"].setdefault(name, {}), name, tokens, ms, moved, 0, args.tflops)
    kinds = ["bf16", "int8", "int4"]
    if torch.cuda.get_device_capability() >= (8, 9):
        kinds.insert(1, "fp8")
    for name in PRODUCTS:
        for kind in kinds:
            into = found["products"].setdefault(f"{name} {kind}", {})
            tflops = args.tflops * (2 if kind == "fp8" else 1)
            for tokens, (ms, moved, operations) in products(name, kind).items():
                note(into, f"{name} {kind}", tokens, ms, moved, operations, tflops)
            torch.cuda.empty_cache()
    if args.json is not None:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
