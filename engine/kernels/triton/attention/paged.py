"""Attention of a ragged batch over the paged KV cache: picks the tiles and divides long walks among programs.

Sequences with few tokens in a step (every decode), whose query heads fit into 16 rows of a tensor core's product, have
a launch of their own. Prefill chunks have another one, with tiles of 128 rows. Grids follow from bounds that the host
knows, so that a CUDA graph can replay them. Programs without work end at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from engine.errors import EngineError
from engine.kernels.ragged import RaggedBatch
from engine.kernels.triton.attention.compressed_kv import PLAIN
from engine.kernels.triton.attention.paged_kernels import attend, join

_LOG2_E: Final = math.log2(math.e)
#: The multiprocessors of an H200, assumed if kernels are interpreted or compiled for an absent GPU.
_MULTIPROCESSORS: Final = 132
#: The most shared memory of a block on Hopper, in bytes.
_SHARED: Final = 232_448
#: The rows of partial sums in the scratch memory. A part of a walk takes as many rows as its tile.
_SCRATCH_ROWS: Final = 1 << 16
#: The most times that a grid may fill the GPU. In a graph for long sequences, most parts of a short one are programs
#: without work, of which a GPU ends some hundreds in a microsecond.
_WAVES: Final = 4
#: The number of parts that `join` adds at one time.
_PARTS: Final = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile sizes of a kernel, for one padded head_dim and element size."""

    rows: int
    """The rows of a tile: queries times query heads of one KV head."""
    places: int
    """The keys and values of one round."""
    warps: int
    resident: int
    """The programs that one multiprocessor holds at once, limited by shared memory (227 KiB) and registers."""
    least: int
    """The fewest rounds of a part of a divided walk."""
    longest: int
    """The most places of a part, if there is scratch memory for that many parts."""

    def with_rows_for(self, share: int) -> Tiles:
        """The tiles widened to hold at least one query of `share` heads."""
        return replace(self, rows=max(self.rows, triton.next_power_of_2(share)))


# Three stages keep two rounds of K and V in flight, which hides the memory's latency. With two stages, a round's loads
# would begin when the round before ends. All numbers follow from compiling for sm_90: no spills, shared memory,
# registers.
_STAGES: Final = 3
# Decoding is limited by memory: each of three programs a multiprocessor has up to 64 KiB in flight, where about 40 KiB
# are enough for 4.8 TB/s. One program walks 2048 places in some 20 us, which limits the time that one long sequence
# adds.
_DECODE: Final = {
    (2, 64): Tiles(16, 128, 4, resident=3, least=1, longest=2048),
    (2, 128): Tiles(16, 64, 4, resident=3, least=1, longest=2048),
    (2, 256): Tiles(16, 32, 4, resident=3, least=2, longest=1024),
    (4, 64): Tiles(16, 32, 4, resident=3, least=2, longest=2048),
    (4, 128): Tiles(16, 32, 4, resident=2, least=2, longest=1024),
    (4, 256): Tiles(16, 16, 8, resident=1, least=4, longest=1024),
}
# Prefill is limited by tensor cores: two warpgroups of 64 rows each use all of a multiprocessor's registers. fp32 is
# for comparison, with three TF32 products each, in sizes that do not spill.
_PREFILL: Final = {
    (2, 64): Tiles(128, 128, 8, resident=1, least=4, longest=1 << 30),
    (2, 128): Tiles(128, 128, 8, resident=1, least=4, longest=1 << 30),
    (2, 256): Tiles(128, 32, 8, resident=1, least=16, longest=1 << 30),
    (4, 64): Tiles(64, 32, 4, resident=1, least=16, longest=1 << 30),
    (4, 128): Tiles(32, 32, 8, resident=1, least=16, longest=1 << 30),
    (4, 256): Tiles(16, 16, 8, resident=1, least=32, longest=1 << 30),
}
# For GPUs whose blocks have less shared memory (Ampere 163 KiB, Ada 99) than Hopper's and Blackwell's 227 KiB.
_SMALL_PREFILL: Final = {
    (2, 64): Tiles(64, 32, 4, resident=2, least=16, longest=1 << 30),
    (2, 128): Tiles(64, 32, 4, resident=1, least=16, longest=1 << 30),
    (2, 256): Tiles(32, 32, 8, resident=1, least=16, longest=1 << 30),
    (4, 64): Tiles(32, 32, 8, resident=1, least=16, longest=1 << 30),
    (4, 128): Tiles(32, 16, 8, resident=1, least=32, longest=1 << 30),
    (4, 256): Tiles(16, 16, 8, resident=1, least=32, longest=1 << 30),
}


