"""Deterministic attention over the paged KV cache, in tiles and parts of one size: a query's result depends on its
sequence alone.

Places count from a sequence's first token, whatever part of them a table still has, and are cut into parts of SPLIT.
Each part is walked in tiles from its first place to its last, and the parts are joined from first to last. The program
that walks them joins them too or, if that would leave the GPU idle, a second launch does. Both do the same operations
in the same order: sums of products are written as fma, so that the compiler cannot choose which product is rounded.
Places that a query does not see add exactly nothing, so the result does not depend on how many of them a program walks.
Prompts and decodes are one launch.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.ragged import RaggedBatch
from engine.kernels.triton.attention.paged_kernels import owner, rows_of

_LOG2_E: Final = math.log2(math.e)
SPLIT: Final = 512
#: The rows of partial sums in the scratch memory.
_SCRATCH_ROWS: Final = 1 << 17
#: The number of programs from which parts do not get programs of their own.
_ENOUGH: Final = 264
#: (rows of a tile: queries times query heads of a KV head; its places; warps; stages), by (bytes of an element, padded
#: head_dim). A warpgroup multiplies 64 rows at once. In tiles of 64 rows and 16 places in fp32, Triton 3.6 lets it read
#: shared memory behind the values (seen on an H200: wrong sums, or an illegal access). For other tiles of 64 rows, wide
#: heads lack registers. So they have fewer rows, which no warpgroup multiplies.
_TILES: Final = {
    (2, 64): (64, 64, 4, 3),
    (2, 128): (64, 64, 4, 3),
    (2, 256): (32, 32, 8, 2),
    (4, 64): (64, 32, 8, 2),
    (4, 128): (16, 32, 4, 2),
    (4, 256): (16, 16, 8, 1),
}


@triton.jit
def _extent(query_starts, kv_lens, positions, tokens, sequences, window, SHARE: tl.constexpr, ROWS: tl.constexpr,
            SPLIT: tl.constexpr, WINDOWED: tl.constexpr):  # fmt: skip
    """Describe a tile. Returns its sequence, its first query in the sequence, its number of queries, the first query's
    index in the table, the tokens before the table, the end of the visible indices, the first part and the one after
    the last."""
    QUERIES: tl.constexpr = ROWS // SHARE
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = owner(query_starts, sequences, tile, QUERIES)
    begin = tl.load(query_starts + sequence, mask=sequence <= sequences, other=tokens)
    end = tl.load(query_starts + sequence + 1, mask=sequence < sequences, other=tokens)
    kv_len = tl.load(kv_lens + sequence, mask=sequence < sequences, other=0)
    first = (tile - begin // QUERIES - sequence) * QUERIES
    queries = tl.minimum(QUERIES, tl.maximum(end - begin - first, 0))
    index = kv_len - (end - begin) + first
    # The last query is at index kv_len - 1 of the table.
    last = tl.load(positions + end - 1, mask=(kv_len > 0) & (queries > 0), other=0).to(tl.int32)
    skipped = tl.where(kv_len > 0, last - (kv_len - 1), 0)
    start = 0
    if WINDOWED:
        start = tl.maximum(index - window + 1, 0)
    stop = tl.where(kv_len > 0, index + queries, 0)
    return sequence, first, queries, index, skipped, stop, (start + skipped) // SPLIT, tl.cdiv(stop + skipped, SPLIT)


@triton.jit
def _joined(acc, total, peak, part_acc, part_total, part_peak):
    higher = tl.maximum(peak, part_peak)
    # A row that has seen nothing yet must not become inf - inf.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept, added = tl.exp2(peak - base), tl.exp2(part_peak - base)
    total = tl.fma(total, kept, part_total * added)
    wide = tl.broadcast_to(kept[:, None], acc.shape)
    return tl.fma(acc, wide, part_acc * added[:, None]), total, higher


@triton.jit(
    do_not_specialize=["table_stride", "tokens", "sequences", "window"],
    do_not_specialize_on_alignment=["tables", "table_rows", "query_starts", "kv_lens", "positions"],
)
def attend_fixed(
    out,
    query,
    keys,
    values,
    tables,
    table_rows,
    query_starts,
    kv_lens,
    positions,
    sums,
    states,
    query_stride,
    table_stride,
    tokens,
    sequences,
    window,
    scale,
    cap,
    SHARE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    APART: tl.constexpr,
):
    """Attend to a tile of queries. Grid: (tiles, kv heads, parts), with one program for all parts without APART."""
    sequence, first, queries, lowest, skipped, stop, part, last_part = _extent(
        query_starts, kv_lens, positions, tokens, sequences, window, SHARE, ROWS, SPLIT, WINDOWED
    )
    if APART:
        part += tl.program_id(2)
        last_part = tl.minimum(last_part, part + 1)
        if part >= last_part:
            return
    if queries == 0:
        return
    head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    token, ours = rows_of(query_starts, tokens, sequences, sequence, first, row, SHARE, ROWS, False)
    within = (head * SHARE + row % SHARE) * HEAD_DIM
    inside = ours[:, None] & (dims < HEAD_DIM)[None]
    q = tl.load(query + (token * query_stride + within)[:, None] + dims[None], inside, other=0.0)
    query_index = lowest + row // SHARE
    table_row = tl.load(table_rows + sequence, mask=sequence < sequences, other=0)
    table = tables + table_row.to(tl.int64) * table_stride
    k, v = keys + head * HEAD_DIM, values + head * HEAD_DIM
    unit = cap if CAPPED else scale
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for part_index in tl.range(part, last_part):
        lower = part_index * SPLIT - skipped
        upper = tl.minimum(lower + SPLIT, stop)
        part_acc = tl.zeros([ROWS, DIMS], tl.float32)
        part_total = tl.zeros([ROWS], tl.float32)
        part_peak = tl.full([ROWS], float("-inf"), tl.float32)
        index = lower + tl.arange(0, TILE)
        block = tl.load(table + index // BLOCK, mask=(index >= 0) & (index < upper), other=0)
        for at in tl.range(lower, upper, TILE):
            index = at + tl.arange(0, TILE)
            here = (index >= 0) & (index < upper)
            slot = block.to(tl.int64) * BLOCK + tl.where(index >= 0, index, 0) % BLOCK
            offset = (slot * (KV_HEADS * HEAD_DIM))[:, None] + dims[None]
            # Look blocks up a tile ahead, so that two tiles are in flight at once.
            after = index + TILE
            block = tl.load(table + after // BLOCK, mask=(after >= 0) & (after < upper), other=0)
            there = here[:, None] & (dims < HEAD_DIM)[None]
            key, value = tl.load(k + offset, there, other=0.0), tl.load(v + offset, there, other=0.0)
            score = tl.dot(q, tl.trans(key), input_precision="tf32x3")
            if CAPPED:
                # tanh(x) = 1 - 2 / (2^(2 x log2 e) + 1), exact at both infinities.
                score = 1.0 - 2.0 / (tl.exp2(score * scale) + 1.0)
            visible = here[None] & (index[None] <= query_index[:, None])
            if WINDOWED:
                visible = visible & (index[None] > query_index[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
            higher = tl.maximum(part_peak, tl.max(score, 1) * unit)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            units = tl.full([ROWS, TILE], 1.0, tl.float32) * unit
            weight = tl.exp2(tl.fma(score, units, tl.broadcast_to(-base[:, None], [ROWS, TILE])))
            shrink = tl.exp2(part_peak - base)
            part_total = tl.fma(part_total, shrink, tl.sum(weight, 1))
            part_acc = tl.dot(weight.to(value.dtype), value, part_acc * shrink[:, None], input_precision="tf32x3")
            part_peak = higher
        if APART:
            at = ((tl.program_id(0) * KV_HEADS + head) * tl.num_programs(2) + tl.program_id(2)).to(
                tl.int64
            ) * ROWS + row
            tl.store(sums + at[:, None] * DIMS + dims[None], part_acc, inside)
            tl.store(states + at * 2, part_peak, ours)
            tl.store(states + at * 2 + 1, part_total, ours)
        else:
            acc, total, peak = _joined(acc, total, peak, part_acc, part_total, part_peak)
    if not APART:
        at = token * (KV_HEADS * SHARE * HEAD_DIM) + within
        result = tl.div_rn(acc, tl.broadcast_to(tl.where(total > 0.0, total, 1.0)[:, None], acc.shape))
        tl.store(out + at[:, None] + dims[None], result.to(out.dtype.element_ty), inside)


@triton.jit(
    do_not_specialize=["tokens", "sequences", "window", "parts"],
    do_not_specialize_on_alignment=["query_starts", "kv_lens", "positions"],
)
def join_fixed(
    out,
    query_starts,
    kv_lens,
    positions,
    sums,
    states,
    tokens,
    sequences,
    window,
    parts,
    SHARE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Join the parts of a tile that `attend_fixed` made with APART. Grid: (tiles, kv heads)."""
    sequence, first, queries, _, _, _, part, last_part = _extent(
        query_starts, kv_lens, positions, tokens, sequences, window, SHARE, ROWS, SPLIT, WINDOWED
    )
    if queries == 0:
        return
    head = tl.program_id(1)
    row, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    token, ours = rows_of(query_starts, tokens, sequences, sequence, first, row, SHARE, ROWS, False)
    inside = ours[:, None] & (dims < HEAD_DIM)[None]
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for part_index in tl.range(0, last_part - part):
        at = ((tl.program_id(0) * KV_HEADS + head) * parts + part_index).to(tl.int64) * ROWS + row
        part_acc = tl.load(sums + at[:, None] * DIMS + dims[None], inside, other=0.0)
        part_peak = tl.load(states + at * 2, ours, other=float("-inf"))
        part_total = tl.load(states + at * 2 + 1, ours, other=0.0)
        acc, total, peak = _joined(acc, total, peak, part_acc, part_total, part_peak)
    at = token * (KV_HEADS * SHARE * HEAD_DIM) + (head * SHARE + row % SHARE) * HEAD_DIM
    result = tl.div_rn(acc, tl.broadcast_to(tl.where(total > 0.0, total, 1.0)[:, None], acc.shape))
    tl.store(out + at[:, None] + dims[None], result.to(out.dtype.element_ty), inside)


