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
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.execution.device.edit_state import needs_host_token
from engine.execution.device.plain_sampling import choose_plainly
from engine.execution.device.sampling_rows import DeviceSamplingRows
from engine.kernels.sampling_state import Features, SamplingState
from engine.kernels.upload import upload
from engine.logprobs import TokenLogprobs
from engine.plan import Sampled
from engine.sampling.logprobs import listed, log_softmax, ranked
from engine.sampling.sampler import failed
from engine.sequence import Sequence

__all__ = ["Choose", "DeviceSampler", "Drawn", "needs_host_token"]


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
        rows = (listed_counts >= 0).nonzero()[0]
        chosen = self.state.chosen[:, : len(sequences)]
        results = [chosen]
        if len(rows):
            (index,) = upload([rows], self._device)
            # Log probabilities are those of the model's own logits, before any edits.
            log_probs = log_softmax(logits[index])
            results += ranked(log_probs, chosen[0, index], int(listed_counts.max()))
        hosts, wait = _to_host(results)
        counts = {int(row): int(listed_counts[row]) for row in rows}
        return Drawn(hosts[0], (hosts[1], hosts[2]) if counts else None, counts, wait)

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
        return [
            failed(token, fault) if fault else Sampled(token, scores.get(row))
            for row, (token, fault) in enumerate(zip(tokens, faults, strict=True))
        ]

    def counted(self, sequence: Sequence, more: int) -> None:
        """Note that a step has accepted `more` draft tokens for a sequence that it admitted."""
        self._rows.counted(sequence, more)

    def forget(self) -> None:
        """Send all rows again, because after a failed step the device's copies may be wrong."""
        self._rows.forget()


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
