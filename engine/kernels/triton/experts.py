"""Mixtures of experts: rows are routed, sorted by expert and multiplied on the device, without waiting for it.

   route -> sort -> product with gate and up -> (gate) -> product with down -> sum over a row's experts

Grids depend on the number of rows alone, so a CUDA graph can replay them. A place is one of a row's experts: place p is
row p // chosen. Each tile of a product has places of one expert; a program finds its expert by the experts' counts.
Sums go over the inputs from first to last, so with tiles of one size a row has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.products.product import DEPTHS

#: The outputs of a tile.
_OUTPUTS = 128
#: The places of a tile, if experts have few, and if they have more than `_MANY` on average.
_FEW_PLACES, _MANY_PLACES = 16, 64
_MANY = 32
#: The places of a tile of one size.
FIXED_PLACES = 32
#: The places that a program that sorts reads at one time, and the columns of one that sums.
_SORTED, _SUMMED = 1024, 1024


@triton.jit
def route_kernel(
    logits_ptr,
    experts_ptr,
    shares_ptr,
    row_stride,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The likeliest experts of one row, of equally likely ones the first, and their shares."""
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    logits = tl.load(logits_ptr + row * row_stride + expert, mask=expert < COUNT, other=float("-inf")).to(tl.float32)
    raised = tl.exp(logits - tl.max(logits, 0))
    remaining = tl.where(expert < COUNT, raised / tl.sum(raised, 0), -1.0)
    shares, chosen = tl.zeros((SLOTS,), tl.float32), tl.zeros((SLOTS,), tl.int32)
    for i in tl.static_range(CHOSEN):
        # The index is a valid one also of a row that is not finite.
        best = tl.minimum(tl.argmax(remaining, 0, tie_break_left=True), COUNT - 1)
        share = tl.sum(tl.where(expert == best, remaining, 0.0), 0)
        shares, chosen = tl.where(slot == i, share, shares), tl.where(slot == i, best, chosen)
        remaining = tl.where(expert == best, -1.0, remaining)
    if NORMED:
        shares = shares / tl.sum(shares, 0)
    tl.store(experts_ptr + row * CHOSEN + slot, chosen, mask=slot < CHOSEN)
    tl.store(shares_ptr + row * CHOSEN + slot, shares, mask=slot < CHOSEN)


@triton.jit(do_not_specialize=["places"])
def sort_kernel(experts_ptr, order_ptr, starts_ptr, places, BLOCK: tl.constexpr):
    """Program e: writes the places of expert e, ascending, behind those of all experts before it, and its start."""
    expert = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    start = 0
    for first in tl.range(0, places, BLOCK):
        experts = tl.load(experts_ptr + first + within, mask=first + within < places, other=2147483647)
        start += tl.sum((experts < expert).to(tl.int32), 0)
    tl.store(starts_ptr + expert, start)
    for first in tl.range(0, places, BLOCK):
        matches = tl.load(experts_ptr + first + within, mask=first + within < places, other=2147483647) == expert
        rank = tl.cumsum(matches.to(tl.int32), 0)
        tl.store(order_ptr + start + rank - 1, first + within, mask=matches)
        start += tl.sum(matches.to(tl.int32), 0)
    if expert + 1 == tl.num_programs(0):
        tl.store(starts_ptr + expert + 1, places)


