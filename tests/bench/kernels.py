"""What kernels other than attention take on a GPU: `python -m tests.bench.kernels [--json OUT]`.

Of the shape of Llama 3.1 8B, for steps of 1 to 4096 tokens: norms, gate, rope with the cache's writing, and the layer's
four products with weights in bfloat16 (cuBLAS), 8-bit floats, and 8 and 4 bits. Each figure is the median of replays of
one CUDA graph over so many copies that none is left in L2. Shares are of what the GPU reaches at best in bandwidth or
operations, whichever takes longer (engine/roofline.py; an H200's where it is not listed there; 8-bit floats count
twice). Exits with 2 where there is no CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.kernels.packed import Int4Weight, Int8Weight
from tests.bench.gpu import DEVICE, arguments, copies, device_name, median_ms, write


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one layer, and the tokens of the steps to time."""

    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    tokens: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096)

    @property
    def packed_heads(self) -> int:
        """Heads of queries, keys and values together."""
        return self.heads + 2 * self.kv_heads

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the layer's products."""
        return {
            "qkv": (self.packed_heads * self.head_dim, self.width),
            "output": (self.width, self.heads * self.head_dim),
            "gate_up": (2 * self.hidden, self.width),
            "down": (self.width, self.hidden),
        }


TINY = Shape(width=128, hidden=256, heads=4, kv_heads=2, head_dim=32, tokens=(1, 4))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def parts(shape: Shape, tokens: int) -> dict[str, tuple[float, int]]:
    """Milliseconds of one launch, and bytes that it has to move."""
    from engine.kernels.triton.attention.rope_kv import rope_and_write
    from engine.kernels.triton.rowwise import add_rms_norm, quantise_rows, rms_norm, silu_mul

    width, hidden, head_dim = shape.width, shape.hidden, shape.head_dim
    weight, eps = noise(width), 1e-5
    row = 2 * tokens * width
    angles = noise(tokens, 1, head_dim)
    cache = noise(2, -(-tokens // 16), 16, shape.kv_heads, head_dim)
    slots = torch.arange(tokens, device=DEVICE)
    makes: dict[str, tuple[int, Callable[[], tuple[Tensor, ...]], Callable[..., object]]] = {
        "rms_norm": (2 * row, lambda: (noise(tokens, width),), lambda x: rms_norm(x, weight, eps)),
        "add_rms_norm": (
            4 * row,
            lambda: (noise(tokens, width), noise(tokens, width)),
            lambda x, residual: add_rms_norm(x, residual, weight, eps),
        ),
        "silu_mul": (3 * 2 * tokens * hidden, lambda: (noise(tokens, 2 * hidden),), silu_mul),
        "rope_and_write": (
            2 * 2 * tokens * shape.packed_heads * head_dim,
            lambda: (noise(tokens, shape.packed_heads, head_dim),),
            lambda heads: rope_and_write(heads, angles, angles, cache, slots),
        ),
        "quantise_rows": (3 * tokens * width, lambda: (noise(tokens, width),), quantise_rows),
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


def products(outputs: int, inputs: int, kind: str, steps: tuple[int, ...]) -> dict[int, tuple[float, int, int]]:
    """Milliseconds, bytes of weights and activations, and operations, by tokens of `steps`."""
    from engine.kernels.fp8 import fp8_linear
    from engine.kernels.gpu import Gpu
    from engine.kernels.triton.products.one_row import one_row_product
    from engine.kernels.triton.rowwise import quantise_rows

    gpu = Gpu(torch.bfloat16)
    weight = noise(outputs, inputs)
    size = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}[kind] * outputs * inputs
    linears = []
    packed = Int8Weight.quantise(weight) if kind == "int8" else Int4Weight.quantise(weight, 128)
    for _ in range(copies(int(size))):
        if kind == "bf16":
            linears.append(gpu.prepare_linear(weight.clone(), None))
        elif kind == "fp8":
            linears.append(fp8_linear(weight, None, quantise_rows, one_row_product))
        else:
            linears.append(gpu.prepare_quantised(replace(packed, packed=packed.packed.clone()), None))
    found = {}
    for tokens in steps:
        x = noise(tokens, inputs)
        ms = _each(lambda linear, x: linear(x), [(linear, x) for linear in linears])
        found[tokens] = ms, int(size) + 2 * tokens * (inputs + outputs), 2 * tokens * inputs * outputs
    return found


def main() -> None:
    args = arguments(__doc__)
    shape = TINY if args.tiny else Shape()
    found: dict[str, Any] = {"device": device_name(), "kernels": {}, "products": {}}

    def note(kind: str, name: str, tokens: int, ms: float, moved: int, operations: int = 0, fold: int = 1) -> None:
        """`fold`: how many times as fast as in bf16 the operations are."""
        by_bytes, by_operations = moved / args.bandwidth / 1e9, operations / (fold * args.tflops) / 1e9
        share = max(by_bytes, by_operations) / ms
        one = {"ms": ms, "bytes": moved, "operations": operations, "share": share}
        found[kind].setdefault(name, {})[tokens] = one
        rate = f"{operations / ms / 1e9:6.1f} TFLOP/s" if by_operations > by_bytes else ""
        print(
            f"{name:22} {tokens:5} tokens {1e3 * ms:9.1f} us {moved / ms / 1e6:7.0f} GB/s {share:5.0%} {rate}",
            flush=True,
        )

    for tokens in shape.tokens:
        for name, (ms, moved) in parts(shape, tokens).items():
            note("kernels", name, tokens, ms, moved)
    kinds = ["bf16", "int8", "int4"]
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        kinds.insert(1, "fp8")
    for name, (outputs, inputs) in shape.products.items():
        for kind in kinds:
            for tokens, (ms, moved, operations) in products(outputs, inputs, kind, shape.tokens).items():
                note("products", f"{name} {kind}", tokens, ms, moved, operations, 2 if kind == "fp8" else 1)
            torch.cuda.empty_cache()
    write(args.json, found)


if __name__ == "__main__":
    main()
