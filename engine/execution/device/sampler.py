"""The sampler of the device runner: permanent rows, a launch that waits for nothing, results by a copy.

    sampler = DeviceSampler(slots, vocab_size, device)
    features = sampler.admit(sequences)                       # host: sends what is new of their rows
    sampler.launch(logits, slots, positions, features)        # device only: may be recorded in a CUDA graph
    drawn = sampler.fetch(logits, sequences)                  # begins the copy of the results to the host
    sampled = sampler.collect(drawn)                          # waits for that copy, whenever

Row i of the logits is of `sequences[i]`; rows past these are padding, of slot -1. `admit` and `fetch` stand outside a
recorded graph, which is of use for steps with the same `features` (and rows) alone; a step is admitted, launched and
fetched in the device's one queue before the next is. That one may begin before `collect`: each slot's latest token is
in `state.last_tokens`, and penalties have counted it; so what is launched twice is counted twice, and a graph is warmed
up with slots of -1. `needs_host_token` says whose next step must wait for `collect`.
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
    """Chooses a token for each row: `choose_plainly`, or kernels that do the same."""

    def __call__(
        self, logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, features: Features
    ) -> None:
        """Write `state.chosen`, `state.last_tokens` and the counts of penalised slots. `logits` [rows, vocabulary] of
        any floating dtype, which stay as they are; `slots` int32 or int64 [rows], all different but for -1, whose rows
        choose nothing; `positions` int64 [rows] of each sequence's last token. `features` names all that rows ask for.
        """


@dataclass(frozen=True, slots=True)
class Drawn:
    """Results on their way to the host."""

    chosen: Tensor
    """int64 [2, rows], on the host: tokens and faults."""
    scored: tuple[Tensor, Tensor] | None
    """On the host, of the rows whose log probabilities are wanted: logprobs.ranked."""
    counts: dict[int, int]
    """Row -> number of likeliest tokens wanted."""
    wait: Callable[[], None]


class DeviceSampler:
    """Used by one thread."""

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        device: torch.device,
        choose: Choose | None = None,
        last_tokens: Tensor | None = None,
    ) -> None:
        """`choose` is the device's own, unless a test has another. `last_tokens`: int64 [slots] of the device, where
        that is somebody else's."""
        self._rows = DeviceSamplingRows(slots, vocab_size, device, last_tokens)
        self._device = device
        self._choose = chooser(slots, vocab_size, device) if choose is None else choose

    @property
    def state(self) -> SamplingState:
        return self._rows.state

    def admit(self, sequences: Each[Sequence]) -> Features:
        """Send what is new of the rows of the sequences whose next tokens this step chooses. Returns what they ask for.

        A sequence that is new to its slot, or whose step was thrown away, must have all its tokens, no placeholder.
        """
        return self._rows.admit(sequences)

    def launch(self, logits: Tensor, slots: Tensor, positions: Tensor, features: Features) -> Tensor:
        """See Choose; at most as many rows as slots. Returns int64 [2, rows], tokens and faults, on the device: memory
        that the next step reuses."""
        self._choose(logits, slots, positions, self.state, features)
        return self.state.chosen[:, : len(slots)]

    def fetch(self, logits: Tensor, sequences: Each[Sequence]) -> Drawn:
        """Begin to copy what the launch chose, with the log probabilities that are wanted."""
        slots = np.fromiter((one.slot for one in sequences), np.int64, len(sequences))
        wanted = self._rows.logprobs[slots]
        rows = (wanted >= 0).nonzero()[0]
        chosen = self.state.chosen[:, : len(sequences)]
        results = [chosen]
        if len(rows):
            (index,) = upload([rows], self._device)
            # Of what the model said, whatever was done to it since.
            said = log_softmax(logits[index])
            results += ranked(said, chosen[0, index], int(wanted.max()))
        hosts, wait = _to_host(results)
        counts = {int(row): int(wanted[row]) for row in rows}
        return Drawn(hosts[0], (hosts[1], hosts[2]) if counts else None, counts, wait)

    def collect(self, drawn: Drawn) -> list[Sampled]:
        """One result for each of the step's sequences. A row with a fault gets an error, alone."""
        drawn.wait()
        tokens, faults = drawn.chosen.tolist()
        scores: dict[int, TokenLogprobs] = {}
        if drawn.scored is not None:
            values, likeliest = (tensor.tolist() for tensor in drawn.scored)
            own = [tokens[row] for row in drawn.counts]
            found = listed(values, likeliest, own, list(drawn.counts.values()))
            scores = dict(zip(drawn.counts, found, strict=True))
        return [
            failed(token, fault) if fault else Sampled(token, scores.get(row))
            for row, (token, fault) in enumerate(zip(tokens, faults, strict=True))
        ]

    def counted(self, sequence: Sequence, more: int) -> None:
        """A step has launched, for a sequence that it admitted, so many more choices that hold."""
        self._rows.counted(sequence, more)

    def forget(self) -> None:
        """After a step that failed: what the device has of the rows may be anything, and will be sent again."""
        self._rows.forget()


def chooser(slots: int, vocab_size: int, device: torch.device) -> Choose:
    """How tokens are chosen on a device, for up to `slots` rows a step."""
    if device.type == "cpu" or find_spec("triton") is None:
        return choose_plainly
    # Only here: triton is there where there is a GPU.
    from engine.kernels.triton.sampling.sampler import TritonChoose

    return TritonChoose(slots, vocab_size, device)


def _to_host(tensors: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Their copies, and what waits for them. The originals may be written again by what is queued after this."""
    if tensors[0].device.type != "cuda":
        return [tensor.clone() for tensor in tensors], lambda: None
    # torch's allocator of pinned memory hands it out again only when the copies into it have ended.
    hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for host, tensor in zip(hosts, tensors, strict=True):
        host.copy_(tensor, non_blocking=True)
    return hosts, torch.cuda.current_stream(tensors[0].device).record_event().synchronize
