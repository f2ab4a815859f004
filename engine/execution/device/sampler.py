"""The sampler of the device runner: permanent rows, a launch that waits for nothing, results by a copy.

    sampler = DeviceSampler(slots, vocab_size, device)
    features = sampler.admit(sequences)                       # host: sends the changes of their rows
    sampler.launch(logits, slots, positions, features)        # device only: may be recorded in a CUDA graph
    drawn = sampler.fetch(logits, sequences)                  # begins the copy of the results to the host
    sampled = sampler.collect(drawn)                          # waits for that copy, whenever

Row i of the logits belongs to `sequences[i]`; the rows after these are padding, with slot -1. `admit` and `fetch` are
not part of a recorded graph. A graph serves only steps with the same `features` (and rows). A step is admitted,
launched and fetched in the device's one queue before the next step is. The next step may begin before `collect`: each
slot's latest token is in `state.last_tokens`, and penalties have counted it. A step launched twice is counted twice, so
a graph is warmed up with slots of -1. `needs_host_token` tells which sequences' next steps must wait for `collect`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Each
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.device.edit_state import EditWriter, needs_host_token
from engine.execution.device.plain_sampling import choose_plainly
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
from engine.plan import Sampled
from engine.request import TokenLogprobs
from engine.sampling.draws import choice_state
from engine.sampling.rows import BeamRows, EditRows, continuations_of, edit
from engine.sampling.sampler import continue_beams, failed, listed, log_softmax, ranked, ranked_continuations
from engine.sequence import Sequence

__all__ = ["Choose", "DeviceSampler", "Drawn", "needs_host_token"]

_NOT_COUNTED = -1


class Choose(Protocol):
    """A function that chooses a token for each row: `choose_plainly`, or kernels that do the same."""

    def __call__(
        self, logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, features: Features
    ) -> None:
        """Write `state.chosen`, `state.last_tokens` and the counts of penalised slots.

        `logits`: [rows, vocabulary] of any floating dtype, not changed. `slots`: int32 or int64 [rows], all different
        except -1, whose rows choose nothing. `positions`: int64 [rows], of each sequence's last token. `features`: all
        features that any row needs.
        """


@dataclass(frozen=True, slots=True)
class Drawn:
    """Results that are being copied to the host."""

    chosen: Tensor
    """int64 [2, rows], on the host: tokens and faults."""
    scored: tuple[Tensor, Tensor] | None
    """The results of logprobs.ranked, on the host, for the rows whose log probabilities are wanted."""
    counts: dict[int, int]
    """Maps each such row to the number of most likely tokens wanted."""
    wait: Callable[[], None]
    beams: BeamRows | None = None
    continued: list[Tensor] = field(default_factory=list)
    """The results of `ranked_continuations`, on the host."""


class DeviceSampler:
    """Samples tokens on the device. Used by one thread."""

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        device: torch.device,
        choose: Choose | None = None,
        last_tokens: Tensor | None = None,
    ) -> None:
        """`choose`: the device's own, unless a test passes another. `last_tokens`: int64 [slots] on the device, if the
        caller owns it."""
        self._rows = DeviceSamplingRows(slots, vocab_size, device, last_tokens)
        self._device = device
        self._beams = DeviceBeams(slots, vocab_size, device)
        self._choose = chooser(slots, vocab_size, device) if choose is None else choose

    @property
    def state(self) -> SamplingState:
        return self._rows.state

    def admit(self, sequences: Each[Sequence]) -> Features:
        """Send the changes of the rows of the sequences that this step samples. Returns the features that they need.

        A sequence that is new to its slot, or whose step was given up, must have all its tokens, no UNKNOWN one.
        """
        return self._rows.admit(sequences)

    def launch(self, logits: Tensor, slots: Tensor, positions: Tensor, features: Features) -> Tensor:
        """Choose tokens (see Choose) for at most as many rows as slots. Returns tokens and faults, int64 [2, rows], on
        the device. The next step overwrites this memory."""
        self._choose(logits, slots, positions, self.state, features)
        return self.state.chosen[:, : len(slots)]

    def fetch(self, logits: Tensor, sequences: Each[Sequence]) -> Drawn:
        """Begin to copy the chosen tokens, with the wanted log probabilities, to the host."""
        slots = np.fromiter((sequence.slot for sequence in sequences), np.int64, len(sequences))
        listed_counts = self._rows.logprobs[slots]
        beams = self._beams.rows(sequences)
        if beams is not None:  # they have those of their continuations
            listed_counts[beams.on_host] = -1
        rows = (listed_counts >= 0).nonzero()[0]
        chosen = self.state.chosen[:, : len(sequences)]
        results = [chosen]
        if len(rows):
            (index,) = upload([rows], self._device)
            # Log probabilities are those of the model's own logits, before any edits.
            log_probs = log_softmax(logits[index])
            results += ranked(log_probs, chosen[0, index], int(listed_counts.max()))
        host_results = len(results)
        if beams is not None:
            results += self._beams.ranked(logits, sequences, beams)
        hosts, wait = _to_host(results)
        counts = {int(row): int(listed_counts[row]) for row in rows}
        scored = (hosts[1], hosts[2]) if counts else None
        return Drawn(hosts[0], scored, counts, wait, beams, hosts[host_results:])

    def collect(self, drawn: Drawn) -> list[Sampled]:
        """Wait for the copies. Returns one result for each of the step's sequences. Only a row with a fault has an
        error."""
        drawn.wait()
        tokens, faults = drawn.chosen.tolist()
        scores: dict[int, TokenLogprobs] = {}
        if drawn.scored is not None:
            values, likeliest = (tensor.tolist() for tensor in drawn.scored)
            chosen_ids = [tokens[row] for row in drawn.counts]
            logprobs = listed(values, likeliest, chosen_ids, list(drawn.counts.values()))
            scores = dict(zip(drawn.counts, logprobs, strict=True))
        sampled = [
            failed(token, fault) if fault else Sampled(token, scores.get(row))
            for row, (token, fault) in enumerate(zip(tokens, faults, strict=True))
        ]
        if drawn.beams is not None:
            continue_beams(sampled, faults, [tensor.tolist() for tensor in drawn.continued], drawn.beams)
        return sampled

    def counted(self, sequence: Sequence, more: int) -> None:
        """Note that a step has accepted `more` draft tokens for a sequence that it admitted."""
        self._rows.counted(sequence, more)

    def forget(self) -> None:
        """Send all rows again, because after a failed step the device's copies may be wrong."""
        self._rows.forget()
        self._beams.forget()


