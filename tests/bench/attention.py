"""What attention takes on a GPU, alone: `python -m tests.bench.attention [--json OUT]`.

Decoding at batches of 1 to 256 with 1k of context each, as bytes moved in a second; prompts, alone and behind a cached
prefix, as floating-point operations in a second. Each figure is the median of replays of one CUDA graph over the caches
of so many layers that none is left in L2. Shares are of what a GPU is taken to reach (default: an H200's 4.3 TB/s and
780 TFLOP/s of bf16). Beside prompts stands torch's own attention over the same keys and values laid out plainly.
Exits with 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from engine.kernels import RaggedBatch

BLOCK = 16
#: Bytes of caches to go through before one is read again: several times an H200's L2.
COLD = 400 << 20
REPLAYS = 20


def median_ms(run: Callable[[], object]) -> float:
    """Of one call, replayed as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # who makes the tables
    with torch.cuda.stream(stream):
        run()  # compiles, and allocates what is kept
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def batch_of(lengths: list[tuple[int, int]]) -> RaggedBatch:
    """(tokens, places) of each sequence; blocks lie as they come after long use, anywhere."""
    device = torch.device("cuda")
    blocks = [-(-places // BLOCK) for _, places in lengths]
    own = torch.randperm(sum(blocks), device=device, dtype=torch.int32).split(blocks)
    tables = torch.nn.utils.rnn.pad_sequence(list(own), batch_first=True)
    counts = torch.tensor([0, *(count for count, _ in lengths)])
    return RaggedBatch(
        slots=torch.empty(0, dtype=torch.int64, device=device),  # attention does not write
        query_starts=counts.cumsum(0).int().to(device),
        kv_lens=torch.tensor([places for _, places in lengths], dtype=torch.int32, device=device),
        tables=tables,
        table_rows=torch.arange(len(lengths), dtype=torch.int32, device=device),
        most_queries=int(counts.max()),
        most_places=max(places for _, places in lengths),
    )


def measure(lengths: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int) -> dict[str, float]:
    """Milliseconds, bytes of keys, values, queries and results, and operations of one layer."""
    from engine.kernels.triton.attention import PagedAttention  # needs triton

    batch, attention = batch_of(lengths), PagedAttention()
    tokens, blocks = sum(count for count, _ in lengths), sum(-(-places // BLOCK) for _, places in lengths)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    layer_bytes = 2 * 2 * blocks * BLOCK * kv_heads * head_dim
    layers = min(max(-(-COLD // layer_bytes), 2), 64)
    query = torch.randn(tokens, heads, head_dim, **options)
    caches = [torch.randn(2, blocks, BLOCK, kv_heads, head_dim, **options) for _ in range(layers)]
    ms = median_ms(lambda: [attention(query, cache, batch, head_dim**-0.5) for cache in caches]) / layers
    # Query j of n behind p places sees p + j + 1.
    seen = sum(count * (places - count) + count * (count + 1) // 2 for count, places in lengths)
    kv_bytes = 2 * 2 * sum(places for _, places in lengths) * kv_heads * head_dim
    return {"ms": ms, "bytes": kv_bytes + 2 * 2 * query.numel(), "operations": 4 * seen * heads * head_dim}


def peer_ms(count: int, heads: int, head_dim: int) -> float:
    q, k, v = torch.randn(3, 1, heads, count, head_dim, dtype=torch.bfloat16, device="cuda")
    return median_ms(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s")
    parser.add_argument("--tflops", type=float, default=780.0)
    parser.add_argument("--json", default=None, help="write all figures here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device to measure on", file=sys.stderr)
        return 2
    shape = (args.heads, args.kv_heads, args.head_dim)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "shape": shape, "decode": {}, "prompt": {}}
    for batch in (1, 16, 64, 256):
        one = measure([(1, args.context)] * batch, *shape)
        one["share"] = one["bytes"] / one["ms"] / 1e9 / args.bandwidth
        found["decode"][batch] = one
        print(
            f"decode {batch:4} x {args.context}: {1e3 * one['ms']:8.1f} us a layer, {one['bytes'] / 1e6:7.1f} MB, "
            f"{one['bytes'] / one['ms'] / 1e9:5.2f} TB/s, {one['share']:4.0%} of {args.bandwidth}",
            flush=True,
        )
    for count, places in ((1024, 1024), (8192, 8192), (64, 8192), (2048, 32768)):
        one = measure([(count, places)], *shape)
        tflops = one["operations"] / one["ms"] / 1e9
        one["share"] = tflops / args.tflops
        line = f"prompt {count:5} of {places:5}: {1e3 * one['ms']:8.1f} us a layer, {tflops:6.1f} TFLOP/s"
        if count == places:
            one["torch_ms"] = peer_ms(count, args.heads, args.head_dim)
            line += f"; torch's attention {1e3 * one['torch_ms']:8.1f} us"
        found["prompt"][f"{count} of {places}"] = one
        print(f"{line}, {one['share']:4.0%} of {args.tflops:.0f}", flush=True)
    # Decodes beside the chunk of a prompt, and one long sequence among short ones.
    for name, lengths in (
        ("64 decodes and a chunk of 512", [(1, args.context)] * 64 + [(512, 1024)]),
        ("64 decodes, one of 32768", [(1, args.context)] * 63 + [(1, 32768)]),
    ):
        one = measure(lengths, *shape)
        found[name] = one
        print(f"{name}: {1e3 * one['ms']:8.1f} us a layer, {one['bytes'] / one['ms'] / 1e9:5.2f} TB/s", flush=True)
    if args.json is not None:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