@dataclass(frozen=True, slots=True)
class Division:
    """The division of walks over sequences' places into parts, decided without knowing the lengths."""

    parts: int
    """The most parts that the grid has programs for."""
    even: int
    """The number of equal parts of a walk. Each has at least `Tiles.least` rounds."""
    longest: int
    """The most rounds of a part. Long walks get more parts."""

    @classmethod
    def of(cls, programs: int, rounds: int, tiles: Tiles, multiprocessors: int) -> Division:
        """Choose the division. `programs`: of the grid without parts. `rounds`: the most of the longest walk.

        There are as many parts as fill the GPU. Long walks beside short ones get more, so that a single one does not
        run alone for long at the end. Parts need scratch memory and a second launch, so there are none if the GPU is
        full anyway.
        """
        at_once = multiprocessors * tiles.resident
        room = max(min(_SCRATCH_ROWS // tiles.rows, _WAVES * at_once) // programs, 1)
        even = max(min(at_once // programs, rounds // tiles.least, room), 1)
        parts = min(max(even, -(-rounds * tiles.places // tiles.longest)), room)
        return cls(parts, even, max(-(-rounds // parts), 1))


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of `attend`, and of `join` if walks may be divided. It follows from bounds alone."""

    grid: tuple[int, int, int]
    join_grid: tuple[int, int, int] | None
    division: Division
    constants: dict[str, Any]
    """The compile-time constants of both kernels."""
    warps: int


@lru_cache(maxsize=256)  # all layers of a step have the same launches
def launches(
    query: tuple[int, int, int],
    kv_heads: int,
    bytes_each: int,
    sequences: int,
    most_queries: int,
    most_places: int,
    window: int | None,
    multiprocessors: int,
    shared: int,
) -> tuple[Launch, ...]:
    """The launches of a step. `query`: its shape (tokens, heads, head_dim). `bytes_each`: of an element. `shared`:
    bytes of shared memory for a block.

    Raises EngineError for a head_dim over 256.
    """
    tokens, heads, head_dim = query
    share = heads // kv_heads
    dims = max(triton.next_power_of_2(head_dim), 16)
    kind = (bytes_each, max(dims, 64))
    if kind not in _DECODE:
        raise EngineError(f"there are no attention kernels for a head_dim of {head_dim}: 256 is the most")
    decode = _DECODE[kind].with_rows_for(share)
    prefill = (_PREFILL if shared >= _SHARED else _SMALL_PREFILL)[kind].with_rows_for(share)
    few = decode.rows // share
    planned = []
    for tiles in (decode,) if most_queries <= few else (decode, prefill):
        decodes, queries = tiles is decode, tiles.rows // share
        if not decodes:
            count = tokens // queries + sequences + 1
        elif most_queries <= few:
            # The only launch may need more programs, to zero the rows that belong to no sequence.
            count = max(sequences, -(-tokens // queries))
        else:
            count = sequences
        places = most_places if window is None else min(most_places, window + queries - 1)
        rounds = max(-(-places // tiles.places), 1)
        division = Division.of(count * kv_heads, rounds, tiles, multiprocessors)
        constants = {
            "SHARE": share,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "DIMS": dims,
            "ROWS": tiles.rows,
            "TILE": tiles.places,
            "LEAST": tiles.least,
            "FEW": few,
            "DECODE": decodes,
            "WINDOWED": window is not None,
        }
        parts = division.parts
        grid = (kv_heads, count, parts) if decodes else (count, kv_heads, parts)
        join_grid = (count, min(queries, most_queries) * share, kv_heads) if parts > 1 else None
        planned.append(Launch(grid, join_grid, division, constants, tiles.warps))
    return tuple(planned)


class PagedAttention:
    """Attention of one model on one device. Used by one thread.

    It keeps scratch memory at a fixed address, so its first call must come before a graph is captured.
    """

    def __init__(self, multiprocessors: int | None = None) -> None:
        """`multiprocessors`: the number to divide walks for; None asks the GPU."""
        self._requested = multiprocessors
        self._scratch: Tensor | None = None
        self._limits = (0, 0)

    def __call__(
        self,
        query: Tensor,
        cache: Tensor,
        batch: RaggedBatch,
        scale: float,
        softcap: float | None = None,
        kind: int = PLAIN,
    ) -> Tensor:
        """Reference.paged_attention.

        `query`: [tokens, heads, head_dim], fp32, fp16 or bf16. `cache`: [2, blocks, block_size, kv_heads, width],
        contiguous, of the same dtype or bytes, according to `kind`. Raises EngineError for a head_dim over 256.
        """
        tokens, heads, head_dim = query.shape
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if tokens == 0:
            return out
        parts, states = self._prepared(query.device, head_dim)
        block, kv_heads = cache.shape[2:4]
        sequences, window = len(batch.kv_lens), batch.window or 0
        # With a cap, scores are tanh's exponents and then multiples of the cap. Without one, they are multiples of the
        # scale.
        scales = (scale * _LOG2_E, 0.0) if softcap is None else (2 * _LOG2_E * scale / softcap, softcap * _LOG2_E)
        for launch in launches(
            (tokens, heads, head_dim),
            kv_heads,
            query.element_size(),
            sequences,
            batch.most_queries,
            batch.most_places,
            batch.window,
            *self._limits,
        ):
            division = launch.division
            attend[launch.grid](
                out,
                query,
                *cache.unbind(),
                batch.tables,
                batch.table_rows,
                batch.query_starts,
                batch.kv_lens,
                parts,
                states,
                query.stride(0),
                batch.tables.stride(0),
                tokens,
                sequences,
                division.even,
                division.longest,
                window,
                *scales,
                **launch.constants,
                BLOCK=block,
                CAPPED=softcap is not None,
                WIDTH=cache.shape[4],
                KIND=kind,
                num_warps=launch.warps,
                num_stages=_STAGES,
            )
            if launch.join_grid is not None:
                join[launch.join_grid](
                    out,
                    batch.query_starts,
                    batch.kv_lens,
                    parts,
                    states,
                    tokens,
                    sequences,
                    division.parts,
                    division.even,
                    division.longest,
                    window,
                    **launch.constants,
                    PARTS=_PARTS,
                    num_warps=4,
                )
        return out

    def _prepared(self, device: torch.device, head_dim: int) -> tuple[Tensor, Tensor]:
        """The fp32 scratch memory: for sums of values, and for the peak and the sum of weights of each row of each
        part."""
        size = _SCRATCH_ROWS * max(triton.next_power_of_2(head_dim), 16)
        if self._scratch is None or self._scratch.device != device or len(self._scratch) < size + 2 * _SCRATCH_ROWS:
            self._scratch = torch.empty(size + 2 * _SCRATCH_ROWS, dtype=torch.float32, device=device)
            multiprocessors, shared = _limits()
            self._limits = (self._requested or multiprocessors, shared)
        return self._scratch[:size], self._scratch[size:]


def _limits() -> tuple[int, int]:
    """The multiprocessors of the GPU that kernels are for, and the most bytes of shared memory of a block."""
    if not isinstance(attend, triton.JITFunction):
        return _MULTIPROCESSORS, _SHARED
    properties = driver.active.utils.get_device_properties(driver.active.get_current_device())
    return properties.get("multiprocessor_count", _MULTIPROCESSORS), properties["max_shared_mem"]
