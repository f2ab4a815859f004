"""Running sequences made by hand, and a step of the sampler over them."""

from __future__ import annotations

from typing import Any

import torch

from engine.output import OutputState
from engine.params import SamplingParams
from engine.plan import Sampled
from engine.request import Request
from engine.sampling import SamplingRows, sample
from engine.sequence import Sequence


def sequence(
    slot: int,
    *,
    seed: int = 0,
    choice: int = 0,
    length: int = 3,
    eos: tuple[int, ...] = (),
    prompt: tuple[int, ...] | None = None,
    **params: Any,
) -> Sequence:
    """In row `slot`, with a prompt of `length` ones unless it is given."""
    chosen = SamplingParams(**params)
    tokens = [1] * length if prompt is None else list(prompt)
    return Sequence(
        request=Request(f"r{slot}", list(tokens), chosen),
        choice=choice,
        tokens=tokens,
        prompt_len=len(tokens),
        output=OutputState(chosen, eos, None, 100),
        seed=seed,
        serial=slot,
        queued_at=0.0,
        slot=slot,
    )


def run(logits: torch.Tensor, sequences: list[Sequence], device: torch.device | str = "cpu") -> list[Sampled]:
    """One step, of sequences that have just been admitted."""
    rows = SamplingRows(max(s.slot for s in sequences) + 1, logits.shape[-1], torch.device(device))
    for one in sequences:
        rows.admit(one)
    return sample(logits.clone().to(device), rows.gather(sequences))
