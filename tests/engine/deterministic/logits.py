"""Logits to the bit: of sequences whose steps a test chooses itself, and of an engine's requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.execution.runner import Runner, logits_from
from engine.kernels.native import load_library
from engine.kv import KvSpace, Table
from engine.layers import AdaptedRows
from engine.models import Model, load_model
from engine.plan import Sampled, ScheduledSeq, StepPlan
from engine.sampling import SamplingBatch
from engine.sequence import Sequence as Running
from tests.engine.random_models import FAMILIES, VARIANTS
from tests.engine.sampling.sequences import sequence

BLOCK = 16
#: Of a slot of Steps.
LONGEST = 448
SLOTS = 64


class _Seen(Runner):
    """Keeps the logits of its last step."""

    logits: Tensor

    def _sample(self, hidden: Tensor, how: SamplingBatch, adapters: AdaptedRows | None) -> list[Sampled]:
        self.logits = self._model.logits(hidden).clone()
        return super()._sample(hidden, how, adapters)


NATIVE = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")
#: The families that are tried always; the others are exhaustive.
_ALWAYS = ("gqa", "mistral-window", "phi3-longrope", "gemma3")
MODELS = [
    pytest.param(name, marks=NATIVE if name in _ALWAYS else [NATIVE, pytest.mark.exhaustive])
    for name in sorted(VARIANTS | FAMILIES)
]


def deterministic(folder: Path, dtype: str = "float32") -> Model:
    return load_model(folder, dtype, torch.device("cpu"), "native", deterministic=True)


class Steps:
    """A model and SLOTS sequences; each slot has blocks of its own, in no order."""

    def __init__(self, model: Model) -> None:
        per_slot = LONGEST // BLOCK
        self._runner = _Seen(
            model,
            spaces=[KvSpace(SLOTS * per_slot, group.window) for group in model.kv_groups],
            block_size=BLOCK,
            max_num_seqs=SLOTS,
        )
        shuffled = torch.randperm(SLOTS * per_slot, generator=torch.Generator().manual_seed(1))
        self._blocks = shuffled.view(SLOTS, per_slot).tolist()
        self._groups = len(model.kv_groups)

    def begin(self, slot: int, tokens: Sequence[int]) -> Running:
        one = sequence(slot, temperature=0.0)
        one.tokens = list(tokens)
        held = -(-len(tokens) // BLOCK)
        one.tables = [Table(self._blocks[slot][:held]) for _ in range(self._groups)]
        return one

    def step(self, *parts: tuple[Running, int, int]) -> Tensor:
        """Compute tokens from .. to of each sequence. Returns the logits of those that come to their last token."""
        rows = [ScheduledSeq(one, start, end - start, end == len(one.tokens)) for one, start, end in parts]
        self._runner.execute(StepPlan(rows, num_tokens=sum(row.count for row in rows)))
        return self._runner.logits if any(row.samples for row in rows) else torch.empty(0)

    def by_cuts(self, slot: int, tokens: Sequence[int], cuts: Sequence[int]) -> Tensor:
        """The logits [vocabulary] of the last of `tokens`, whose computation is cut before `cuts`, ascending."""
        one = self.begin(slot, tokens)
        found = torch.empty(0)
        for start, end in pairwise((0, *cuts, len(tokens))):
            found = self.step((one, start, end))
        return found[0]


#: (choice, its tokens so far, prompt and all) -> the bytes of the logits that its next one is chosen by.
Bits = dict[tuple[tuple[int, ...], int], bytes]


@contextmanager
def recorded() -> Iterator[Bits]:
    """What every engine's steps sample from meanwhile. Where a place is computed again, it must be the same."""
    bits: Bits = {}
    plans: dict[int, StepPlan] = {}
    execute, sample = Runner.execute, Runner._sample

    def executed(self: Runner, plan: StepPlan) -> list[Sampled]:
        plans[id(self)] = plan
        return execute(self, plan)

    def sampled(self: Runner, hidden: Tensor, how: SamplingBatch, adapters: AdaptedRows | None) -> list[Sampled]:
        rows = [row for row in plans[id(self)].rows if row.samples]
        # After the last token of each, and after each of its draft.
        places = [(row.seq, row.draft[:i]) for row in rows for i in range(1 + len(row.draft))]
        for (seq, draft), logits in zip(places, logits_from(self._model, adapters)(hidden, 0), strict=True):
            key, found = ((*seq.tokens, *draft), seq.choice), logits.numpy().tobytes()
            assert bits.setdefault(key, found) == found, f"{len(key[0])} tokens, choice {key[1]}: computed otherwise"
        return sample(self, hidden, how, adapters)

    with patch.object(Runner, "execute", executed), patch.object(Runner, "_sample", sampled):
        yield bits
