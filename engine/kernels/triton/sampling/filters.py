"""Top-k, top-p, min-p and typical sampling as bounds, found by search and without sorting.

What is kept is what engine/sampling/filters.py keeps: everything at least as large as a floor, ties with it included,
and of that, for typical sampling, everything at most so far from the entropy. A bound is searched for among the ordered
bit patterns of fp32: each pass over the row counts and weighs what lies above four of them. The few that are left
between two patterns are gathered after a pass or two, and only these are gone over from then on.
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
#: How far below the largest the first four patterns are: about where the bounds of usual requests are.
_FAR, _MIDDLE, _CLOSE, _NEXT = tl.constexpr(14.0), tl.constexpr(8.0), tl.constexpr(4.5), tl.constexpr(2.0)
#: Numbers that a row has in `bounds`.
BOUNDS = 4
_BOUNDS = tl.constexpr(BOUNDS)


@triton.jit
def strangeness(x, total, entropy):
    """How far a token's surprise is from the entropy; `total` is the logsumexp of what is kept."""
    return tl.abs(x - total + entropy)


@triton.jit
def _key(x):
    """uint32, ordered as the fp32 numbers are."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _value(key):
    return (key ^ tl.where(key >> 31 != 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)).to(tl.float32, bitcast=True)


@triton.jit
def _ranked(x, typical, total, entropy):
    """What is searched among: the larger, the sooner it is kept."""
    return _key(tl.where(typical, -strangeness(x, total, entropy), x))


@triton.jit
def _gather(target, filled, x, keeps):
    """Append those of `x` to what is at `target`. Returns how many are there then."""
    count = tl.sum(keeps.to(tl.int32), 0)
    if count > 0:
        tl.store(target + filled + tl.cumsum(keeps.to(tl.int32), 0) - 1, x, keeps)
    return filled + count


@triton.jit
def _above(source, size, floor, top, typical, total, entropy, a, b, c, d, TILE: tl.constexpr):
    """How many of `size` numbers rank at or above each of four patterns, and their weights together."""
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
    """The nearest strictly between the two."""
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
    """(the largest pattern such that what ranks at or above it reaches the goal, how many numbers that is at most).

    The goal is a count, or a sum of weights. Where it is not reached by all, the pattern is below them all.
    """
    lane = tl.arange(0, TILE)
    peak = tl.where(typical, 0.0, top)
    # The goal is reached at `low`, and not at `high`; (low, high, count at low, count at high, weight at high).
    found = (_key(tl.where(typical, _NONE, floor)), _key(peak) + 1, size, 0 * size, 0.0 * goal)
    # What ranks above all that is still gone over.
    more_count, more_weight = 0 * size, 0.0 * goal
    near = True
    while found[0] + 1 < found[1]:
        low, high = found[0], found[1]
        part = (high - low) // 5
        a = _within(tl.where(near, _key(peak - _FAR), low + part), low, high)
        b = _within(tl.where(near, _key(peak - _MIDDLE), low + 2 * part), low, high)
        c = _within(tl.where(near, _key(peak - _CLOSE), low + 3 * part), low, high)
        d = _within(tl.where(near, _key(peak - _NEXT), low + 4 * part), low, high)
        near = False
        above = _above(work + source, size, floor, top, typical, total, entropy, a, b, c, d, TILE)
        found = _bracket(found, a, above[0] + more_count, above[4] + more_weight, goal, by_count)
        found = _bracket(found, b, above[1] + more_count, above[5] + more_weight, goal, by_count)
        found = _bracket(found, c, above[2] + more_count, above[6] + more_weight, goal, by_count)
        found = _bracket(found, d, above[3] + more_count, above[7] + more_weight, goal, by_count)
        if (size > ROOM) & (found[2] - found[3] <= ROOM):
            gathered = 0 * size
            for start in tl.range(0, size, TILE):
                x = tl.load(work + source + start + lane, start + lane < size, other=_NONE)
                rank = _ranked(x, typical, total, entropy)
                keeps = (x >= floor) & (x > _NONE) & (rank >= found[0]) & (rank < found[1])
                gathered = _gather(work + spare, gathered, x, keeps)
            tl.debug_barrier()
            source, size = spare, gathered
            more_count, more_weight = found[3], found[4]
    return found[0], found[2]


@triton.jit
def _bracket(found, pattern, count, weight, goal, by_count):
    """What is found with what is known of one pattern more; they come in their order, lowest first."""
    low, high, low_count, high_count, high_weight = found
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
    """One row, of those whose slots have filters. Into `bounds` [rows, 4]: the floor; the logsumexp and the entropy of
    what is at or above it; and the largest strangeness that typical sampling keeps (infinity: any).

    `work` has the row's scaled logits, and room for ROOM numbers more from `spare` on; `tops` [rows, parts] the largest
    of its parts.
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
    # Where all that is kept is, and how much that is at most.
    source, size, kept = 0 * vocab, vocab, vocab
    for stage in range(3):
        typical = stage == 2
        goal = tl.where(stage == 0, top_k.to(tl.float32), tl.where(typical, mass, top_p))
        active = tl.where(stage == 0, top_k > 0, goal < 1.0) & (top > _NONE)
        if active:
            if stage > 0:
                # Weigh what is kept so far; gather it where it is little.
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
            found, kept = _search(
                work, source, size, spare, goal, stage == 0, floor, top, typical, total, entropy, TILE, ROOM
            )
            if typical:
                limit = -_value(found)
            else:
                floor = tl.maximum(floor, _value(found))
        if stage == 1:
            floor = tl.maximum(floor, top + tl.load(reals + slot * _WIDTH + _MIN_P))
    place = bounds + row * _BOUNDS
    tl.store(place, floor)
    tl.store(place + 1, total)
    tl.store(place + 2, entropy)
    tl.store(place + 3, limit)
