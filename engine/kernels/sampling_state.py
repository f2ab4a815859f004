"""The sampling state on the device, one row for each slot: sampling parameters and the chosen tokens.

Kernels read it by the slots of a step's rows. So it is not sent with each step, and a recorded step can be replayed for
other sequences. engine/execution/device/sampler.py fills it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

from torch import Tensor

#: Columns of `SamplingState.table`, int32.
FLAGS, TOP_K, ARMED_AT, BIASES, KEY_LOW, KEY_HIGH = range(6)
#: Columns of the table whose 32 bits are an fp32.
TEMPERATURE, TOP_P, MIN_P, TYPICAL, REPETITION, PRESENCE, FREQUENCY = range(6, 13)
WIDTH = 16

#: Bits of a slot's FLAGS: the edits to read, and whether filters follow them.
PENALISED, BIASED, MASKED, FILTERED = 1, 2, 4, 8

#: Faults of a row: its logits are not all finite; its edits leave no token.
NOT_FINITE, NONE_LEFT = 1, 2


class Features(IntFlag):
    """The sampling features that the rows of a step need beside scale and noise. Each combination needs its own
    graph."""

    EDITS = 1
    """Penalties, biases, masks."""
    FILTERS = 2
    """top_k, top_p, min_p, typical_p."""


@dataclass(frozen=True, slots=True)
class EditState:
    """The state of sequences that edit their logits. Parts that a slot's flags do not name are not read."""

    counts: Tensor
    """int32 [slots, vocabulary]: twice the number of times each token was generated, plus 1 if the prompt has it."""
    bias_ids: Tensor
    """int32 [slots, most biases]: different token ids, of which the first BIASES of a slot are valid."""
    biases: Tensor
    """fp32, of the shape of `bias_ids`."""
    masks: Tensor
    """int32 [slots, 2, vocabulary / 32 rounded up]: bit i of word j tells whether token 32 j + i is allowed. The second
    mask is for lengths below ARMED_AT, and also bans the tokens that end the output."""


@dataclass(slots=True)
class SamplingState:
    table: Tensor
    """int32 [slots, WIDTH]: the parameters. TEMPERATURE 0 is greedy; TOP_K 0, TOP_P 1, MIN_P -inf (a logarithm) and
    TYPICAL 1 keep all; KEY_LOW and KEY_HIGH are noise.choice_state."""
    last_tokens: Tensor
    """int64 [slots]: the token that each slot chose last."""
    chosen: Tensor
    """int64 [2, rows]: tokens and faults of the latest step, by its rows. The token of a row with a fault is an
    arbitrary token of the vocabulary."""
    edits: EditState | None = None
    """Allocated for the first sequence that needs edits. No step has Features.EDITS before that."""