class DeviceBeams:
    """Ranks the next tokens of beams. Penalties, biases and lists change their log probabilities, so they are applied
    by torch here, from the rows that the CPU's sampler has. The host knows all tokens of a beam before its step."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        self._device = device
        self._edits: EditRows | None = None  # made with the first beam
        self._owners: dict[int, Sequence] = {}

    def rows(self, sequences: Each[Sequence]) -> BeamRows | None:
        """The rows that are beams; None if no sequence is one."""
        at = [row for row, sequence in enumerate(sequences) if sequence.beam is not None]
        if not at:
            return None
        beams = [sequences[row] for row in at]
        (sent,) = upload([np.array(at, np.int64)], self._device)
        counts = [continuations_of(sequence, self._vocab_size) for sequence in beams]
        return BeamRows(sent, at, counts, [sequence.request.params.listed for sequence in beams])

    def ranked(self, logits: Tensor, sequences: Each[Sequence], beams: BeamRows) -> list[Tensor]:
        """See `ranked_continuations`. `logits`: [rows, vocabulary], not changed."""
        if self._edits is None:
            self._edits = EditRows(self._slots, self._vocab_size, self._device)
        chosen = [sequences[row] for row in beams.on_host]
        for sequence in chosen:
            if self._owners.get(sequence.slot) is not sequence:
                self._edits.admit(sequence)
                self._owners[sequence.slot] = sequence
        before_edits = log_softmax(logits[beams.rows])
        edits = self._edits.gather(chosen, np.array([sequence.slot for sequence in chosen], np.int64))
        scores = before_edits
        if edits is not None:
            scores = before_edits.clone()
            edit(scores, edits)
        return ranked_continuations(scores, before_edits, beams)

    def forget(self) -> None:
        """Read sequences' parameters, and count their tokens, again."""
        self._owners.clear()


def chooser(slots: int, vocab_size: int, device: torch.device) -> Choose:
    """The Choose function of a device, for up to `slots` rows a step."""
    if device.type == "cpu" or find_spec("triton") is None:
        return choose_plainly
    # Imported here because triton is only installed on machines with a GPU.
    from engine.kernels.triton.sampling.sampler import TritonChoose

    return TritonChoose(slots, vocab_size, device)


def _to_host(tensors: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Begin to copy tensors to the host. Returns the copies and a function that waits for them. Work queued later may
    overwrite the originals."""
    if tensors[0].device.type != "cuda":
        return [tensor.clone() for tensor in tensors], lambda: None
    # torch's allocator reuses pinned memory only after the copies into it have ended.
    hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for host, tensor in zip(hosts, tensors, strict=True):
        host.copy_(tensor, non_blocking=True)
    return hosts, torch.cuda.current_stream(tensors[0].device).record_event().synchronize


class DeviceSamplingRows:
    """The sampling parameters of running sequences, kept on the device. Only new rows are sent. Row `slot` belongs to
    the running sequence with that slot.
    """

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
        real[:, TEMPERATURE] = [0.0 if s.beam is not None else s.request.params.divisor for s in fresh]
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
