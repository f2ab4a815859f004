"""The step between the q, k, v product and attention, in one launch: rotates queries and keys, and caches K and V."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.attention.compressed_kv import INT8, PLAIN, narrow, scale_of, scales_at

_PLAIN, _INT8 = tl.constexpr(PLAIN), tl.constexpr(INT8)

#: The most pairs of dimensions that a program rotates, and those of one warp: 16 bytes of bf16 of each half in each
#: thread. No two threads may do the same work, because queries are rotated in place.
_PAIRS, _WARP_PAIRS = 1024, 256


# Slots may begin anywhere in an upload.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def rope_kv_kernel(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    cache_ptr,
    token_stride,
    head_stride,
    plane_stride: tl.int64,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
):
    """Each program handles HEADS heads of one token. REST_BLOCK covers the dimensions that are not rotated, 0 if all
    are."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots_ptr + token)
    is_query = head < QUERY_HEADS
    is_kv = (head >= QUERY_HEADS) & (head < QUERY_HEADS + 2 * KV_HEADS) & (slot >= 0)
    turns = (head < QUERY_HEADS + KV_HEADS)[:, None]
    exists = head < QUERY_HEADS + 2 * KV_HEADS
    head_at = heads_ptr + token * token_stride + head[:, None] * head_stride
    # For K and V heads: the plane of the cache, and the head in it.
    kv_head = head - QUERY_HEADS
    plane = kv_head // KV_HEADS
    offset = (slot * KV_HEADS + kv_head % KV_HEADS) * WIDTH + plane * plane_stride
    cache_at = cache_ptr + offset[:, None]

    HALF: tl.constexpr = ROTARY_DIM // 2
    dim = tl.arange(0, HALF_BLOCK)
    real = dim < HALF
    inside = exists[:, None] & real[None]
    dtype = heads_ptr.dtype.element_ty
    first = tl.load(head_at + dim[None], mask=inside, other=0.0)
    second = tl.load(head_at + HALF + dim[None], mask=inside, other=0.0)
    # Both halves are rotated by the same angles. The second half of `sin` is the one without the minus sign.
    angle = token * ROTARY_DIM + HALF + dim
    cos = tl.load(cos_ptr + angle, mask=real, other=0.0).to(tl.float32)[None]
    sin = tl.load(sin_ptr + angle, mask=real, other=0.0).to(tl.float32)[None]
    x, y = first.to(tl.float32), second.to(tl.float32)
    # Each product is rounded before the sum, as in the plain expression.
    turned_x = ((x * cos).to(dtype).to(tl.float32) - (y * sin).to(dtype).to(tl.float32)).to(dtype)
    turned_y = ((y * cos).to(dtype).to(tl.float32) + (x * sin).to(dtype).to(tl.float32)).to(dtype)
    first, second = tl.where(turns, turned_x, first), tl.where(turns, turned_y, second)
    tl.store(head_at + dim[None], first, mask=is_query[:, None] & real[None])
    tl.store(head_at + HALF + dim[None], second, mask=is_query[:, None] & real[None])
    writes = is_kv[:, None] & real[None]

    if REST_BLOCK > 0:
        unrotated = ROTARY_DIM + tl.arange(0, REST_BLOCK)
        exists_unrotated = unrotated < HEAD_DIM
        still = tl.load(head_at + unrotated[None], mask=exists[:, None] & exists_unrotated[None], other=0.0)
    else:
        unrotated, exists_unrotated, still = dim, real, first
    if KIND == _PLAIN:
        tl.store(cache_at + dim[None], first, mask=writes)
        tl.store(cache_at + HALF + dim[None], second, mask=writes)
        if REST_BLOCK > 0:
            tl.store(cache_at + unrotated[None], still, mask=is_kv[:, None] & exists_unrotated[None])
    else:
        x, y = first.to(tl.float32), second.to(tl.float32)
        scale = tl.zeros([HEADS, 1], tl.float32)
        if KIND == _INT8:
            # Compared as integers, so that NaN is the largest.
            size = tl.max(tl.maximum(_size(x), _size(y)), 1)
            size = tl.maximum(size, tl.max(_size(still.to(tl.float32)), 1))
            scale = scale_of(size.to(tl.float32, bitcast=True))[:, None]
            tl.store(scales_at(cache_at + HEAD_DIM), scale, mask=is_kv[:, None])
        tl.store(cache_at + dim[None], narrow(x, scale, KIND), mask=writes)
        tl.store(cache_at + HALF + dim[None], narrow(y, scale, KIND), mask=writes)
        if REST_BLOCK > 0:
            q = narrow(still.to(tl.float32), scale, KIND)
            tl.store(cache_at + unrotated[None], q, mask=is_kv[:, None] & exists_unrotated[None])


@triton.jit
def _size(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


def tile(head_dim: int, rotary_dim: int, heads: int) -> tuple[int, int, int]:
    """The sizes (HALF_BLOCK, REST_BLOCK, HEADS) of a program, for `heads` heads of queries, keys and values."""
    half = triton.next_power_of_2(rotary_dim // 2)
    unrotated = triton.next_power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 0
    return half, unrotated, min(max(1, _PAIRS // half), triton.next_power_of_2(heads))


def rope_and_write(heads: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor, kind: int = PLAIN) -> Tensor:
    """Rotate queries and keys, and write keys and values into one layer's cache. Returns the queries.

    `heads`: [tokens, queries + 2 * kv_heads, head_dim], the last dimension dense: queries, then keys, then values.
    Queries are rotated in place. `cos`, `sin`: [tokens, 1, rotary_dim], as for `Reference.rope`; only their second
    halves are read. `cache`: [2, blocks, block_size, kv_heads, width], contiguous, of that `kind`. `slots`: int64
    [tokens]; nothing is written for -1. Returns a view [tokens, queries, head_dim] of `heads`. The values are those of
    `Reference.rope`, with the same order of roundings.
    """
    tokens, count, head_dim = heads.shape
    kv_heads = cache.shape[3]
    queries = count - 2 * kv_heads
    if tokens:
        rotary_dim = cos.shape[-1]
        half, unrotated, together = tile(head_dim, rotary_dim, count)
        rope_kv_kernel[(tokens, triton.cdiv(count, together))](
            heads,
            cos,
            sin,
            slots,
            cache,
            heads.stride(0),
            heads.stride(1),
            cache.stride(0),
            QUERY_HEADS=queries,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            ROTARY_DIM=rotary_dim,
            HALF_BLOCK=half,
            REST_BLOCK=unrotated,
            HEADS=together,
            WIDTH=cache.shape[4],
            KIND=kind,
            num_warps=max(1, half * together // _WARP_PAIRS),
            enable_fp_fusion=False,
        )
    return heads[:, :queries]
