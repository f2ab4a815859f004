"""What a cache of 8 bits does to the native kernels' attention: `python -m tests.bench.compressed_kv`.

Sequences of one length decode, and one prefills a chunk, over caches that no processor's own memory holds, in each
dtype by turns in one process; times are of the processor, the least of all rounds, and ratios to bfloat16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import RaggedBatch, select
from engine.kernels.native import Native

KINDS = ("auto", "int8", "fp8")
BLOCK = 16
#: Heads, KV heads and head size.
SHAPES = {"Llama 135M": (9, 3, 64), "Qwen3 0.6B": (16, 8, 128)}


@dataclass(frozen=True, slots=True)
class Step:
    """Of all sequences, so many of whose tokens are new."""

    kernels: Native
    queries: Tensor
    caches: list[Tensor]
    batch: RaggedBatch

    @classmethod
    def of(cls, kind: str, shape: tuple[int, int, int], sequences: int, length: int, new: int, layers: int) -> Step:
        heads, kv_heads, head_dim = shape
        kernels = select(torch.device("cpu"), torch.bfloat16, "native", kv_cache_dtype=kind)
        assert isinstance(kernels, Native)
        blocks = -(-length // BLOCK)
        tables = torch.randperm(sequences * blocks).view(sequences, blocks)
        size = (layers, 2, sequences * blocks, BLOCK, kv_heads, kernels.cache_width(head_dim))
        caches = list(torch.zeros(size, dtype=kernels.cache_dtype))
        still = torch.ones(length, 1, head_dim)
        for row in tables:
            slots = (row[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length]
            for cache in caches:
                heads_of = torch.randn(length, 1 + 2 * kv_heads, head_dim)
                kernels.rope_and_write(heads_of, still, still * 0, cache, _batch(slots, tables, 1, length, new))
        step = _batch(torch.zeros(sequences * new, dtype=torch.int64), tables, sequences, length, new)
        return cls(kernels, torch.randn(sequences * new, heads, head_dim), caches, step)

    def run(self) -> None:
        for cache in self.caches:
            self.kernels.paged_attention(self.queries, cache, self.batch, self.queries.shape[-1] ** -0.5)


def _batch(slots: Tensor, tables: Tensor, sequences: int, length: int, new: int) -> RaggedBatch:
    return RaggedBatch(
        slots=slots,
        query_starts=torch.arange(sequences + 1, dtype=torch.int32) * new,
        kv_lens=torch.full((sequences,), length, dtype=torch.int32),
        tables=tables.int(),
        table_rows=torch.arange(sequences, dtype=torch.int32),
        most_queries=new,
        most_places=length,
    )


def by_turns(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The least seconds of the processor that each took."""
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.process_time()
            run()
            least[name] = min(least[name], time.process_time() - began)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    for name, shape in SHAPES.items():
        for what, sequences, new in (("decode", args.sequences, 1), ("chunk", 1, args.chunk)):
            steps = {kind: Step.of(kind, shape, sequences, args.length, new, args.layers) for kind in KINDS}
            took = by_turns({kind: step.run for kind, step in steps.items()}, args.rounds)
            per_layer = {kind: f"{1e3 * took[kind] / args.layers:.2f} ms" for kind in KINDS}
            ratios = ", ".join(f"{kind} {took['auto'] / took[kind]:.2f}" for kind in KINDS[1:])
            print(
                f"{name}, {what}, {sequences} x {args.length:,} tokens: {per_layer}; times as fast: {ratios}",
                flush=True,
            )


if __name__ == "__main__":
    main()
