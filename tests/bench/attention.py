"""Time of attention in native kernels, against another build or, on a CPU with AMX, against a cache without pairs.

    python -m tests.bench.attention                      # paired against not paired, on a CPU with AMX
    python -m tests.bench.attention --against OTHER.so   # this build against another one

Prompts in chunks and sequences that decode, over several layers, in blocks in order; and over one layer again and
again, which then lies near: what is left is computing. By turns in one process: the least of the rounds by the clock,
for one layer, and the median of the rounds' ratios. With other work about, `chrt -f 1` before the command keeps the
cores.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from itertools import accumulate, product
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels import RaggedBatch
from engine.kernels.native import Native, library, load_library
from engine.kernels.native.library import Library

BLOCK = 16
#: The most bytes of a case's cache.
MOST = 1 << 29
FOLDER = Path(library.__file__).parent
#: Name -> (sequences, places that each sees, queries of each).
CASES = {
    "a prompt of 512": (1, 512, 512),
    "2 prompts of 256": (2, 256, 256),
    "128 of a prompt behind 512": (1, 640, 128),
    "512 of a prompt of 4,096": (1, 4096, 512),
    "64 that decode, 512 places": (64, 512, 1),
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


def builds(path: Path | None, against: Path | None) -> tuple[Library, Library]:
    """The two that are compared."""
    loaded = load_library()
    if path is None and loaded is None:
        raise SystemExit("native kernels are not built for this CPU")
    own = Library(path, "own") if path else loaded
    assert own is not None
    if against:
        return own, Library(against, "other")
    if not own.paired:
        raise SystemExit("this build pairs no cache, so --against has to name another one")
    other = Library(path or FOLDER / f"_{own.isa}.so", "other")
    other.paired = False
    return own, other


def compare(both: Sequence[Native], shape: tuple[int, int, int], name: str, near: bool, args: Namespace) -> None:
    (heads, kv_heads, head_dim), (sequences, places, queries) = shape, CASES[name]
    batch = batch_of(sequences, places, queries, near)
    query, blocks = torch.randn(sequences * queries, heads, head_dim), int(batch.tables.max()) + 1
    layers = max(1, min(args.layers, MOST // (4 * blocks * BLOCK * kv_heads * head_dim)))
    cache = (
        both[0]
        .zero_cache(1 if near else layers, 2, blocks, BLOCK, kv_heads, head_dim, device=torch.device("cpu"))
        .normal_()
    )
    caches = list(cache) * (layers if near else 1)
    rounds = [[took(kernels, query, caches, batch) for kernels in both] for _ in range(1 + args.rounds)][1:]
    ours, others = (1e3 * min(took[which] for took in rounds) / layers for which in (0, 1))
    case = f"{','.join(map(str, shape)):>9} {name:>27}{', near' if near else '':6}"
    print(
        f"{case}: {ours:7.3f} ms, the other {others:7.3f}; "
        f"{statistics.median(ours / others for ours, others in rounds):.2f} times as long",
        flush=True,
    )


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, help="the build to measure; the CPU's own if not given")
    parser.add_argument("--against", type=Path, help="a build of another source, of the same version")
    parser.add_argument("--shape", nargs="+", default=["9,3,64", "16,8,128"], help="heads, KV heads, head size")
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    both = [Native(torch.bfloat16, build, args.threads) for build in builds(args.build, args.against)]
    for shape, name, near in product(args.shape, args.case, (False, True)):
        heads, kv_heads, head_dim = map(int, shape.split(","))
        compare(both, (heads, kv_heads, head_dim), name, near, args)


if __name__ == "__main__":
    main()
