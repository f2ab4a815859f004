"""The changes that LoRA adapters make to a product: scale * B A x, for rows of many adapters in two launches.

    rows, sorted by adapter, in tiles of one adapter each
        -> A x of a tile's rows, by pieces of the inputs -> their sums, times B, added to the product's results

Where an adapter's matrices are is looked up in tables on the device, by the adapter's place in them. Grids depend on
numbers of the step's shape alone. So a CUDA graph can replay them: the tables and the tiles change, their memory does
not. The pieces depend on the inputs alone, and sums go from first to last, so a row has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.products.product import DEPTHS

#: The rows of a tile, and the outputs of a program.
TILE, _OUTPUTS = 16, 64
#: The most pieces of a sum over the inputs.
_PIECES = 8
#: The fewest ranks of a program, as tensor cores multiply them.
_FEWEST_RANKS = 16
#: The most ranks that are multiplied at one time.
_MOST_RANKS = 64


@triton.jit(do_not_specialize=["entry", "rounds"])
def low_rank_down_kernel(
    x_ptr,
    weight_ptr,
    offsets_ptr,
    ranks_ptr,
    order_ptr,
    tiles_ptr,
    inner_ptr,
    x_stride,
    entries,
    entry,
    inputs,
    rounds,
    piece_stride,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    ROUNDS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (t, r, p): a tile of rows of one adapter, RANKS of its ranks, and a piece of ROUNDS * INPUTS inputs."""
    tile = tl.program_id(0)
    place = tl.load(tiles_ptr + 3 * tile)
    if place >= 0:
        rank_count = tl.load(ranks_ptr + place * entries + entry)
        first_rank = tl.program_id(1) * RANKS
        if first_rank < rank_count:
            first, last = tl.load(tiles_ptr + 3 * tile + 1), tl.load(tiles_ptr + 3 * tile + 2) - 1
            at = first + tl.arange(0, TILE)
            row = tl.load(order_ptr + tl.minimum(at, last)).to(tl.int64)
            rank = first_rank + tl.arange(0, RANKS)
            within = tl.arange(0, INPUTS)
            weight_ptr += tl.multiple_of(tl.load(offsets_ptr + place * entries + entry), 16)
            # Ranks and rows beyond the last read the last one's data and are not written.
            weight_at = weight_ptr + tl.minimum(rank, rank_count - 1).to(tl.int64)[:, None] * inputs + within[None]
            x_at = x_ptr + row[None] * x_stride + within[:, None]
            sums = tl.zeros((RANKS, TILE), tl.float32)
            begin = tl.program_id(2) * ROUNDS
            for i in tl.range(begin, tl.minimum(begin + ROUNDS, rounds), num_stages=STAGES):
                if EVEN:
                    weight, x = tl.load(weight_at + i * INPUTS), tl.load(x_at + i * INPUTS)
                else:
                    inside = i * INPUTS + within < inputs
                    weight = tl.load(weight_at + i * INPUTS, mask=inside[None], other=0.0)
                    x = tl.load(x_at + i * INPUTS, mask=inside[:, None], other=0.0)
                sums = tl.dot(weight, x, sums, input_precision="ieee")
            there = tl.program_id(2) * piece_stride + at[None] * WIDTH + rank[:, None]
            tl.store(inner_ptr + there, sums, mask=(rank < rank_count)[:, None] & (at <= last)[None])


