"""Attention of a ragged batch over the paged cache: what is launched, with which tiles, and how long walks are divided.

Sequences with so few tokens in a step that their query heads fit into 16 rows of a tensor core's product (every decode)
are launched apart from chunks of prompts, whose tiles have 128 rows. Grids follow from bounds that the host knows, so
that a CUDA graph may replay them; programs that find nothing to do end at once.
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
#: An H200's, assumed where kernels are interpreted or compiled for a GPU that is not here.
_MULTIPROCESSORS: Final = 132
#: Shared memory that a block of Hopper's may have, in bytes.
_SHARED: Final = 232_448
#: Rows of partial sums that the scratch memory holds: a part of a walk takes as many as its tile has.
_SCRATCH_ROWS: Final = 1 << 16
#: How often a grid may fill the GPU: under a graph for long sequences most parts of a short one are programs that find
#: nothing to do, of which a GPU ends some hundreds in a microsecond.
_WAVES: Final = 4
#: Parts that `join` adds at a time.
_PARTS: Final = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is cut, for one padded head_dim and size of element."""

    rows: int
    """Queries times query heads of one KV head."""
    places: int
    """Keys and values of one round."""
    warps: int
    resident: int
    """Programs that one multiprocessor holds at once, by shared memory (227 KiB) and registers."""
    least: int
    """Rounds that a part of a divided walk has at least."""
    longest: int
    """Places that a part has at most, where there is scratch memory for so many parts."""

    def with_rows_for(self, share: int) -> Tiles:
        """With at least one query of `share` heads in each tile."""
        return replace(self, rows=max(self.rows, triton.next_power_of_2(share)))


# Three stages have two rounds of K and V on their way, which is what hides the memory's latency: with two, a round's
# loads would begin when the one before ends. All is chosen from what compiling for sm_90 gives: no spills, shared
# memory, registers.
_STAGES: Final = 3
# Decoding waits for memory: up to 64 KiB on their way in each of three programs a multiprocessor, where about 40 are
# enough for 4.8 TB/s. One program walks 2048 places in some 20 us, which bounds what one long sequence adds.
_DECODE: Final = {
    (2, 64): Tiles(16, 128, 4, resident=3, least=1, longest=2048),
    (2, 128): Tiles(16, 64, 4, resident=3, least=1, longest=2048),
    (2, 256): Tiles(16, 32, 4, resident=3, least=2, longest=1024),
    (4, 64): Tiles(16, 32, 4, resident=3, least=2, longest=2048),
    (4, 128): Tiles(16, 32, 4, resident=2, least=2, longest=1024),
    (4, 256): Tiles(16, 16, 8, resident=1, least=4, longest=1024),
}
# Prompts wait for tensor cores: two warpgroups of 64 rows each, and all of a multiprocessor's registers. fp32 is there
# for comparison, in three TF32 products each, and takes what does not spill.
_PREFILL: Final = {
    (2, 64): Tiles(128, 128, 8, resident=1, least=4, longest=1 << 30),
    (2, 128): Tiles(128, 128, 8, resident=1, least=4, longest=1 << 30),
    (2, 256): Tiles(128, 32, 8, resident=1, least=16, longest=1 << 30),
    (4, 64): Tiles(64, 32, 4, resident=1, least=16, longest=1 << 30),
    (4, 128): Tiles(32, 32, 8, resident=1, least=16, longest=1 << 30),
    (4, 256): Tiles(16, 16, 8, resident=1, least=32, longest=1 << 30),
}
# Where a block has less shared memory (Ampere 163 KiB, Ada 99) than Hopper's and Blackwell's 227.
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
    """Into how many parts the walks over sequences' places are divided, decided without knowing how long they are."""

    parts: int
    """What the grid has room for."""
    even: int
    """A walk becomes so many equal parts, each of `Tiles.least` rounds or more; but"""
    longest: int
    """none of more rounds than this: long ones become more parts."""

    @classmethod
    def of(cls, programs: int, rounds: int, tiles: Tiles, multiprocessors: int) -> Division:
        """`programs`: those of the grid without parts; `rounds`: what the longest walk has at most.

        As many parts as it takes to fill the GPU; and for long walks beside short ones, as many as keep one from being
        the last for long. Parts cost scratch memory and a second launch: none where the GPU is full anyway.
        """
        at_once = multiprocessors * tiles.resident
        room = max(min(_SCRATCH_ROWS // tiles.rows, _WAVES * at_once) // programs, 1)
        even = max(min(at_once // programs, rounds // tiles.least, room), 1)
        parts = min(max(even, -(-rounds * tiles.places // tiles.longest)), room)
        return cls(parts, even, max(-(-rounds // parts), 1))


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of `attend`, and of `join` where walks may be divided; all of it follows from bounds."""

    grid: tuple[int, int, int]
    join_grid: tuple[int, int, int] | None
    division: Division
    constants: dict[str, Any]
    """Those that both kernels are compiled for."""
    warps: int


@lru_cache(maxsize=256)  # a step's layers are alike
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
    """For queries of the shape `query` (tokens, heads, head_dim) with elements of so many bytes, on a GPU of so many
    multiprocessors and bytes of shared memory for a block.

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
    made = []
    for tiles in (decode,) if most_queries <= few else (decode, prefill):
        decodes, queries = tiles is decode, tiles.rows // share
        if not decodes:
            count = tokens // queries + sequences + 1
        elif most_queries <= few:
            # Alone, some more where it takes them to zero the rows that belong to nobody.
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
        made.append(Launch(grid, join_grid, division, constants, tiles.warps))
    return tuple(made)


class PagedAttention:
    """One model's attention on one device, by one thread.

    Keeps scratch memory at a fixed address: its first call has to come before a graph is captured.
    """

    def __init__(self, multiprocessors: int | None = None) -> None:
        """`multiprocessors`: how many walks are divided for; None asks the GPU."""
        self._asked = multiprocessors
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
        """As Reference.paged_attention. `query` [tokens, heads, head_dim], fp32, fp16 or bf16; `cache` [2, blocks,
        block_size, kv_heads, width], contiguous: of the same dtype, or bytes, as `kind` says.

        Raises EngineError for a head_dim over 256.
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
        # With a cap, scores are tanh's exponent and then multiples of the cap; without, multiples of the scale.
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
        """Scratch memory in fp32, for the sums of values and for peak and sum of weights of every row of every part."""
        size = _SCRATCH_ROWS * max(triton.next_power_of_2(head_dim), 16)
        if self._scratch is None or self._scratch.device != device or len(self._scratch) < size + 2 * _SCRATCH_ROWS:
            self._scratch = torch.empty(size + 2 * _SCRATCH_ROWS, dtype=torch.float32, device=device)
            multiprocessors, shared = _limits()
            self._limits = (self._asked or multiprocessors, shared)
        return self._scratch[:size], self._scratch[size:]


def _limits() -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a block may have, of the GPU that kernels are for."""
    if not isinstance(attend, triton.JITFunction):
        return _MULTIPROCESSORS, _SHARED
    found = driver.active.utils.get_device_properties(driver.active.get_current_device())
    return found.get("multiprocessor_count", _MULTIPROCESSORS), found["max_shared_mem"]
