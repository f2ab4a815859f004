"""The sampler that runs on any device, behind what a DeviceRunner asks of one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.plan import Sampled, ScheduledSeq
from engine.request import Sequence
from engine.sampling import SamplingRows, sample
from engine.upload import upload


class Sampling(Protocol):
    """Tokens on their way from the device."""

    def results(self) -> list[Sampled]:
        """Wait for them: one for each row, in order."""


class HostSampler:
    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._rows = SamplingRows(slots, vocab_size, device)
        self._device = device

    def admit(self, sequence: Sequence) -> None:
        self._rows.admit(sequence)

    def sample(self, logits: Tensor, rows: list[ScheduledSeq], last_tokens: Tensor) -> Sampling:
        found = sample(logits, self._rows.gather([row.seq for row in rows]))
        slots = np.array([row.seq.slot for row in rows], np.int64)
        tokens = np.array([one.token_id for one in found], np.int64)
        last_tokens.index_copy_(0, *upload([slots, tokens], self._device))
        return _Found(found)


class _Found:
    def __init__(self, found: list[Sampled]) -> None:
        self._found = found

    def results(self) -> list[Sampled]:
        return self._found