@triton.jit(do_not_specialize=["entry"])
def low_rank_up_kernel(
    inner_ptr,
    weight_ptr,
    offsets_ptr,
    starts_ptr,
    ranks_ptr,
    blocks_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    out_stride,
    entries,
    entry,
    piece_stride,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (t, o): a tile of rows of one adapter, and up to OUTPUTS outputs of one part of the product."""
    tile = tl.program_id(0)
    place = tl.load(tiles_ptr + 3 * tile)
    if place >= 0:
        block = blocks_ptr + 4 * tl.program_id(1)
        part, first_output = tl.load(block), tl.load(block + 1)
        output_count, part_output = tl.load(block + 2), tl.load(block + 3)
        column = place * entries + entry + 1 + part
        rank_count = tl.load(ranks_ptr + column)
        if rank_count > 0:
            first, last = tl.load(tiles_ptr + 3 * tile + 1), tl.load(tiles_ptr + 3 * tile + 2) - 1
            at = first + tl.arange(0, TILE)
            row = tl.load(order_ptr + tl.minimum(at, last)).to(tl.int64)
            output = tl.arange(0, OUTPUTS)
            there = row[None] * out_stride + first_output + output[:, None]
            mask = (output < output_count)[:, None] & (at <= last)[None]
            weight_ptr += tl.multiple_of(tl.load(offsets_ptr + column), 16)
            weight_row = (part_output + tl.minimum(output, output_count - 1)).to(tl.int64) * rank_count
            inner_row = inner_ptr + at[None] * WIDTH + tl.load(starts_ptr + column)
            sums = tl.zeros((OUTPUTS, TILE), tl.float32)
            for first_rank in tl.range(0, rank_count, RANKS):
                rank = first_rank + tl.arange(0, RANKS)
                inside = rank < rank_count
                inner = tl.zeros((RANKS, TILE), tl.float32)
                for piece in tl.static_range(PIECES):
                    inner += tl.load(
                        inner_row + piece * piece_stride + rank[:, None],
                        mask=inside[:, None] & (at <= last)[None],
                        other=0.0,
                    )
                weight = tl.load(weight_ptr + weight_row[:, None] + rank[None], mask=inside[None], other=0.0)
                sums = tl.dot(weight, inner.to(weight.dtype), sums, input_precision="ieee")
            # The change is rounded before it is added, as where it is a product of its own.
            change = sums.to(out_ptr.dtype.element_ty).to(tl.float32)
            before = tl.load(out_ptr + there, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + there, (before + change).to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class LowRankTables:
    """Where the matrices of each adapter are, by its place, on the device. A product has some entries, in a row: of its
    A, then of the B of each of its parts."""

    anchor: Tensor
    """Of the matrices' dtype. Offsets count from its beginning."""
    offsets: Tensor
    """int64 [places, entries]: in elements, a multiple of 16."""
    starts: Tensor
    """int32 [places, entries]: of a part, the first of its ranks among those of all parts."""
    ranks: Tensor
    """int32 [places, entries]: 0 for what the adapter does not change."""


@dataclass(frozen=True, slots=True)
class LowRankTiles:
    """The rows of a step by adapter."""

    order: Tensor
    """int32: rows, sorted by adapter."""
    tiles: Tensor
    """int32 [tiles, 3]: an adapter's place, or -1 for none; the first of its rows in `order` and the end, at most TILE
    behind it."""
    count: int
    """How many tiles a launch looks at."""


class LowRankProduct:
    """A product of the model that adapters may change. `entry`: the first of its entries in the tables; `inputs`: its
    inputs; `outputs`: those of each part."""

    def __init__(self, entry: int, inputs: int, outputs: Sequence[int], device: torch.device) -> None:
        self.entry, self._inputs = entry, inputs
        blocks, first = [], 0
        for part, count in enumerate(outputs):
            for start in range(0, count, _OUTPUTS):
                blocks.append((part, first + start, min(_OUTPUTS, count - start), start))
            first += count
        self._blocks = torch.tensor(blocks, dtype=torch.int32, device=device)

    def add(
        self, x: Tensor, out: Tensor, tables: LowRankTables, tiles: LowRankTiles, widest: int, widest_part: int
    ) -> None:
        """Add the changes to `out`, [rows, outputs], the product's results for `x`, [rows, inputs]. Both are dense in
        their last dimension. `widest`, `widest_part`: no adapter has more ranks, of all parts and of one."""
        if not tiles.count:
            return
        depth, inputs = DEPTHS[x.element_size()], self._inputs
        rounds = triton.cdiv(inputs, depth.inputs)
        each = triton.cdiv(rounds, _PIECES)
        pieces = triton.cdiv(rounds, each)
        ranks = ranks_of_program(widest_part)
        width = triton.cdiv(widest, ranks) * ranks
        inner = torch.empty((pieces, len(tiles.order), width), dtype=torch.float32, device=x.device)
        entries = tables.offsets.shape[1]
        low_rank_down_kernel[(tiles.count, width // ranks, pieces)](
            x,
            tables.anchor,
            tables.offsets,
            tables.ranks,
            tiles.order,
            tiles.tiles,
            inner,
            x.stride(0),
            entries,
            self.entry,
            inputs,
            rounds,
            inner.stride(0),
            WIDTH=width,
            EVEN=inputs % depth.inputs == 0,
            ROUNDS=each,
            RANKS=ranks,
            INPUTS=depth.inputs,
            TILE=TILE,
            STAGES=depth.stages,
            num_warps=4,
        )
        low_rank_up_kernel[(tiles.count, len(self._blocks))](
            inner,
            tables.anchor,
            tables.offsets,
            tables.starts,
            tables.ranks,
            self._blocks,
            tiles.order,
            tiles.tiles,
            out,
            out.stride(0),
            entries,
            self.entry,
            inner.stride(0),
            WIDTH=width,
            PIECES=pieces,
            RANKS=ranks,
            OUTPUTS=_OUTPUTS,
            TILE=TILE,
            num_warps=4,
        )


def ranks_of_program(widest_part: int) -> int:
    """The ranks that a program multiplies at one time, where no part has more than `widest_part`."""
    return min(_MOST_RANKS, max(_FEWEST_RANKS, int(triton.next_power_of_2(widest_part))))
