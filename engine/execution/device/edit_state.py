"""The penalties, biases and masks of running sequences on the device. Allocated when the first sequence needs any."""

from __future__ import annotations

from collections.abc import Sequence as Each

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.sampling_state import BIASED, MASKED, PENALISED, EditState
from engine.kernels.upload import upload
from engine.params import MAX_BIASES
from engine.sampling.rows import BadWords, allow, by_last_but_one, spelled_out
from engine.sequence import Sequence

Masks = NDArray[np.int32]


def needs_host_token(sequence: Sequence) -> bool:
    """Whether the host must know the sequence's last token before the next can be chosen.

    That is so for bad words of several tokens: the last token of such a word is banned after its other tokens, and the
    device keeps only the last token of a sequence. It is so for an output's form, which the host follows.
    """
    return sequence.matcher is not None or any(len(word) > 1 for word in sequence.bad_words)


class EditWriter:
    """Writes the edit state. Row `slot` belongs to the running sequence with that slot."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.state: EditState | None = None
        self._slots = slots
        self._vocab_size = vocab_size
        self._device = device
        #: For slots whose mask changes from step to step, because of bad words of several tokens or of a form: these
        #: words, the mask without them and the form, and the tokens that the words ban now.
        self._changing: dict[int, tuple[BadWords, Masks, list[int]]] = {}

    def admit(self, fresh: Each[Sequence]) -> NDArray[np.int32]:
        """Fill the rows of new sequences. Returns their flags, 0 for a sequence without edits."""
        flags = np.fromiter((self._flags_of(sequence) for sequence in fresh), np.int32, len(fresh))
        for sequence in fresh:
            self._changing.pop(sequence.slot, None)
        if flags.any():
            if self.state is None:
                self.state = self._allocate()
            asking = list(zip(fresh, flags.tolist(), strict=True))
            self._count(self.state.counts, [sequence for sequence, flag in asking if flag & PENALISED])
            self._bias(self.state, [sequence for sequence, flag in asking if flag & BIASED])
            self._mask(self.state.masks, [sequence for sequence, flag in asking if flag & MASKED])
        return flags

    def spell(self, sequences: Each[Sequence]) -> None:
        """Ban the tokens that would complete a bad word of several tokens or leave the output's form, and lift the bans
        of the step before."""
        masks = [(sequence.slot, self._changed(sequence)) for sequence in sequences if sequence.slot in self._changing]
        changed = {slot: mask for slot, mask in masks if mask is not None}
        if changed and self.state is not None:
            _send(self.state.masks, list(changed), list(changed.values()), self._device)

    def _changed(self, sequence: Sequence) -> Masks | None:
        """The sequence's mask, unless it is that of the step before."""
        bad_words, mask, banned = self._changing[sequence.slot]
        now = sorted(spelled_out(bad_words, sequence.tokens))
        if now == banned and sequence.matcher is None:
            return None
        self._changing[sequence.slot] = bad_words, mask, now
        if now:
            mask = _without(mask, np.array(now, np.int64))
        if sequence.matcher is None:
            return mask
        form = np.zeros(mask.shape[1], np.int32)
        allow(form, sequence)
        return mask & form

    def _allocate(self) -> EditState:
        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(self._slots, *size, dtype=dtype, device=self._device)

        return EditState(
            counts=zeros(self._vocab_size, dtype=torch.int32),
            bias_ids=zeros(MAX_BIASES, dtype=torch.int32),
            biases=zeros(MAX_BIASES, dtype=torch.float32),
            masks=zeros(2, -(-self._vocab_size // 32), dtype=torch.int32),
        )

    @staticmethod
    def _flags_of(sequence: Sequence) -> int:
        params = sequence.request.params
        ends = params.min_tokens > 0 and len(sequence.output.ends) > 0
        masked = ends or params.allowed_token_ids or params.banned_token_ids or sequence.bad_words or sequence.matcher
        return PENALISED * params.penalises | BIASED * bool(params.logit_bias) | MASKED * bool(masked)

    def _count(self, counts: Tensor, sequences: list[Sequence]) -> None:
        """Count the tokens of these sequences again from the start."""
        if not sequences:
            return
        places, values = [], []
        for sequence in sequences:
            tokens = np.array(sequence.tokens, np.int64)
            # The work is proportional to the number of tokens, not to the vocabulary.
            listed, inverse = np.unique(tokens, return_inverse=True)
            token_counts = 2 * np.bincount(inverse[sequence.prompt_len :], minlength=len(listed))
            token_counts[inverse[: sequence.prompt_len]] |= 1
            places.append(listed + sequence.slot * self._vocab_size)
            values.append(token_counts.astype(np.int32))
        slots = np.array([sequence.slot for sequence in sequences], np.int64)
        sent = upload([slots, np.concatenate(places), np.concatenate(values)], self._device)
        counts.index_fill_(0, sent[0], 0)
        counts.view(-1).index_copy_(0, sent[1], sent[2])

    def _bias(self, state: EditState, sequences: list[Sequence]) -> None:
        if not sequences:
            return
        ids = np.zeros((len(sequences), MAX_BIASES), np.int32)
        values = np.zeros((len(sequences), MAX_BIASES), np.float32)
        for row, sequence in enumerate(sequences):
            pairs = sequence.request.params.logit_bias
            ids[row, : len(pairs)] = [token_id for token_id, _ in pairs]
            values[row, : len(pairs)] = [value for _, value in pairs]
        sent = upload([np.array([sequence.slot for sequence in sequences], np.int64), ids, values], self._device)
        state.bias_ids.index_copy_(0, sent[0], sent[1])
        state.biases.index_copy_(0, sent[0], sent[2])

    def _mask(self, masks: Tensor, sequences: list[Sequence]) -> None:
        if not sequences:
            return
        rows = []
        for sequence in sequences:
            mask = self._mask_of(sequence)
            bad_words = by_last_but_one(sequence.bad_words)
            if bad_words or sequence.matcher is not None:
                self._changing[sequence.slot] = bad_words, mask, []
            rows.append(mask)
        _send(masks, [sequence.slot for sequence in sequences], rows, self._device)

    def _mask_of(self, sequence: Sequence) -> Masks:
        """The sequence's allowed tokens as bits, int32 [2, words]: normally, and before min_tokens is reached."""
        params = sequence.request.params
        free = np.full(self._vocab_size, not params.allowed_token_ids)
        free[list(params.allowed_token_ids)] = True
        single = [word[0] for word in sequence.bad_words if len(word) == 1]
        free[self._in_vocabulary([*params.banned_token_ids, *single])] = False
        early = free.copy()
        early[self._in_vocabulary(sequence.output.ends)] = False
        bits = np.zeros((2, 4 * -(-self._vocab_size // 32)), np.uint8)
        packed = np.packbits(np.stack((free, early)), axis=1, bitorder="little")
        bits[:, : packed.shape[1]] = packed
        return bits.view("<i4").astype(np.int32, copy=False)

    def _in_vocabulary(self, ids: Each[int] | frozenset[int]) -> list[int]:
        """The ids that are in the model's vocabulary. A tokenizer may have others."""
        return [token_id for token_id in ids if token_id < self._vocab_size]


def _without(mask: Masks, ids: NDArray[np.int64]) -> Masks:
    """The mask with these tokens banned too."""
    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
    bits[:, ids] = 0
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def _send(masks: Tensor, slots: list[int], rows: list[Masks], device: torch.device) -> None:
    sent = upload([np.array(slots, np.int64), np.stack(rows)], device)
    masks.index_copy_(0, sent[0], sent[1])