@triton.jit(do_not_specialize=["rounds"])
def experts_kernel(
    x_ptr,
    weight_ptr,
    offsets_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    x_stride,
    outputs,
    inputs,
    rounds,
    COUNT: tl.constexpr,
    SHARED: tl.constexpr,
    EVEN: tl.constexpr,
    PLACES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (t, o): a tile of places of one expert, and of outputs. SHARED places of a row read one row of x.

    `offsets_ptr`: the place of each expert's weight, in elements from `weight_ptr`, a multiple of 16. EVEN: the inputs
    are a whole number of rounds.
    """
    each = tl.arange(0, BLOCK)
    first = tl.load(starts_ptr + each, mask=each < COUNT, other=0)
    end = tl.load(starts_ptr + each + 1, mask=each < COUNT, other=0)
    tiles = tl.where(each < COUNT, (end - first + PLACES - 1) // PLACES, 0)
    ends = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert < COUNT:
        before = tl.sum(tl.where(each < expert, tiles, 0), 0)
        last = tl.load(starts_ptr + expert + 1) - 1
        at = tl.load(starts_ptr + expert) + (tile - before) * PLACES + tl.arange(0, PLACES)
        place = tl.load(order_ptr + tl.minimum(at, last)).to(tl.int64)
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        within = tl.arange(0, INPUTS)
        weight_ptr += tl.multiple_of(tl.load(offsets_ptr + expert), 16)
        # Outputs and places beyond the last read the last one's data and are not written.
        weight_at = weight_ptr + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs + within[None]
        x_at = x_ptr + (place // SHARED)[None] * x_stride + within[:, None]
        sums = tl.zeros((OUTPUTS, PLACES), tl.float32)
        for i in tl.range(0, rounds, num_stages=STAGES):
            if EVEN:
                weight, x = tl.load(weight_at + i * INPUTS), tl.load(x_at + i * INPUTS)
            else:
                inside = i * INPUTS + within < inputs
                weight = tl.load(weight_at + i * INPUTS, mask=inside[None], other=0.0)
                x = tl.load(x_at + i * INPUTS, mask=inside[:, None], other=0.0)
            sums = tl.dot(weight, x, sums, input_precision="ieee")
        there = place[None] * outputs + output[:, None]
        mask = (output < outputs)[:, None] & (at <= last)[None]
        tl.store(out_ptr + there, sums.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(results_ptr, shares_ptr, out_ptr, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of share times result over the experts of a row, in their order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(CHOSEN):
        result = tl.load(results_ptr + (row * CHOSEN + i) * width + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(result, tl.load(shares_ptr + row * CHOSEN + i) + tl.zeros_like(result), total)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def route(logits: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    """As `Reference.route`, but the experts are int32, and of equally likely ones the first is taken."""
    rows, count = logits.shape
    experts = torch.empty((rows, chosen), dtype=torch.int32, device=logits.device)
    shares = torch.empty((rows, chosen), dtype=torch.float32, device=logits.device)
    if rows:
        route_kernel[(rows,)](
            logits,
            experts,
            shares,
            logits.stride(0),
            COUNT=count,
            CHOSEN=chosen,
            NORMED=normed,
            BLOCK=triton.next_power_of_2(count),
            SLOTS=triton.next_power_of_2(chosen),
            num_warps=1,
        )
    return experts, shares


def sort(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sort places by expert. `experts`: int32 [rows, chosen], not empty. Returns int32 [places], and the start of each
    of `count` experts and the end, int32 [count + 1]."""
    order = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    sort_kernel[(count,)](experts, order, starts, experts.numel(), BLOCK=_SORTED, num_warps=4)
    return order, starts


class GroupedProduct:
    """The products of places with the weights of their experts, all [outputs, inputs]."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = tuple(weights)
        base, size = weights[0].data_ptr(), weights[0].element_size()
        offsets = [(weight.data_ptr() - base) // size for weight in weights]
        self._offsets = torch.tensor(offsets, device=weights[0].device)

    def __call__(
        self, x: Tensor, order: Tensor, starts: Tensor, shared: int = 1, places_of_tile: int | None = None
    ) -> Tensor:
        """`x`: [places / shared, inputs]. `order`, `starts`: of `sort`. Returns [places, outputs] in x's dtype.

        `places_of_tile`: None chooses the size by the number of places.
        """
        places, count = len(order), len(self._weights)
        outputs, inputs = self._weights[0].shape
        tile = places_of_tile or (_MANY_PLACES if places > _MANY * count else _FEW_PLACES)
        depth = DEPTHS[x.element_size()]
        out = torch.empty((places, outputs), dtype=x.dtype, device=x.device)
        # An expert's last tile may not be full.
        grid = (min(places, count) + places // tile, triton.cdiv(outputs, _OUTPUTS))
        experts_kernel[grid](
            x,
            self._weights[0],
            self._offsets,
            order,
            starts,
            out,
            x.stride(0),
            outputs,
            inputs,
            triton.cdiv(inputs, depth.inputs),
            COUNT=count,
            SHARED=shared,
            EVEN=inputs % depth.inputs == 0,
            PLACES=tile,
            OUTPUTS=_OUTPUTS,
            INPUTS=depth.inputs,
            BLOCK=triton.next_power_of_2(count),
            STAGES=depth.stages,
            num_warps=8 if tile == _MANY_PLACES else 4,
        )
        return out


def add_shares(results: Tensor, shares: Tensor) -> Tensor:
    """The sums of `results`, [rows * chosen, width], times `shares`, fp32 [rows, chosen]. Returns [rows, width]."""
    (rows, chosen), width = shares.shape, results.shape[1]
    out = torch.empty((rows, width), dtype=results.dtype, device=results.device)
    sum_kernel[(rows, triton.cdiv(width, _SUMMED))](
        results, shares, out, width, CHOSEN=chosen, BLOCK=_SUMMED, num_warps=4
    )
    return out
