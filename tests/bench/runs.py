"""What it is worth on a CPU that a sequence's KV blocks lie side by side: `python -m tests.bench.runs`.

Sequences come, grow in turns and go, so many times that a pool's blocks have been given out a few times over; then
native attention of those who decode is timed over their tables: by a pool that gives out single blocks, by one that
gives out runs (`engine.kv.blocks`), and over blocks in order. By turns in one process, over caches of as many layers as
no processor's own memory holds; the least of the rounds by the clock, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from itertools import pairwise

import torch
from torch import Tensor

from engine.kernels import RaggedBatch, select
from engine.kernels.native import Native
from engine.kv import BlockPool, Table

BLOCK = 16
RUNS = (1, 2, 4, 8)


def tables_of(run: int, sequences: int, prompt: int, output: int, turns: int) -> list[list[int]]:
    """Blocks of so many running sequences, of `prompt` and `output` blocks at most, after `turns` of as many."""
    choose = random.Random(7)
    pool = BlockPool(sequences * (prompt + output) * 2, run)
    running: list[tuple[Table, int]] = []
    names = iter(range(1 << 40))
    for _ in range(turns * (prompt + output)):
        for place in reversed(range(len(running))):
            table, wanted = running[place]
            if len(table.blocks) < wanted:
                table.lengthen(pool, 1)
                continue
            for block in table.blocks:
                pool.register(block, next(names).to_bytes(8, "little"))
            pool.release(table.blocks)
            del running[place]
        while len(running) < sequences:
            table = Table()
            table.lengthen(pool, choose.randint(1, prompt))
            running.append((table, len(table.blocks) + choose.randint(1, output)))
    return [table.blocks for table, _ in running]


class Decode:
    """One query of each sequence."""

    def __init__(self, tables: list[list[int]], heads: int, head_dim: int) -> None:
        count, most = len(tables), max(map(len, tables))
        self.queries = torch.randn(count, heads, head_dim)
        self.batch = RaggedBatch(
            slots=torch.zeros(count, dtype=torch.int64),
            query_starts=torch.arange(count + 1, dtype=torch.int32),
            kv_lens=torch.tensor([len(table) * BLOCK for table in tables], dtype=torch.int32),
            tables=torch.tensor([table + [0] * (most - len(table)) for table in tables], dtype=torch.int32),
            table_rows=torch.arange(count, dtype=torch.int32),
            most_queries=1,
            most_places=most * BLOCK,
        )

    def took(self, kernels: Native, caches: list[Tensor]) -> float:
        began = time.perf_counter()
        for cache in caches:
            kernels.paged_attention(self.queries, cache, self.batch, self.queries.shape[-1] ** -0.5)
        return time.perf_counter() - began


def pieces(tables: list[list[int]]) -> float:
    """Blocks of neighbours, on average."""
    broken = sum(after != before + 1 for table in tables for before, after in pairwise(table))
    return sum(map(len, tables)) / (len(tables) + broken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="9,3,64", help="heads, KV heads, head size")
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=32, help="blocks at most")
    parser.add_argument("--output", type=int, default=16, help="blocks at most")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    heads, kv_heads, head_dim = map(int, args.shape.split(","))
    kernels = select(torch.device("cpu"), torch.bfloat16, "native")
    assert isinstance(kernels, Native)
    kernels.use_threads(args.threads)
    tables = {f"runs of {run}": tables_of(run, args.sequences, args.prompt, args.output, 20) for run in RUNS}
    places = iter(range(1 << 40))
    tables["in order"] = [[next(places) for _ in table] for table in tables["runs of 1"]]
    blocks = 1 + max(block for all_of in tables.values() for table in all_of for block in table)
    cache = kernels.zero_cache(args.layers, 2, blocks, BLOCK, kv_heads, head_dim, device=torch.device("cpu"))
    for layer in cache:
        layer.copy_(torch.randn(layer.shape))
    decodes = {name: Decode(all_of, heads, head_dim) for name, all_of in tables.items()}
    rounds = [{name: one.took(kernels, list(cache)) for name, one in decodes.items()} for _ in range(args.rounds)]
    for name, all_of in tables.items():
        read = sum(map(len, all_of)) * BLOCK * kv_heads * head_dim * 2 * cache.element_size() * args.layers
        least = min(took[name] for took in rounds)
        ratio = statistics.median(took[name] / took["runs of 1"] for took in rounds)
        print(
            f"{name:>10}: {pieces(all_of):5.1f} blocks side by side, {1e3 * least:6.1f} ms "
            f"({read / least / 1e9:.1f} GB/s), {ratio:.2f} times as long as runs of 1"
        )


if __name__ == "__main__":
    main()
