"""Finds the bounds of top-k, top-p, min-p and typical sampling by search, without sorting.

It keeps the same tokens as engine/sampling/draws.py: all logits at least as large as a floor, ties included, and for
typical sampling those of them within a distance from the entropy. The search for a bound runs over the ordered bit
patterns of fp32. Each pass over the row counts and weighs the numbers above four patterns. After a pass or two, the few
numbers left between two patterns are gathered, and later passes read only these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels import sampling_state as layout

_WIDTH = tl.constexpr(layout.WIDTH)
_FLAGS, _TOP_K, _TOP_P, _MIN_P, _TYPICAL = (
    tl.constexpr(column) for column in (layout.FLAGS, layout.TOP_K, layout.TOP_P, layout.MIN_P, layout.TYPICAL)
)
_FILTERED = tl.constexpr(layout.FILTERED)
_NONE = tl.constexpr(float("-inf"))
#: The distances of the first four patterns from the largest logit, near the bounds of usual requests.
_FAR, _MIDDLE, _CLOSE, _NEXT = tl.constexpr(14.0), tl.constexpr(8.0), tl.constexpr(4.5), tl.constexpr(2.0)
#: The count of numbers of a row in `bounds`.
BOUNDS = 4
_BOUNDS = tl.constexpr(BOUNDS)


@triton.jit
def strangeness(x, total, entropy):
    """The distance of a token's surprise from the entropy. `total`: the logsumexp of the kept logits."""
    return tl.abs(x - total + entropy)


@triton.jit
def _key(x):
    """A uint32 in the same order as the fp32 numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _value(key):
    return (key ^ tl.where(key >> 31 != 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)).to(tl.float32, bitcast=True)


@triton.jit
def _ranked(x, typical, total, entropy):
    """The rank to search over: larger ranks are kept first."""
    return _key(tl.where(typical, -strangeness(x, total, entropy), x))


@triton.jit
def _gather(target, filled, x, keeps):
    """Append the numbers of `x` that `keeps` marks to those at `target`. Returns their new count."""
    count = tl.sum(keeps.to(tl.int32), 0)
    if count > 0:
        tl.store(target + filled + tl.cumsum(keeps.to(tl.int32), 0) - 1, x, keeps)
    return filled + count


@triton.jit
def _above(source, size, floor, top, typical, total, entropy, a, b, c, d, TILE: tl.constexpr):
    """For each of four patterns: the count and the sum of weights of the numbers that rank at or above it."""
    lane = tl.arange(0, TILE)
    count_a, count_b = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    count_c, count_d = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    weight_a, weight_b = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    weight_c, weight_d = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in tl.range(0, size, TILE, num_stages=3):
        x = tl.load(source + start + lane, start + lane < size, other=_NONE)
        keeps = (x >= floor) & (x > _NONE)
        rank = _ranked(x, typical, total, entropy)
        weight = tl.exp(x - top)
        is_a, is_b, is_c, is_d = keeps & (rank >= a), keeps & (rank >= b), keeps & (rank >= c), keeps & (rank >= d)
        count_a += is_a.to(tl.int32)
        count_b += is_b.to(tl.int32)
        count_c += is_c.to(tl.int32)
        count_d += is_d.to(tl.int32)
        weight_a += tl.where(is_a, weight, 0.0)
        weight_b += tl.where(is_b, weight, 0.0)
        weight_c += tl.where(is_c, weight, 0.0)
        weight_d += tl.where(is_d, weight, 0.0)
    return (
        tl.sum(count_a, 0),
        tl.sum(count_b, 0),
        tl.sum(count_c, 0),
        tl.sum(count_d, 0),
        tl.sum(weight_a, 0),
        tl.sum(weight_b, 0),
        tl.sum(weight_c, 0),
        tl.sum(weight_d, 0),
    )


@triton.jit
def _within(pattern, low, high):
    """The nearest pattern strictly between `low` and `high`."""
    return tl.minimum(tl.maximum(pattern, low + 1), high - 1)


@triton.jit
def _search(
    work,
    source,
    size,
    spare,
    goal,
    by_count,
    floor,
    top,
    typical,
    total,
    entropy,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Find the largest pattern such that the numbers that rank at or above it reach the goal.

    The goal is a count, or a sum of weights. Returns the pattern, and an upper bound of the count of these numbers. If
    all numbers together do not reach the goal, the pattern is below them all.
    """
    lane = tl.arange(0, TILE)
    peak = tl.where(typical, 0.0, top)
    # (low, high, count at low, count at high, weight at high). The goal is reached at `low`, and not at `high`.
    bracket = (_key(tl.where(typical, _NONE, floor)), _key(peak) + 1, size, 0 * size, 0.0 * goal)
    # The count and weight of the numbers that rank above all that are still searched.
    more_count, more_weight = 0 * size, 0.0 * goal
    near = True
    while bracket[0] + 1 < bracket[1]:
        low, high = bracket[0], bracket[1]
        part = (high - low) // 5
        a = _within(tl.where(near, _key(peak - _FAR), low + part), low, high)
        b = _within(tl.where(near, _key(peak - _MIDDLE), low + 2 * part), low, high)
        c = _within(tl.where(near, _key(peak - _CLOSE), low + 3 * part), low, high)
        d = _within(tl.where(near, _key(peak - _NEXT), low + 4 * part), low, high)
        near = False
        above = _above(work + source, size, floor, top, typical, total, entropy, a, b, c, d, TILE)
        bracket = _bracket(bracket, a, above[0] + more_count, above[4] + more_weight, goal, by_count)
        bracket = _bracket(bracket, b, above[1] + more_count, above[5] + more_weight, goal, by_count)
        bracket = _bracket(bracket, c, above[2] + more_count, above[6] + more_weight, goal, by_count)
        bracket = _bracket(bracket, d, above[3] + more_count, above[7] + more_weight, goal, by_count)
        if (size > ROOM) & (bracket[2] - bracket[3] <= ROOM):
            gathered = 0 * size
            for start in tl.range(0, size, TILE):
                x = tl.load(work + source + start + lane, start + lane < size, other=_NONE)
                rank = _ranked(x, typical, total, entropy)
                keeps = (x >= floor) & (x > _NONE) & (rank >= bracket[0]) & (rank < bracket[1])
                gathered = _gather(work + spare, gathered, x, keeps)
            tl.debug_barrier()
            source, size = spare, gathered
            more_count, more_weight = bracket[3], bracket[4]
    return bracket[0], bracket[2]


