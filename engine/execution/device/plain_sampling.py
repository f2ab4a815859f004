"""The sampler on permanent rows in plain torch: the test oracle of the Triton sampler, and its replacement without
Triton.

Filters and noise are those of engine/sampling. On a GPU it does not wait for the device, but it sorts whole rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.sampling_state import (
    ARMED_AT,
    BIASED,
    BIASES,
    FLAGS,
    FREQUENCY,
    KEY_HIGH,
    KEY_LOW,
    MASKED,
    MIN_P,
    NONE_LEFT,
    NOT_FINITE,
    PENALISED,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL,
    EditState,
    Features,
    SamplingState,
)
from engine.sampling.draws import Ranked, gumbel, position_keys, thresholds, typical

_NONE = float("-inf")


def choose_plainly(logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, features: Features) -> None:
    """Choose a token for each row; see engine.execution.device.sampler.Choose."""
    live = slots >= 0
    state_rows = slots.long().clamp(min=0)
    table = state.table[state_rows]
    real = table.view(torch.float32)
    x = logits.float()
    finite = x.amin(-1).isfinite() & x.amax(-1).isfinite()
    if Features.EDITS in features and state.edits is not None:
        x = _edited(x, state_rows, positions.long() + 1, table, state.edits)
    any_left = x.amax(-1) > _NONE
    temperature = real[:, TEMPERATURE, None]
    x = torch.where(temperature > 0, x / temperature, x)
    if Features.FILTERS in features:
        x = _filtered(x, table)
    keys = position_keys(table[:, KEY_LOW : KEY_HIGH + 1].contiguous().view(torch.int64)[:, 0], positions.long() + 1)
    every = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
    tokens = torch.where(temperature > 0, gumbel(keys[:, None], every).add_(x), x).argmax(-1)
    _write(tokens, NOT_FINITE * ~finite + NONE_LEFT * ~any_left, live, state_rows, table, state)


def _write(
    tokens: Tensor, faults: Tensor, live: Tensor, state_rows: Tensor, table: Tensor, state: SamplingState
) -> None:
    """Write tokens and faults to the state. Padding rows have slot 0 in `state_rows` and must not write there."""
    rows = len(tokens)
    state.chosen[0, :rows] = tokens
    state.chosen[1, :rows] = torch.where(live, faults, 0)
    slots = torch.where(live, state_rows, len(state.last_tokens))
    padded = torch.cat((state.last_tokens, state.last_tokens[:1]))
    state.last_tokens.copy_(padded.index_copy_(0, slots, tokens)[:-1])
    if state.edits is not None:
        penalised = live & ((table[:, FLAGS] & PENALISED) != 0)
        state.edits.counts.index_put_((state_rows, tokens), 2 * penalised.int(), accumulate=True)


def _edited(x: Tensor, state_rows: Tensor, lengths: Tensor, table: Tensor, edits: EditState) -> Tensor:
    """Apply edits as engine.sampling.rows.edit does. `x`: fp32 [rows, vocabulary]; `lengths`: int64 [rows]."""
    real = table.view(torch.float32)

    def asking(flag: int) -> Tensor:
        return (table[:, FLAGS, None] & flag) != 0

    counts = edits.counts[state_rows]
    repetition = real[:, REPETITION, None]
    generated = counts >> 1
    minus = real[:, FREQUENCY, None].double() * generated + real[:, PRESENCE, None].double() * (generated > 0)
    penalised = torch.where(x > 0, x / repetition, x * repetition) - minus.float()
    x = torch.where(asking(PENALISED) & (counts > 0), penalised, x)
    ids = edits.bias_ids[state_rows].long()
    counted = asking(BIASED) & (torch.arange(ids.shape[1], device=x.device) < table[:, BIASES, None])
    x = x.scatter_add(1, torch.where(counted, ids, 0), torch.where(counted, edits.biases[state_rows], 0.0))
    early = (lengths < table[:, ARMED_AT]).long()
    tokens = torch.arange(x.shape[-1], device=x.device)
    free = (edits.masks[state_rows, early][:, tokens >> 5] >> (tokens & 31).int()) & 1
    return x.masked_fill(asking(MASKED) & (free == 0), _NONE)


def _filtered(x: Tensor, table: Tensor) -> Tensor:
    """Set the logits of tokens that a filter removes to -inf, as engine.sampling.draws.narrow does."""
    real = table.view(torch.float32)
    top_k = table[:, TOP_K].long()
    # Reading the maximum would wait for a GPU, where all tokens are sorted instead.
    largest = int(top_k.max()) if x.device.type == "cpu" else 0
    floor = thresholds(x, Ranked(None, top_k, real[:, TOP_P], largest, any_top_p=True))
    floor = torch.maximum(floor, x.amax(-1, keepdim=True) + real[:, MIN_P, None])
    x = x.masked_fill(x < floor, _NONE)
    mass = real[:, TYPICAL, None]
    # Rows without typical_p get a mass of 0, and keep all tokens.
    return x.masked_fill(~(typical(x, torch.where(mass < 1, mass, 0.0)) | (mass >= 1)), _NONE)