class FixedAttention:
    """Deterministic attention of one model on one device. Used by one thread. It keeps scratch memory at a fixed
    address, so its first call must come before a graph is captured."""

    def __init__(self, enough: int = _ENOUGH) -> None:
        """`enough`: the number of programs from which walks are not divided."""
        self._enough = enough
        self._scratch: Tensor | None = None

    def __call__(
        self, query: Tensor, cache: Tensor, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Like PagedAttention. `batch` must have positions. Raises EngineError for a head_dim over 256, and for more
        than 64 query heads of one KV head."""
        tokens, heads, head_dim = query.shape
        block, kv_heads = cache.shape[2:4]
        share = heads // kv_heads
        dims = max(triton.next_power_of_2(head_dim), 16)
        kind = (query.element_size(), max(dims, 64))
        if kind not in _TILES or share > max(_TILES[kind][0], 32):
            raise EngineError(
                f"there are no deterministic attention kernels for a head_dim of {head_dim} with {share} query heads "
                f"of one KV head: 256 and 64 are the most, and 32 for heads of over 128, in fp32 of over 64"
            )
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if tokens == 0:
            return out
        size = _SCRATCH_ROWS * dims
        if self._scratch is None:
            self._scratch = torch.empty(size + 2 * _SCRATCH_ROWS, dtype=torch.float32, device=query.device)
        sums, states = self._scratch[:size], self._scratch[size:]
        rows, places, warps, stages = _TILES[kind]
        rows = max(rows, triton.next_power_of_2(share))
        queries, sequences = rows // share, len(batch.kv_lens)
        count = tokens // queries + sequences + 1
        visible = batch.most_places if batch.window is None else min(batch.most_places, batch.window + queries)
        # A table may begin within a part.
        parts = -(-visible // SPLIT) + (batch.window is not None)
        apart = 1 < parts <= _SCRATCH_ROWS // (rows * count * kv_heads) and count * kv_heads < self._enough
        scales = (scale * _LOG2_E, 0.0) if softcap is None else (2 * _LOG2_E * scale / softcap, softcap * _LOG2_E)
        shape = {
            "SHARE": share,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "DIMS": dims,
            "ROWS": rows,
            "SPLIT": SPLIT,
            "WINDOWED": batch.window is not None,
        }
        metadata = (batch.query_starts, batch.kv_lens, batch.positions, sums, states)
        attend_fixed[(count, kv_heads, parts if apart else 1)](
            out,
            query,
            *cache.unbind(),
            batch.tables,
            batch.table_rows,
            *metadata,
            query.stride(0),
            batch.tables.stride(0),
            tokens,
            sequences,
            batch.window or 0,
            *scales,
            **shape,
            BLOCK=block,
            TILE=places,
            CAPPED=softcap is not None,
            APART=apart,
            num_warps=warps,
            num_stages=stages,
        )
        if apart:
            join_fixed[(count, kv_heads)](
                out, *metadata, tokens, sequences, batch.window or 0, parts, **shape, num_warps=warps
            )
        return out
