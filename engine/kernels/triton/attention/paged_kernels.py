"""The device kernels of attention over the paged KV cache: one for prefill chunks and decodes, one that joins parts.

A program takes a tile of queries of one sequence and one KV head, with the query heads of that KV head folded into its
rows. It walks over the places that they see, or over a part of them, and `join` adds the parts. All data about the
batch is read on the device. Scores are in units of log2 (arXiv 2205.14135, 2307.08691, 2511.11581).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.attention.compressed_kv import INT8, PLAIN, scales_at, widen

_PLAIN, _INT8 = tl.constexpr(PLAIN), tl.constexpr(INT8)


@triton.jit
def owner(query_starts, sequences, tile, QUERIES: tl.constexpr):
    """The sequence of the `tile`-th tile of queries.

    The tiles of sequence i begin at query_starts[i] // QUERIES + i, which leaves enough for each. After the last
    sequence's tiles come those of the rows that belong to no sequence, as sequence `sequences`.
    """
    low, high = 0, sequences
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_starts + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def extent(
    query_starts,
    kv_lens,
    tokens,
    sequences,
    tile,
    window,
    QUERIES: tl.constexpr,
    FEW: tl.constexpr,
    DECODE: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Describe a tile. Returns its sequence, its first query in the sequence, its number of queries, the first query's
    place, the first place that any query sees, and the end.

    With DECODE, only sequences of up to FEW queries have queries. Without it, only the others do, except that either
    kind may zero the rows of sequences without places.
    """
    if DECODE:
        sequence = tile
        first = 0
    else:
        sequence = owner(query_starts, sequences, tile, QUERIES)
        first = (tile - tl.load(query_starts + sequence) // QUERIES - sequence) * QUERIES
    real = sequence < sequences
    count = tl.load(query_starts + sequence + 1, mask=real, other=tokens) - tl.load(
        query_starts + sequence, mask=sequence <= sequences, other=tokens
    )
    kv_len = tl.load(kv_lens + sequence, mask=real, other=0)
    if DECODE:
        queries = tl.where(real & (count <= FEW), count, 0)
    else:
        queries = tl.where((count > FEW) | (kv_len == 0), tl.minimum(QUERIES, tl.maximum(count - first, 0)), 0)
    # Query j is at index kv_len - count + j of the table.
    index = kv_len - count + first
    start = 0
    if WINDOWED:
        start = tl.maximum(index - window + 1, 0)
    return sequence, first, queries, index, start, index + queries


@triton.jit
def division(start, end, even, longest, TILE: tl.constexpr, LEAST: tl.constexpr):
    """Returns the tiles of places, and those of one part: `even` equal parts, from LEAST to `longest` tiles long."""
    tiles = tl.cdiv(tl.maximum(end - start, 0), TILE)
    return tiles, tl.minimum(tl.maximum(tl.cdiv(tiles, even), LEAST), longest)


@triton.jit
def rows_of(
    query_starts, tokens, sequences, sequence, first, row, SHARE: tl.constexpr, ROWS: tl.constexpr, AGAIN: tl.constexpr
):
    """Returns the token of each row, int64 [ROWS], and whether the row is valid. AGAIN recomputes them, so that they
    take no registers in between."""
    begin = tl.load(query_starts + sequence, mask=sequence <= sequences, other=tokens, volatile=AGAIN)
    end = tl.load(query_starts + sequence + 1, mask=sequence < sequences, other=tokens, volatile=AGAIN)
    token = begin + first + row // SHARE
    return token.to(tl.int64), (row < ROWS // SHARE * SHARE) & (token < end)


@triton.jit
def walk(
    state,
    first,
    stop,
    end,
    query,
    query_index,
    keys,
    values,
    table,
    window,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
):
    """Online softmax over the places first .. stop, TILE at a time. Places from `end` on are not read.

    `state`: (sum of values, sum of weights, peak, blocks of the next tile). Without MASKED, every query sees every
    place of every tile. A key, and a value, takes WIDTH elements, stored according to KIND.
    """
    acc, total, peak, block = state
    dims = tl.arange(0, DIMS)
    unit = cap if CAPPED else scale
    for at in tl.range(first, stop, TILE):
        index = at + tl.arange(0, TILE)
        # For unsigned numbers, a block is a shift and a place in it a mask, which saves an eighth of all instructions.
        within = (index.to(tl.uint32) % BLOCK) * (KV_HEADS * WIDTH)
        row = block.to(tl.int64) * (BLOCK * KV_HEADS * WIDTH) + within
        offset = row[:, None] + dims[None]
        # Blocks are looked up a tile ahead. A load whose address is loaded in the same round keeps Triton from having
        # two tiles in flight at once.
        block = tl.load(table + (index + TILE).to(tl.uint32) // BLOCK, mask=index + TILE < end, other=0)
        if MASKED:
            inside = (index < end)[:, None] & (dims < HEAD_DIM)[None]
            key, value = tl.load(keys + offset, inside, other=0), tl.load(values + offset, inside, other=0)
        elif HEAD_DIM < DIMS:
            inside = (index >= 0)[:, None] & (dims < HEAD_DIM)[None]
            key, value = tl.load(keys + offset, inside, other=0), tl.load(values + offset, inside, other=0)
        else:
            key, value = tl.load(keys + offset), tl.load(values + offset)
        if KIND != _PLAIN:
            key, value = widen(key, query.dtype, KIND), widen(value, query.dtype, KIND)
        score = tl.dot(query, tl.trans(key), input_precision="tf32x3")
        if KIND == _INT8:
            score *= tl.load(scales_at(keys + row + HEAD_DIM), index < end, other=0.0)[None]
        if CAPPED:
            # tanh(x) = 1 - 2 / (2^(2 x log2 e) + 1), exact at both infinities.
            score = 1.0 - 2.0 / (tl.exp2(score * scale) + 1.0)
        if MASKED:
            visible = index[None] <= query_index[:, None]
            if WINDOWED:
                visible = visible & (index[None] > query_index[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * unit)
        base = higher
        if MASKED:
            # A row that has seen nothing yet must not become inf - inf.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score * unit - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weight, 1)
        if KIND == _INT8:
            weight *= tl.load(scales_at(values + row + HEAD_DIM), index < end, other=0.0)[None]
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="tf32x3")
        peak = higher
    return acc, total, peak, block


@triton.jit(
    do_not_specialize=["table_stride", "tokens", "sequences", "even", "longest", "window"],
    # These may begin anywhere in a step's upload, and kernels must not be compiled again for that.
    do_not_specialize_on_alignment=["tables", "table_rows", "query_starts", "kv_lens"],
)
def attend(
    out,
    query,
    keys,
    values,
    tables,
    table_rows,
    query_starts,
    kv_lens,
    parts,
    part_states,
    query_stride,
    table_stride,
    tokens,
    sequences,
    even,
    longest,
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
    LEAST: tl.constexpr,
    FEW: tl.constexpr,
    DECODE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
):
    """Attend to a tile of queries. Grid: (kv heads, sequences, parts) with DECODE, else (tiles, kv heads, parts)."""
    QUERIES: tl.constexpr = ROWS // SHARE
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    if DECODE:
        head, tile = tl.program_id(0), tl.program_id(1)
        # Zero the rows that belong to no sequence, divided among all programs.
        spare = tl.load(query_starts + sequences)
        if (tile + 1) * QUERIES > spare:
            token = tile * QUERIES + row // SHARE
            at = (token.to(tl.int64) * (KV_HEADS * SHARE) + head * SHARE + row % SHARE) * HEAD_DIM
            none = (row < QUERIES * SHARE) & (token >= spare) & (token < tokens)
            zeros = tl.zeros([ROWS, DIMS], out.dtype.element_ty)
            tl.store(out + at[:, None] + dims[None], zeros, none[:, None] & (dims < HEAD_DIM)[None])
    else:
        # Begin with the last tiles of a prompt, which see the most places.
        tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sequence, first, queries, lowest, start, end = extent(
        query_starts, kv_lens, tokens, sequences, tile, window, QUERIES, FEW, DECODE, WINDOWED
    )
    if queries == 0:
        return
    tiles, length = division(start, end, even, longest, TILE, LEAST)
    lower = start + tl.program_id(2) * length * TILE
    upper = tl.minimum(lower + length * TILE, end)
    if (tl.program_id(2) > 0) & (lower >= end):
        return

    token, ours = rows_of(query_starts, tokens, sequences, sequence, first, row, SHARE, ROWS, False)
    within = (head * SHARE + row % SHARE) * HEAD_DIM
    inside = ours[:, None] & (dims < HEAD_DIM)[None]
    q = tl.load(query + (token * query_stride + within)[:, None] + dims[None], inside, other=0.0)
    query_index = lowest + row // SHARE
    table_row = tl.load(table_rows + sequence, mask=sequence < sequences, other=0)
    table = tables + table_row.to(tl.int64) * table_stride
    k, v = keys + head * WIDTH, values + head * WIDTH
    index = lower + tl.arange(0, TILE)
    state = (
        tl.zeros([ROWS, DIMS], tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.load(table + index.to(tl.uint32) // BLOCK, mask=index < upper, other=0),
    )
    if DECODE:
        # A single loop, because filling a second loop's pipeline takes longer than the masks.
        state = walk(state, lower, upper, upper, q, query_index, k, v, table, window, scale, cap,
                     KV_HEADS, HEAD_DIM, DIMS, BLOCK, TILE, True, WINDOWED, CAPPED, WIDTH, KIND)  # fmt: skip
    else:
        if WINDOWED:
            # From `end - window` on, no query's window hides a place.
            middle = lower + tl.cdiv(tl.maximum(end - window - lower, 0), TILE) * TILE
            middle = tl.minimum(middle, upper)
            state = walk(state, lower, middle, upper, q, query_index, k, v, table, window, scale, cap,
                         KV_HEADS, HEAD_DIM, DIMS, BLOCK, TILE, True, True, CAPPED, WIDTH, KIND)  # fmt: skip
            lower = middle
        # The first query sees all places up to its own.
        middle = tl.minimum(lower + tl.maximum(lowest + 1 - lower, 0) // TILE * TILE, upper)
        state = walk(state, lower, middle, upper, q, query_index, k, v, table, window, scale, cap,
                     KV_HEADS, HEAD_DIM, DIMS, BLOCK, TILE, False, WINDOWED, CAPPED, WIDTH, KIND)  # fmt: skip
        state = walk(state, middle, upper, upper, q, query_index, k, v, table, window, scale, cap,
                     KV_HEADS, HEAD_DIM, DIMS, BLOCK, TILE, True, WINDOWED, CAPPED, WIDTH, KIND)  # fmt: skip
    acc, total, peak, _ = state

    token, ours = rows_of(query_starts, tokens, sequences, sequence, first, row, SHARE, ROWS, not DECODE)
    inside = ours[:, None] & (dims < HEAD_DIM)[None]
    if tiles > length:
        at = ((tile * KV_HEADS + head) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * ROWS + row
        tl.store(parts + at[:, None] * DIMS + dims[None], acc, inside)
        tl.store(part_states + at * 2, peak, ours)
        tl.store(part_states + at * 2 + 1, total, ours)
    else:
        at = token * (KV_HEADS * SHARE * HEAD_DIM) + within
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out + at[:, None] + dims[None], result.to(out.dtype.element_ty), inside)


@triton.jit(
    do_not_specialize=["tokens", "sequences", "splits", "even", "longest", "window"],
    do_not_specialize_on_alignment=["query_starts", "kv_lens"],
)
def join(
    out,
    query_starts,
    kv_lens,
    parts,
    part_states,
    tokens,
    sequences,
    splits,
    even,
    longest,
    window,
    SHARE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    FEW: tl.constexpr,
    DECODE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add the parts of one row that `attend` made, PARTS at a time. Grid: (tiles, rows, kv heads)."""
    tile, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first, queries, _, start, end = extent(
        query_starts, kv_lens, tokens, sequences, tile, window, ROWS // SHARE, FEW, DECODE, WINDOWED
    )
    tiles, length = division(start, end, even, longest, TILE, LEAST)
    if (row // SHARE >= queries) | (tiles <= length):
        return
    dims = tl.arange(0, DIMS)
    acc, total, peak = tl.zeros([DIMS], tl.float32), 0.0, float("-inf")
    used = tl.cdiv(tiles, length)
    for at in tl.range(0, used, PARTS):
        part = at + tl.arange(0, PARTS)
        index = ((tile * KV_HEADS + head) * splits + part).to(tl.int64) * ROWS + row
        peaks = tl.load(part_states + index * 2, part < used, other=float("-inf"))
        totals = tl.load(part_states + index * 2 + 1, part < used, other=0.0)
        inside = (part < used)[:, None] & (dims < HEAD_DIM)[None]
        sums = tl.load(parts + index[:, None] * DIMS + dims[None], inside, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight, shrink = tl.exp2(peaks - base), tl.exp2(peak - base)
        total = total * shrink + tl.sum(totals * weight, 0)
        acc = acc * shrink + tl.sum(sums * weight[:, None], 0)
        peak = higher
    token = (tl.load(query_starts + sequence) + first + row // SHARE).to(tl.int64)
    at = (token * (KV_HEADS * SHARE) + head * SHARE + row % SHARE) * HEAD_DIM
    tl.store(out + at + dims, (acc / total).to(out.dtype.element_ty), dims < HEAD_DIM)
