"""What the device keeps of how each running sequence wants its tokens chosen, and what it chose: one row a slot.

Kernels read it by the slots of a step's rows, so that nothing of it travels with a step, and a recorded step can be
replayed for other sequences. engine/execution/device/sampling_rows.py fills it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

from torch import Tensor

#: Columns of `SamplingState.table`, int32.
FLAGS, TOP_K, ARMED_AT, BIASES, KEY_LOW, KEY_HIGH = range(6)
#: Columns of it whose 32 bits are an fp32.
TEMPERATURE, TOP_P, MIN_P, TYPICAL, REPETITION, PRESENCE, FREQUENCY = range(6, 13)
WIDTH = 16

#: What a slot's FLAGS say: which of its edits are to be read, and whether filters follow them.
PENALISED, BIASED, MASKED, FILTERED = 1, 2, 4, 8

#: Faults of a row: its logits are not all finite; its edits leave it no token.
NOT_FINITE, NONE_LEFT = 1, 2


class Features(IntFlag):
    """What the rows of a step ask for beside temperature and noise. Of each combination a graph has to be recorded."""

    EDITS = 1
    """Penalties, biases, masks."""
    FILTERS = 2
    """top_k, top_p, min_p, typical_p."""


@dataclass(frozen=True, slots=True)
class EditState:
    """Of the sequences that edit their logits; what a slot's flags do not name is not read."""

    counts: Tensor
    """int32 [slots, vocabulary]: twice how often each token was generated, and 1 more where the prompt has it."""
    bias_ids: Tensor
    """int32 [slots, most biases], different ones; the first BIASES of a slot count."""
    biases: Tensor
    """fp32, as `bias_ids`."""
    masks: Tensor
    """int32 [slots, 2, vocabulary / 32 rounded up]: bit i of word j says whether token 32 j + i may be chosen. The
    second is for lengths below ARMED_AT: it also forbids what ends the output."""


@dataclass(slots=True)
class SamplingState:
    table: Tensor
    """int32 [slots, WIDTH]: the parameters. TEMPERATURE 0 is greedy; TOP_K 0, TOP_P 1, MIN_P -inf (a logarithm) and
    TYPICAL 1 keep all; KEY_LOW and KEY_HIGH are noise.choice_state."""
    last_tokens: Tensor
    """int64 [slots]: the token that each chose last."""
    chosen: Tensor
    """int64 [2, rows]: tokens and faults of the latest step, by its rows. The token of a row with a fault is one of the
    vocabulary, and means nothing."""
    edits: EditState | None = None
    """From the first sequence on that asks for any. A step with Features.EDITS is never before that."""