@triton.jit
def _bracket(bracket, pattern, count, weight, goal, by_count):
    """Narrow the bracket by one more pattern. Patterns come in ascending order."""
    low, high, low_count, high_count, high_weight = bracket
    reached = tl.where(by_count, count.to(tl.float32), weight) >= goal
    first = (reached == 0) & (pattern < high)
    return (
        tl.where(reached, pattern, low),
        tl.where(first, pattern, high),
        tl.where(reached, count, low_count),
        tl.where(first, count, high_count),
        tl.where(first, weight, high_weight),
    )


@triton.jit(do_not_specialize=["slots_stride"], do_not_specialize_on_alignment=["slots"])
def sampling_filter_kernel(
    slots,
    slots_stride,
    table,
    reals,
    work,
    work_stride,
    spare,
    tops,
    bounds,
    vocab,
    parts,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Find the bounds of one row. Rows whose slots have no filters are skipped.

    It writes to `bounds`, [rows, 4]: the floor; the logsumexp and the entropy of the logits at or above it; and the
    largest strangeness that typical sampling keeps (infinity: any). `work` has the row's scaled logits, and room for
    ROOM more numbers from `spare` on. `tops`: [rows, parts], the largest logit of each part.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    if slot < 0:
        return
    if (tl.load(table + slot * _WIDTH + _FLAGS) & _FILTERED) == 0:
        return
    part = tl.arange(0, PARTS)
    top = tl.max(tl.load(tops + row * parts + part, part < parts, other=_NONE), 0)
    top_k = tl.load(table + slot * _WIDTH + _TOP_K)
    top_p = tl.load(reals + slot * _WIDTH + _TOP_P)
    mass = tl.load(reals + slot * _WIDTH + _TYPICAL)
    work += row.to(tl.int64) * work_stride
    lane = tl.arange(0, TILE)
    floor = tl.full([], float("-inf"), tl.float32)
    limit = tl.full([], float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    entropy = tl.full([], 0.0, tl.float32)
    # The place of all kept numbers, their count, and an upper bound of how many are kept.
    source, size, kept = 0 * vocab, vocab, vocab
    for stage in range(3):
        typical = stage == 2
        goal = tl.where(stage == 0, top_k.to(tl.float32), tl.where(typical, mass, top_p))
        active = tl.where(stage == 0, top_k > 0, goal < 1.0) & (top > _NONE)
        if active:
            if stage > 0:
                # Weigh the numbers kept so far, and gather them if they are few.
                gathers = (kept <= ROOM) & (size > ROOM)
                weights, moments = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
                gathered = 0 * vocab
                for start in tl.range(0, size, TILE):
                    x = tl.load(work + source + start + lane, start + lane < size, other=_NONE)
                    keeps = (x >= floor) & (x > _NONE)
                    distance = tl.where(keeps, x - top, 0.0)
                    weight = tl.where(keeps, tl.exp(distance), 0.0)
                    weights += weight
                    moments += weight * distance
                    if gathers:
                        gathered = _gather(work + spare, gathered, x, keeps)
                if gathers:
                    tl.debug_barrier()
                    source, size = spare, gathered
                sum = tl.sum(weights, 0)
                goal *= sum
                total = top + tl.log(sum)
                entropy = tl.log(sum) - tl.sum(moments, 0) / sum
            pattern, kept = _search(
                work, source, size, spare, goal, stage == 0, floor, top, typical, total, entropy, TILE, ROOM
            )
            if typical:
                limit = -_value(pattern)
            else:
                floor = tl.maximum(floor, _value(pattern))
        if stage == 1:
            floor = tl.maximum(floor, top + tl.load(reals + slot * _WIDTH + _MIN_P))
    bounds_at = bounds + row * _BOUNDS
    tl.store(bounds_at, floor)
    tl.store(bounds_at + 1, total)
    tl.store(bounds_at + 2, entropy)
    tl.store(bounds_at + 3, limit)
