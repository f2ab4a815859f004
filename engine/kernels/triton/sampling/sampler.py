"""The sampler on permanent rows: samples tokens from logits without the host, as engine/sampling/sampler.py does.

   sampling_edit_kernel     rows with edits or filters: edits and scales their logits, in fp32 (edits.py)
   sampling_filter_kernel   rows with filters: finds the bounds of the kept logits (filters.py)
   sampling_choose_kernel   all rows: adds noise and finds the largest of each chunk of the vocabulary
   sampling_settle_kernel   all rows: finds the largest of these, and stores the token for the next step and penalties

The vocabulary is cut into chunks, so that even a single row occupies the device. One program a row searches for the
bounds of filters. The kernels to run follow from a step's features alone. Their work for a row follows from its slot's
flags, on the device. Each row has its own order of summation, so that a row's token does not depend on other rows.

The noise is that of engine/sampling/draws.py: the same integers to the bit, the same logarithms to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import sampling_state as layout
from engine.kernels.sampling_state import Features, SamplingState
from engine.kernels.triton.sampling.edits import sampling_edit_kernel
from engine.kernels.triton.sampling.filters import BOUNDS, sampling_filter_kernel, strangeness

_WIDTH = tl.constexpr(layout.WIDTH)
_FLAGS, _KEY_LOW, _KEY_HIGH, _TEMPERATURE = (
    tl.constexpr(column) for column in (layout.FLAGS, layout.KEY_LOW, layout.KEY_HIGH, layout.TEMPERATURE)
)
_PENALISED, _FILTERED = tl.constexpr(layout.PENALISED), tl.constexpr(layout.FILTERED)
_NOT_FINITE, _NONE_LEFT = tl.constexpr(layout.NOT_FINITE), tl.constexpr(layout.NONE_LEFT)
_BOUNDS = tl.constexpr(BOUNDS)
_ADD = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLY_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = tl.constexpr(0x94D049BB133111EB)
_SPREAD = tl.constexpr(0x9E3779B1)
_MIX_1 = tl.constexpr(0x7FEB352D)
_MIX_2 = tl.constexpr(0x846CA68B)
_SCALE = tl.constexpr(2.0**-31 * (1 - 2.0**-23))


@triton.jit
def position_key(low, high, position):
    """The halves (low, high) of a row's key, uint32, from the int32 halves of noise.choice_state and the int64
    position."""
    x = high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32 | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    x = (x ^ position.to(tl.uint64, bitcast=True)) + _ADD
    x = (x ^ (x >> 30)) * _MULTIPLY_1
    x = (x ^ (x >> 27)) * _MULTIPLY_2
    x = x ^ (x >> 31)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def gumbel(low, high, token):
    """The fp32 Gumbel noise of int32 tokens, for the halves of a key."""
    x = token.to(tl.uint32, bitcast=True) * _SPREAD ^ low
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 15)) + high
    x = x * _MIX_2
    x = (x ^ (x >> 16)) * _MIX_1
    x = x ^ (x >> 15)
    u = ((x & 0x7FFFFFFF).to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * _SCALE
    # log1p(-u) by Kahan's formula with log: the quotient corrects the rounding of 1 - u.
    complement = 1.0 - u
    minus_log = tl.where(complement == 1.0, u, tl.log(complement) * u / (complement - 1.0))
    return -tl.log(minus_log)


@triton.jit(do_not_specialize=["slots_stride"], do_not_specialize_on_alignment=["slots", "positions"])
def sampling_choose_kernel(
    logits,
    logits_stride,
    slots,
    slots_stride,
    positions,
    table,
    reals,
    work,
    work_stride,
    bounds,
    values,
    tokens,
    faults,
    vocab,
    WORKED: tl.constexpr,
    FILTERS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Find the largest token, with the row's noise, of one chunk of the vocabulary of one row; the lowest of equal
    ones.

    It writes to `values` and `tokens`, [rows, parts], and to `faults` for rows that sampling_edit_kernel skipped.
    WORKED: `work` has the rows whose slots have flags.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    if slot < 0:
        return
    index = row * tl.num_programs(1) + part
    token = part * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    temperature = tl.load(reals + slot * _WIDTH + _TEMPERATURE)
    flags = 0
    if WORKED:
        flags = tl.load(table + slot * _WIDTH + _FLAGS)
    if flags != 0:
        x = tl.load(work + row.to(tl.int64) * work_stride + token, inside, other=float("-inf"))
    else:
        x = tl.load(logits + row.to(tl.int64) * logits_stride + token, inside, other=0.0).to(tl.float32)
        finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 0)
        tl.store(faults + index, tl.where(finite == 1, 0, _NOT_FINITE))
        x = tl.where(inside, tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0)), float("-inf"))
    if FILTERS:
        row_bounds = bounds + row * _BOUNDS
        if (flags & _FILTERED) != 0:
            strange = strangeness(x, tl.load(row_bounds + 1), tl.load(row_bounds + 2))
            x = tl.where((x >= tl.load(row_bounds)) & (strange <= tl.load(row_bounds + 3)), x, float("-inf"))
    if (temperature > 0) & (tl.max(x, 0) > float("-inf")):
        low = tl.load(table + slot * _WIDTH + _KEY_LOW)
        high = tl.load(table + slot * _WIDTH + _KEY_HIGH)
        low, high = position_key(low, high, tl.load(positions + row) + 1)
        x += gumbel(low, high, token)
    value = tl.max(x, 0)
    tl.store(values + index, value)
    tl.store(tokens + index, tl.min(tl.where(x == value, token, vocab), 0))


@triton.jit(do_not_specialize=["slots_stride"], do_not_specialize_on_alignment=["slots"])
def sampling_settle_kernel(
    slots,
    slots_stride,
    table,
    values,
    tokens,
    faults,
    chosen,
    chosen_stride,
    last_tokens,
    counts,
    vocab,
    parts,
    EDITS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Store a row's token and faults in `chosen`, and the token in its slot's `last_tokens` and counts."""
    row = tl.program_id(0)
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    if slot < 0:
        return
    part = tl.arange(0, PARTS)
    real = part < parts
    value = tl.load(values + row * parts + part, real, other=float("-inf"))
    best = tl.max(value, 0)
    token = tl.min(tl.where(value == best, tl.load(tokens + row * parts + part, real, other=vocab), vocab), 0)
    fault = tl.max(tl.load(faults + row * parts + part, real, other=0), 0)
    # A row of NaN has no largest token, but its token must still be a valid index.
    token = tl.minimum(token, vocab - 1).to(tl.int64)
    tl.store(chosen + row, token)
    tl.store(chosen + chosen_stride + row, fault | tl.where(best > float("-inf"), 0, _NONE_LEFT))
    tl.store(last_tokens + slot, token)
    if EDITS:
        count = counts + slot * vocab + token
        if (tl.load(table + slot * _WIDTH + _FLAGS) & _PENALISED) != 0:
            tl.store(count, tl.load(count) + 2)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The sizes of the kernels' work, powers of two."""

    chunk: int = 2048
    """The tokens that one program edits or chooses from."""
    tile: int = 2048
    """The tokens that a search for bounds reads at one time."""
    room: int = 8192
    """The most numbers that a search may gather to read only these."""


