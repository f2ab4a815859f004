"""Makes a step's inputs on the device from four numbers a row: one program for each row and tile of its tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: The tokens of one program, for steps of few tokens a row and of many.
_FEW, _MANY = 16, 256


@triton.jit(do_not_specialize=["row_step", "tokens_at", "most_tokens", "most_rows"])
def fill(
    sent,
    row_step,
    tokens_at,
    state,
    layout,
    last_tokens,
    tokens,
    positions,
    long,
    places,
    kv_lens,
    most_tokens,
    most_rows,
    PENDING: tl.constexpr,
    LONG: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(sent + row).to(tl.int64)
    start = tl.load(sent + row_step + row)
    flags = tl.load(sent + 2 * row_step + row)
    begin = tl.load(sent + 3 * row_step + row)
    end = tl.load(sent + 3 * row_step + row + 1)
    real = (flags & PADDING) == 0
    at = begin + lane
    mine = at < end
    last = tl.load(last_tokens + slot)
    token = tl.load(sent + tokens_at + at, mask=mine, other=0).to(tl.int64)
    waits = ((flags & PENDING) != 0) & (at == end - 1)
    position = start + lane
    tl.store(tokens + at, tl.where(waits, last, token), mask=mine)
    tl.store(positions + at, position.to(tl.int64), mask=mine)
    tl.store(long + at, (flags & LONG) != 0, mask=mine)
    for group in tl.static_range(GROUPS):
        tables_at = tl.load(layout + 3 * group)
        width = tl.load(layout + 3 * group + 1)
        firsts_at = tl.load(layout + 3 * group + 2)
        skipped = tl.load(state + firsts_at + slot, mask=firsts_at >= 0, other=0) * BLOCK
        index = position - skipped
        block = tl.load(state + tables_at + slot * width + index // BLOCK, mask=mine & real, other=0)
        there = block.to(tl.int64) * BLOCK + index % BLOCK
        tl.store(places + group * most_tokens + at, tl.where(real, there, -1), mask=mine)
        length = tl.where(real, start + end - begin - skipped, 0)
        tl.store(kv_lens + group * most_rows + row, length, mask=tl.program_id(1) == 0)


def step_inputs(
    sent: Tensor,
    row_step: int,
    tokens_at: int,
    state: Tensor,
    layout: Tensor,
    last_tokens: Tensor,
    tokens: Tensor,
    positions: Tensor,
    long: Tensor,
    places: Tensor,
    kv_lens: Tensor,
    *,
    rows: int,
    most_queries: int,
    block_size: int,
    flags: tuple[int, int, int],
) -> None:
    """Do the same as make_inputs of device/inputs.py, which describes the tensors.

    `layout`: int64 [groups, 3], DeviceRows.layout. In `sent`, slots, starts, flags and query starts are `row_step`
    apart, and the tokens begin at `tokens_at`. `flags`: the bits PENDING, LONG and PADDING.
    """
    tile = _FEW if most_queries <= _FEW else _MANY
    fill[(rows, triton.cdiv(most_queries, tile))](
        sent,
        row_step,
        tokens_at,
        state,
        layout,
        last_tokens,
        tokens,
        positions,
        long,
        places,
        kv_lens,
        places.shape[1],
        kv_lens.shape[1],
        *flags,
        BLOCK=block_size,
        GROUPS=len(layout),
        TILE=tile,
        num_warps=1 if tile == _FEW else 4,
    )
