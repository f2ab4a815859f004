"""The sampling parameters of running sequences, kept on the device. Only new rows are sent."""

from __future__ import annotations

from collections.abc import Sequence as Each

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.device.edit_state import EditWriter
from engine.kernels.sampling_state import (
    ARMED_AT,
    BIASES,
    FILTERED,
    FLAGS,
    FREQUENCY,
    KEY_HIGH,
    KEY_LOW,
    MIN_P,
    PENALISED,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL,
    WIDTH,
    Features,
    SamplingState,
)
from engine.kernels.upload import upload
from engine.sampling.noise import choice_state
from engine.sequence import Sequence

_NOT_COUNTED = -1


class DeviceSamplingRows:
    """Sampling parameters on the device. Row `slot` belongs to the running sequence with that slot."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device, last_tokens: Tensor | None = None) -> None:
        """`last_tokens`: int64 [slots] on the device, if the caller owns it."""
        self._vocab_size = vocab_size
        self._device = device
        self._edits = EditWriter(slots, vocab_size, device)
        self._owners: list[Sequence | None] = [None] * slots
        # The number of the sequence's tokens in the device's counts, the latest step's included. _NOT_COUNTED for a
        # sequence without counts.
        self._counted = [_NOT_COUNTED] * slots
        self._features = np.zeros(slots, np.uint8)
        #: The number of most likely tokens wanted beside each chosen one; -1 if no log probabilities are wanted.
        self.logprobs = np.full(slots, -1, np.int64)

        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self.state = SamplingState(
            table=zeros(slots, WIDTH, dtype=torch.int32),
            last_tokens=zeros(slots, dtype=torch.int64) if last_tokens is None else last_tokens,
            chosen=zeros(2, slots, dtype=torch.int64),
        )

    def admit(self, sequences: Each[Sequence]) -> Features:
        """Fill the rows of sequences that are new to their slots, or whose rows have counted other tokens. Returns the
        features that the sequences need together.

        Call it once for each step, with the sequences that the step samples. Their counts then include the new tokens.
        """
        fresh = []
        for sequence in sequences:
            slot, length = sequence.slot, len(sequence.tokens)
            counted = self._counted[slot]
            if self._owners[slot] is not sequence or counted not in (_NOT_COUNTED, length):
                fresh.append(sequence)
            if counted >= 0:
                self._counted[slot] = length + 1
        if fresh:
            self._send(fresh)
        if self.state.edits is not None:
            self._edits.spell(sequences)
        slots = np.fromiter((sequence.slot for sequence in sequences), np.int64, len(sequences))
        return Features(int(np.bitwise_or.reduce(self._features[slots], initial=0)))

    def counted(self, sequence: Sequence, more: int) -> None:
        """Note that the device has counted `more` tokens of the sequence's latest step after the first."""
        if self._owners[sequence.slot] is sequence and self._counted[sequence.slot] >= 0:
            self._counted[sequence.slot] += more

    def forget(self) -> None:
        """Send all rows again, because after a failed step the device's copies may be wrong."""
        self._owners = [None] * len(self._owners)

    def _send(self, fresh: list[Sequence]) -> None:
        table = np.zeros((len(fresh), WIDTH), np.int32)
        last = np.fromiter((sequence.tokens[-1] for sequence in fresh), np.int64, len(fresh))
        slots = np.fromiter((sequence.slot for sequence in fresh), np.int64, len(fresh))
        self._fill(table, fresh)
        flags = self._edits.admit(fresh)
        if self._edits.state is not None:
            self.state.edits = self._edits.state
        for sequence, flag in zip(fresh, flags.tolist(), strict=True):
            self._owners[sequence.slot] = sequence
            self._counted[sequence.slot] = len(sequence.tokens) + 1 if flag & PENALISED else _NOT_COUNTED
        params = [sequence.request.params for sequence in fresh]
        table[:, ARMED_AT] = [sequence.prompt_len + p.min_tokens for sequence, p in zip(fresh, params, strict=True)]
        table[:, BIASES] = [len(p.logit_bias) for p in params]
        filtered = table[:, FLAGS] & FILTERED
        self._features[slots] = np.where(flags > 0, Features.EDITS, 0) | np.where(filtered > 0, Features.FILTERS, 0)
        table[:, FLAGS] |= flags
        self.logprobs[slots] = [p.listed for p in params]
        sent = upload([slots, table, last], self._device)
        self.state.table.index_copy_(0, sent[0], sent[1])
        self.state.last_tokens.index_copy_(0, sent[0], sent[2])

    def _fill(self, table: NDArray[np.int32], fresh: list[Sequence]) -> None:
        """Fill the table rows of new sequences, except edits."""
        params = [sequence.request.params for sequence in fresh]
        real = table.view(np.float32)
        real[:, TEMPERATURE] = [p.divisor for p in params]
        real[:, REPETITION] = [p.repetition_penalty for p in params]
        real[:, PRESENCE] = [p.presence_penalty for p in params]
        real[:, FREQUENCY] = [p.frequency_penalty for p in params]
        # Greedy rows need no filter. A filter that keeps all tokens is the same as none.
        drawn = real[:, TEMPERATURE] > 0
        table[:, TOP_K] = np.array([p.top_k if p.top_k < self._vocab_size else 0 for p in params], np.int32) * drawn
        real[:, TOP_P] = np.where(drawn, np.array([p.top_p for p in params], np.float32), 1)
        real[:, TYPICAL] = np.where(drawn, np.array([p.typical_p for p in params], np.float32), 1)
        with np.errstate(divide="ignore"):
            real[:, MIN_P] = np.log(np.array([p.min_p for p in params], np.float32) * drawn)
        filtered = (
            (table[:, TOP_K] > 0) | (real[:, TOP_P] < 1) | (real[:, TYPICAL] < 1) | (real[:, MIN_P] > float("-inf"))
        )
        table[:, FLAGS] = filtered * FILTERED
        seeds = np.array([sequence.seed for sequence in fresh], np.uint64)
        choices = np.array([sequence.choice for sequence in fresh], np.uint64)
        table[:, KEY_LOW : KEY_HIGH + 1] = choice_state(seeds, choices).view(np.int32).reshape(-1, 2)