class TritonChoose:
    """`Choose` of device/sampler.py with Triton kernels, for one device and up to `rows` dense rows a step.

    Its work memory for edits and filters is allocated in the first step that has any. That step must not be one that is
    being recorded.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device, tiles: Tiles | None = None) -> None:
        self._tiles = tiles or Tiles()
        self._rows = rows
        self._vocab = vocab_size
        self._parts = triton.cdiv(vocab_size, self._tiles.chunk)
        # Each row of the work memory has the row's logits, then the room, both aligned to 64 bytes.
        self._spare = triton.cdiv(vocab_size, 16) * 16
        self._stride = self._spare + max(16, self._tiles.room)
        size = (rows, self._parts)
        self._values = torch.empty(size, dtype=torch.float32, device=device)
        self._tops = torch.empty(size, dtype=torch.float32, device=device)
        self._tokens = torch.empty(size, dtype=torch.int32, device=device)
        self._faults = torch.empty(size, dtype=torch.int32, device=device)
        self._bounds = torch.empty(rows, BOUNDS, dtype=torch.float32, device=device)
        self._work: Tensor | None = None

    def __call__(
        self, logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, features: Features
    ) -> None:
        edits = state.edits if Features.EDITS in features else None
        filters = Features.FILTERS in features
        if features and self._work is None:
            self._work = torch.empty(self._rows, self._stride, dtype=torch.float32, device=logits.device)
        # Kernels that do not read it get another tensor in its place.
        work = self._bounds if self._work is None else self._work
        reals = state.table.view(torch.float32)
        # The lower halves of int64, so that kernels are compiled for one type only.
        narrow = slots if slots.dtype == torch.int32 else slots.view(torch.int32)[::2]
        grid = (len(slots), self._parts)
        parts = triton.next_power_of_2(self._parts)
        if features:
            sampling_edit_kernel[grid](
                logits,
                logits.stride(0),
                narrow,
                narrow.stride(0),
                positions,
                state.table,
                reals,
                state.table if edits is None else edits.counts,
                state.table if edits is None else edits.bias_ids,
                reals if edits is None else edits.biases,
                state.table if edits is None else edits.masks,
                work,
                self._stride,
                self._tops,
                self._faults,
                self._vocab,
                EDITS=edits is not None,
                BIASES=1 if edits is None else edits.biases.shape[1],
                CHUNK=self._tiles.chunk,
                num_warps=_warps(self._tiles.chunk),
                enable_fp_fusion=False,
            )
        if filters:
            sampling_filter_kernel[(len(slots),)](
                narrow,
                narrow.stride(0),
                state.table,
                reals,
                work,
                self._stride,
                self._spare,
                self._tops,
                self._bounds,
                self._vocab,
                self._parts,
                PARTS=parts,
                TILE=self._tiles.tile,
                ROOM=self._tiles.room,
                num_warps=2 * _warps(self._tiles.tile),
                enable_fp_fusion=False,
            )
        sampling_choose_kernel[grid](
            logits,
            logits.stride(0),
            narrow,
            narrow.stride(0),
            positions,
            state.table,
            reals,
            work,
            self._stride,
            self._bounds,
            self._values,
            self._tokens,
            self._faults,
            self._vocab,
            WORKED=bool(features),
            FILTERS=filters,
            CHUNK=self._tiles.chunk,
            num_warps=_warps(self._tiles.chunk),
            enable_fp_fusion=False,
        )
        sampling_settle_kernel[(len(slots),)](
            narrow,
            narrow.stride(0),
            state.table,
            self._values,
            self._tokens,
            self._faults,
            state.chosen,
            state.chosen.stride(0),
            state.last_tokens,
            state.table if edits is None else edits.counts,
            self._vocab,
            self._parts,
            EDITS=edits is not None,
            PARTS=parts,
            num_warps=1,
        )


def _warps(tokens: int) -> int:
    """The warps of a program that holds `tokens` tokens: 16 for each thread."""
    return max(1, min(8, tokens // 512))
