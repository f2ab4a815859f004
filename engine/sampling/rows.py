"""The sampling parameters of running sequences, in permanent rows. A step gathers them without a loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.upload import upload
from engine.sampling.edit_rows import Drafts, EditRows
from engine.sampling.edits import Edits
from engine.sampling.filters import Filters, Ranked
from engine.sampling.noise import row_keys
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Draws:
    """The rows of a step that are sampled at a temperature."""

    rows: Tensor
    """int64 [draws]: the rows of the logits."""
    temperature: Tensor
    """fp32 [draws, 1]."""
    keys: Tensor
    """int32 [draws, 1, 2]: see noise.row_keys."""
    filters: Filters | None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of a step's rows. A field is None if no row needs it."""

    draws: Draws | None
    edits: Edits | None
    logprob_rows: Tensor | None
    """int64: the rows whose log probabilities are wanted."""
    logprob_counts: dict[int, int]
    """Maps a row to the number of most likely tokens wanted, on the host."""

    @property
    def plain(self) -> bool:
        """Whether every row takes the most likely token of the unchanged logits, without log probabilities."""
        return self.draws is None and self.edits is None and self.logprob_rows is None


class SamplingRows:
    """The sampling parameters of running sequences. Row `slot` belongs to the running sequence with that slot."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._temperature = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._typical = np.ones(slots, np.float32)
        self._filtered = np.zeros(slots, np.bool_)
        self._seed = np.zeros(slots, np.uint64)
        self._choice = np.zeros(slots, np.uint64)
        self._edits = EditRows(slots, vocab_size, device)
        self._logprobs = np.full(slots, -1, np.int64)

    def admit(self, sequence: Sequence) -> None:
        """Fill the row of the sequence's slot."""
        slot, params = sequence.slot, sequence.request.params
        self._temperature[slot] = params.divisor
        # A filter that keeps all tokens is the same as none.
        self._top_k[slot] = params.top_k if params.top_k < self._vocab_size else 0
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._typical[slot] = params.typical_p
        self._filtered[slot] = self._top_k[slot] > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1
        self._seed[slot] = sequence.seed
        self._choice[slot] = sequence.choice
        self._edits.admit(sequence)
        self._logprobs[slot] = params.listed

    def gather(self, sequences: list[Sequence], drafts: Drafts | None = None) -> SamplingBatch:
        """The parameters for sampling the next tokens of `sequences`, in the order of the logits' rows.

        `drafts`: for each row, the draft tokens assumed after its sequence's tokens. The rows of one sequence are
        adjacent, and the first of them has none.
        """
        slots = np.fromiter((s.slot for s in sequences), np.int64, len(sequences))
        wants_logprobs = (self._logprobs[slots] >= 0).nonzero()[0]
        drawn = self._temperature[slots].nonzero()[0]
        draws = self._draws(sequences, slots, drawn, drafts) if len(drawn) else None
        return SamplingBatch(
            draws=draws,
            edits=self._edits.gather(sequences, slots, drafts),
            logprob_rows=upload([wants_logprobs], self._device)[0] if len(wants_logprobs) else None,
            logprob_counts={int(row): int(self._logprobs[slots[row]]) for row in wants_logprobs},
        )

    def _draws(
        self, sequences: list[Sequence], slots: NDArray[np.int64], drawn: NDArray[np.int64], drafts: Drafts | None
    ) -> Draws:
        drawn_slots = slots[drawn]
        positions = np.fromiter((len(sequences[i].tokens) for i in drawn), np.uint64, len(drawn))
        if drafts is not None:
            positions += np.fromiter((len(drafts[i]) for i in drawn), np.uint64, len(drawn))
        keys = row_keys(self._seed[drawn_slots], self._choice[drawn_slots], positions)
        sent = upload([drawn, self._temperature[drawn_slots][:, None], keys[:, None]], self._device)
        filters = self._filters(drawn_slots) if self._filtered[drawn_slots].any() else None
        return Draws(rows=sent[0], temperature=sent[1], keys=sent[2], filters=filters)

    def _filters(self, slots: NDArray[np.int64]) -> Filters:
        """The filters of the drawn rows, by their slots. Rows without a filter add no cost."""
        top_k, top_p = self._top_k[slots], self._top_p[slots]
        min_p, mass = self._min_p[slots], self._typical[slots]
        ranked = ((top_k > 0) | (top_p < 1)).nonzero()[0]
        strange = (mass < 1).nonzero()[0]
        with np.errstate(divide="ignore"):
            distance = np.log(min_p)
        sent = upload(
            [ranked, top_k[ranked], top_p[ranked], distance[:, None], strange, mass[strange][:, None]], self._device
        )
        return Filters(
            ranked=Ranked(
                rows=sent[0] if len(ranked) < len(slots) else None,
                top_k=sent[1],
                top_p=sent[2],
                largest_k=int(top_k.max()),
                any_top_p=bool((top_p < 1).any()),
            )
            if len(ranked)
            else None,
            min_p=sent[3] if min_p.any() else None,
            typical=(sent[4], sent[5]) if len(strange) else None,
        )
