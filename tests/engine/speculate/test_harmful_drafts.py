"""A draft token for which the model computes NaN leaves nothing behind once it is rejected."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig, SamplingParams
from engine.kernels.native import load_library
from engine.plan import ScheduledSeq
from tests.engine.random_models import FAMILIES, write_model
from tests.exhaustive import few

#: Whose row of the embedding is NaN: its K/V are, and whatever sees them.
HARMFUL = 300
PROMPTS = [[5, 6, 7], list(range(20, 45)), [9] * 14]
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logit_bias={HARMFUL: -100, HARMFUL + 1: -100}),
    SamplingParams(max_tokens=20, seed=4, ignore_eos=True, n=2, logit_bias={HARMFUL: -100, HARMFUL + 1: -100}),
    SamplingParams(max_tokens=20, seed=5, ignore_eos=True, logit_bias={HARMFUL: -100, HARMFUL + 1: -100}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("harmful") / "model"
    write_model(made, seed=3, **(FAMILIES["mistral-window"] | {"tie_word_embeddings": False}))
    held = load_file(made / "model.safetensors")
    held["model.embed_tokens.weight"][HARMFUL] = torch.nan
    save_file(held, made / "model.safetensors")
    return made


class Harmful:
    """Guesses wrong tokens, of which one is harmful: the first, or the last of many."""

    def __init__(self, first: bool) -> None:
        self.first = first

    def propose(self, rows: list[ScheduledSeq]) -> list[tuple[int, ...]]:
        fine = (HARMFUL + 1,)
        return [
            (HARMFUL, *fine * (row.max_draft - 1)) if self.first else (*fine * (row.max_draft - 1), HARMFUL)
            for row in rows
        ]

    def forget(self) -> None:
        pass


@pytest.mark.parametrize(
    ("kernels", "first"),
    few(
        product(("reference", "ragged", "sdpa", "cpu", "native"), (True, False)),
        *(("reference", False), ("ragged", True), ("sdpa", False), ("cpu", True), ("native", True)),
    ),
)
def test_rejected_draft_tokens_harm_no_sequence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, first: bool
) -> None:
    """Blocks of four tokens, so that drafts end within blocks and beyond them."""
    if kernels == "native" and load_library() is None:
        pytest.skip("native kernels are not built for this CPU")
    monkeypatch.setattr("engine.execution.placement.Lookup", lambda slots, vocab: Harmful(first))
    config = EngineConfig(
        device="cpu",
        threads=1,
        kernels=kernels,  # type: ignore[arg-type]
        max_num_seqs=6,
        kv_cache_bytes=1 << 20,
        block_size=4,
    )
    with Engine.load(folder, config) as plain:
        expected = plain.generate(PROMPTS, PARAMS)
    assert all(len(one.token_ids) == 20 for each in expected for one in each.choices)
    with Engine.load(
        folder, replace(config, speculate="lookup", speculate_tokens=12, speculate_adaptive=False)
    ) as found:
        outputs = found.generate(PROMPTS, PARAMS)
        stats = found.stats()
        assert stats.draft_accepted == stats.not_finite == 0
    assert [[one.token_ids for one in each.choices] for each in outputs] == [
        [one.token_ids for one in each.choices] for each in expected
    ]
