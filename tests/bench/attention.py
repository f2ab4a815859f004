"""What attention takes in native kernels, against another build: `python -m tests.bench.attention --against OTHER.so`.

Prompts in chunks and sequences that decode, over as many layers as a model has, in blocks in order; and over one layer
again and again, which then lies near: what is left is computing. By turns in one process: the least of the rounds by
the clock, and the median of the rounds' ratios. With other work about, `chrt -f 1` before the command keeps the cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels import RaggedBatch
from engine.kernels.native import Native, load_library
from engine.kernels.native.library import Library

BLOCK = 16
#: Name -> (sequences, places that each sees, queries of each).
CASES = {
    "a prompt of 512": (1, 512, 512),
    "2 prompts of 256": (2, 256, 256),
    "128 of a prompt behind 512": (1, 640, 128),
    "64 that decode, 400 places": (64, 400, 1),
    "32 that decode, 192 places": (32, 192, 1),
    "1 that decodes, 192 places": (1, 192, 1),
}


def batch_of(sequences: int, places: int, queries: int, near: bool) -> RaggedBatch:
    """`near`: all sequences lie in the same blocks."""
    blocks = -(-places // BLOCK)
    first = torch.zeros(sequences, dtype=torch.int32) if near else torch.arange(sequences, dtype=torch.int32) * blocks
    return RaggedBatch(
        slots=torch.zeros(sequences * queries, dtype=torch.int64),
        query_starts=torch.tensor([0, *accumulate([queries] * sequences)], dtype=torch.int32),
        kv_lens=torch.full((sequences,), places, dtype=torch.int32),
        tables=first[:, None] + torch.arange(blocks, dtype=torch.int32),
        table_rows=torch.arange(sequences, dtype=torch.int32),
        most_queries=queries,
        most_places=blocks * BLOCK,
    )


def took(kernels: Native, query: Tensor, caches: list[Tensor], batch: RaggedBatch) -> float:
    began = time.perf_counter()
    for cache in caches:
        kernels.paged_attention(query, cache, batch, query.shape[-1] ** -0.5)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="a build of another source, of the same version")
    parser.add_argument("--shape", default="9,3,64", help="heads, KV heads, head size")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    heads, kv_heads, head_dim = map(int, args.shape.split(","))
    own = load_library()
    if own is None:
        raise SystemExit("native kernels are not built for this CPU")
    both = [Native(torch.bfloat16, library, args.threads) for library in (own, Library(args.against, "other"))]
    for name, (sequences, places, queries) in CASES.items():
        query = torch.randn(sequences * queries, heads, head_dim)
        for near in (False, True):
            batch = batch_of(sequences, places, queries, near)
            blocks = int(batch.tables.max()) + 1
            layers = 1 if near else args.layers
            cache = both[0].zero_cache(layers, 2, blocks, BLOCK, kv_heads, head_dim, device=torch.device("cpu"))
            cache.copy_(torch.randn(cache.shape))
            caches = list(cache) * (args.layers if near else 1)
            rounds = [[took(kernels, query, caches, batch) for kernels in both] for _ in range(1 + args.rounds)][1:]
            ours, others = (min(took[which] for took in rounds) for which in (0, 1))
            print(
                f"{name:>27}{', near' if near else '':6}: {1e3 * ours:6.1f} ms, the other {1e3 * others:6.1f}; "
                f"{statistics.median(ours / others for ours, others in rounds):.2f} times as long",
                flush=True,
            )


if __name__ == "__main__":
    main()
