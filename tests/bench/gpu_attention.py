"""Time of attention alone on a GPU: `python -m tests.bench.gpu_attention [--json OUT]`.

Heads of the shape of Llama 3.1 8B. Decoding at batches of 1 to 256 with 1k of context each, as bytes moved in a second;
prompts, alone and behind a cached prefix, as floating-point operations in a second. Each figure is the median of
replays of one CUDA graph over the caches of so many layers that none is left in L2. Shares are of what the GPU reaches
at best (engine/roofline.py; an H200's where it is not listed there). Beside prompts stands torch's own attention over
the same keys and values laid out plainly. Exits with 2 where there is no CUDA device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.kernels import RaggedBatch
from tests.bench.gpu import DEVICE, arguments, copies, device_name, median_ms, write

BLOCK = 16
#: Tokens and places of each sequence.
Lengths = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of one layer, and by how much lengths are divided."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    divisor: int = 1

    def places(self, count: int) -> int:
        return max(count // self.divisor, 1)

    @property
    def context(self) -> int:
        return self.places(1024)


TINY = Shape(heads=4, kv_heads=2, head_dim=16, divisor=64)


def batch_of(lengths: Lengths) -> RaggedBatch:
    """Blocks lie as they come after long use, anywhere."""
    blocks = [-(-places // BLOCK) for _, places in lengths]
    own = torch.randperm(sum(blocks), device=DEVICE, dtype=torch.int32).split(blocks)
    counts = torch.tensor([0, *(count for count, _ in lengths)])
    return RaggedBatch(
        slots=torch.empty(0, dtype=torch.int64, device=DEVICE),  # attention does not write
        query_starts=counts.cumsum(0).int().to(DEVICE),
        kv_lens=torch.tensor([places for _, places in lengths], dtype=torch.int32, device=DEVICE),
        tables=torch.nn.utils.rnn.pad_sequence(list(own), batch_first=True),
        table_rows=torch.arange(len(lengths), dtype=torch.int32, device=DEVICE),
        most_queries=int(counts.max()),
        most_places=max(places for _, places in lengths),
    )


def measure(lengths: Lengths, shape: Shape) -> dict[str, float]:
    """Milliseconds, bytes of keys, values, queries and results, and operations of one layer."""
    from engine.kernels.triton.attention.paged import PagedAttention  # needs triton

    batch, attention = batch_of(lengths), PagedAttention()
    tokens, blocks = sum(count for count, _ in lengths), sum(-(-places // BLOCK) for _, places in lengths)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
    query = torch.randn(tokens, shape.heads, shape.head_dim, **options)
    place_bytes = 2 * 2 * shape.kv_heads * shape.head_dim
    caches = [
        torch.randn(2, blocks, BLOCK, shape.kv_heads, shape.head_dim, **options)
        for _ in range(copies(blocks * BLOCK * place_bytes))
    ]
    ms = median_ms(lambda: [attention(query, cache, batch, shape.head_dim**-0.5) for cache in caches]) / len(caches)
    # Query j of n behind p places sees p + j + 1.
    seen = sum(count * (places - count) + count * (count + 1) // 2 for count, places in lengths)
    moved = place_bytes * sum(places for _, places in lengths) + 2 * 2 * query.numel()
    return {"ms": ms, "bytes": moved, "operations": 4 * seen * shape.heads * shape.head_dim}


def peer_ms(count: int, shape: Shape) -> float:
    q, k, v = torch.randn(3, 1, shape.heads, count, shape.head_dim, dtype=torch.bfloat16, device=DEVICE)
    return median_ms(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def decodes(shape: Shape, bandwidth: float) -> dict[int, Any]:
    found = {}
    for batch in (1, 16, 64, 256) if shape.divisor == 1 else (1, 4):
        one = found[batch] = measure([(1, shape.context)] * batch, shape)
        rate = one["bytes"] / one["ms"] / 1e9
        one["share"] = rate / bandwidth
        print(
            f"decode {batch:4} x {shape.context}: {1e3 * one['ms']:8.1f} us a layer, {one['bytes'] / 1e6:7.1f} MB, "
            f"{rate:5.2f} TB/s, {one['share']:4.0%} of {bandwidth}",
            flush=True,
        )
    return found


def prompts(shape: Shape, tflops: float) -> dict[str, Any]:
    found = {}
    for count, places in ((1024, 1024), (8192, 8192), (64, 8192), (2048, 32768)):
        count, places = shape.places(count), shape.places(places)
        one = found[f"{count} of {places}"] = measure([(count, places)], shape)
        rate = one["operations"] / one["ms"] / 1e9
        one["share"] = rate / tflops
        line = f"prompt {count:5} of {places:5}: {1e3 * one['ms']:8.1f} us a layer, {rate:6.1f} TFLOP/s"
        if count == places:
            one["torch_ms"] = peer_ms(count, shape)
            line += f"; torch's attention {1e3 * one['torch_ms']:8.1f} us"
        print(f"{line}, {one['share']:4.0%} of {tflops:.0f}", flush=True)
    return found


def mixed(shape: Shape) -> dict[str, Any]:
    """Decodes beside the chunk of a prompt, and one long sequence among short ones."""
    found = {}
    few, chunk, many = shape.places(64), shape.places(512), shape.places(32768)
    decode = (1, shape.context)
    for name, lengths in (
        (f"{few} decodes and a chunk of {chunk}", [decode] * few + [(chunk, shape.context)]),
        (f"{few} decodes, one of {many}", [decode] * (few - 1) + [(1, many)]),
    ):
        one = found[name] = measure(lengths, shape)
        print(f"{name}: {1e3 * one['ms']:8.1f} us a layer, {one['bytes'] / one['ms'] / 1e9:5.2f} TB/s", flush=True)
    return found


def main() -> None:
    args = arguments(__doc__)
    shape = TINY if args.tiny else Shape()
    found: dict[str, Any] = {"device": device_name(), "shape": (shape.heads, shape.kv_heads, shape.head_dim)}
    found["decode"] = decodes(shape, args.bandwidth)
    found["prompt"] = prompts(shape, args.tflops)
    write(args.json, found | mixed(shape))


if __name__ == "__main__":
    main()
