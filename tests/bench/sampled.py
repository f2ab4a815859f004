"""What decoding attention takes without native kernels: `python -m tests.bench.sampled [--threads 2]`.

By reading keys and values where they lie (kernels/fallback/sampled.py), and by gathering them for torch's attention, in
turns over the caches of so many layers that none is left in the processor's cache. Each figure is the least of all
calls: milliseconds of the processor, of the thread that steps and of all; on a busy machine set GOMP_SPINCOUNT=0, so
that none waits at work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from engine.kernels import RaggedBatch
from engine.kernels.fallback.cpu import Cpu
from engine.kernels.fallback.sdpa import Sdpa

BLOCK = 16
#: Sequences, query heads, KV heads, head size, places.
SHAPES = (
    (1, 9, 3, 64, 192),
    (32, 9, 3, 64, 192),
    (16, 16, 16, 64, 256),
    (4, 16, 8, 128, 2048),
    (8, 32, 8, 128, 1024),
    (32, 14, 2, 64, 192),
    (8, 32, 4, 128, 512),
)
#: Bytes of caches to go through before one is read again.
COLD = 128 << 20


def measure(sequences: int, heads: int, kv_heads: int, head_dim: int, places: int, calls: int) -> list[list[float]]:
    """[[ms of the thread that steps, of all], ...]: sampled, and gathered."""
    each = -(-places // BLOCK)
    blocks = sequences * each
    layers = max(2, COLD // (8 * blocks * BLOCK * kv_heads * head_dim))
    caches = [torch.randn(2, blocks + 1, BLOCK, kv_heads, head_dim) for _ in range(layers)]
    tables = torch.randperm(blocks).int().view(sequences, each)
    lens = torch.tensor([places - i % 7 for i in range(sequences)], dtype=torch.int32)
    kernels = Cpu(torch.float32)
    batch = RaggedBatch(
        slots=torch.empty(0, dtype=torch.int64),
        query_starts=torch.arange(sequences + 1, dtype=torch.int32),
        kv_lens=lens,
        tables=tables,
        table_rows=torch.arange(sequences, dtype=torch.int32),
        most_queries=1,
        most_places=places,
    )
    gathered = Sdpa.arrange(kernels, batch, BLOCK, blocks)
    kernels.prepare_attention(1, 1, head_dim, None)
    # However many share a KV head: where these are too many is for this to tell.
    kernels._heads = heads, kv_heads
    sampled = kernels.arrange(batch, BLOCK, blocks)
    query = torch.randn(sequences, heads, head_dim)

    def attend(batch: RaggedBatch) -> Callable[[int], object]:
        return lambda call: kernels.paged_attention(query, caches[call % layers], batch, head_dim**-0.5)

    runs = [attend(batch) for batch in (sampled, gathered)]
    found = [[float("inf")] * 2 for _ in runs]
    for call in range(calls):
        for run, least in zip(runs, found, strict=True):
            began = time.thread_time(), time.process_time()
            run(call)
            took = time.thread_time() - began[0], time.process_time() - began[1]
            least[:] = [min(old, 1e3 * new) for old, new in zip(least, took, strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calls", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = ("where they lie", "gathered")
    for shape in SHAPES:
        sequences, heads, kv_heads, head_dim, places = shape
        print(f"{sequences} rows of {places} places, {heads} heads of {head_dim} on {kv_heads}:")
        with torch.inference_mode():
            for name, (own, all_of_them) in zip(names, measure(*shape, args.calls), strict=True):
                print(f"  {name:22} {own:7.3f} ms of the stepping thread, {all_of_them:7.3f} of all", flush=True)


if __name__ == "__main__":
    main()
