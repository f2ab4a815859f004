"""Applies penalties, biases, masks and temperature: turns a step's logits into fp32 rows for filters and noise."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels import sampling_state as layout

_WIDTH = tl.constexpr(layout.WIDTH)
_FLAGS, _ARMED_AT, _BIASES = (tl.constexpr(column) for column in (layout.FLAGS, layout.ARMED_AT, layout.BIASES))
_TEMPERATURE, _REPETITION, _PRESENCE, _FREQUENCY = (
    tl.constexpr(column) for column in (layout.TEMPERATURE, layout.REPETITION, layout.PRESENCE, layout.FREQUENCY)
)
_PENALISED, _BIASED, _MASKED = (tl.constexpr(flag) for flag in (layout.PENALISED, layout.BIASED, layout.MASKED))
_NOT_FINITE = tl.constexpr(layout.NOT_FINITE)


@triton.jit(do_not_specialize=["slots_stride"], do_not_specialize_on_alignment=["slots", "positions"])
def sampling_edit_kernel(
    logits,
    logits_stride,
    slots,
    slots_stride,
    positions,
    table,
    reals,
    counts,
    bias_ids,
    biases,
    masks,
    work,
    work_stride,
    tops,
    faults,
    vocab,
    EDITS: tl.constexpr,
    BIASES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Edit one chunk of the vocabulary of one row. Rows whose slots have no flags are skipped.

    It writes the edited and scaled logits to `work`, the chunk's largest to `tops`, and whether the logits are finite
    to `faults`, both [rows, parts]. `table` and `reals` are the same memory.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    if slot < 0:
        return
    flags = tl.load(table + slot * _WIDTH + _FLAGS)
    if flags == 0:
        return
    reals += slot * _WIDTH
    temperature = tl.load(reals + _TEMPERATURE)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    logits += row.to(tl.int64) * logits_stride
    work += row.to(tl.int64) * work_stride
    token = part * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    x = tl.load(logits + token, inside, other=0.0).to(tl.float32)
    finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 0)
    index = row * tl.num_programs(1) + part
    tl.store(faults + index, tl.where(finite == 1, 0, _NOT_FINITE))
    mask_words = tl.cdiv(vocab, 32)
    count, mask = counts + slot * vocab, masks + 2 * slot * mask_words
    if EDITS:
        length = tl.load(positions + row) + 1
        mask += tl.where(length < tl.load(table + slot * _WIDTH + _ARMED_AT), mask_words, 0)
        x = _edited(x, 0.0, token, inside, flags, reals, count, mask)
    x = tl.where(inside, _scaled(x, temperature), float("-inf"))
    tl.store(work + token, x, inside)
    if EDITS:
        listed = tl.arange(0, BIASES)
        here = listed < tl.load(table + slot * _WIDTH + _BIASES)
        if (flags & _BIASED) != 0:
            # The few biased tokens are computed separately and overwrite the results above.
            biased = tl.load(bias_ids + slot * BIASES + listed, here, other=-1)
            here = here & (biased // CHUNK == part)
            bias = tl.load(biases + slot * BIASES + listed, here, other=0.0)
            y = tl.load(logits + biased, here, other=0.0).to(tl.float32)
            y = _edited(y, bias, biased, here, flags, reals, count, mask)
            tl.debug_barrier()
            tl.store(work + biased, _scaled(y, temperature), here)
            tl.debug_barrier()
            x = tl.load(work + token, inside, other=float("-inf"))
    tl.store(tops + index, tl.max(x, 0))


@triton.jit
def _scaled(x, temperature):
    """Divide by the temperature. Negative zero becomes zero, because its bits would rank below those of zero."""
    x = tl.div_rn(x, temperature)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def _edited(x, bias, token, inside, flags, reals, count, mask):
    """Apply the edits of engine.sampling.rows.edit, in the same order and with the same roundings."""
    if (flags & _PENALISED) != 0:
        seen_count = tl.load(count + token, inside, other=0)
        repetition = tl.load(reals + _REPETITION)
        generated = (seen_count >> 1).to(tl.float32)
        presence = tl.where(generated > 0, tl.load(reals + _PRESENCE), 0.0)
        minus = tl.fma(generated, tl.load(reals + _FREQUENCY), presence)
        penalised = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition) - minus
        x = tl.where(seen_count != 0, penalised, x)
    x += bias
    if (flags & _MASKED) != 0:
        free = (tl.load(mask + (token >> 5), inside, other=0) >> (token & 31)) & 1
        x = tl.where(free != 0, x, float("-inf"))
    return x
