"""Native kernels say the same with tokens guessed ahead as without, to the bit, for the shapes of every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.kernels.native import load_library
from engine.sequence import Sequence
from tests.engine.guessing import Guesser
from tests.engine.random_models import FAMILIES, VARIANTS, write_model

PROMPTS = [[5, 6, 7], list(range(20, 47)), [9] * 14, [40, 41, 42, 40, 41]]
PARAMS = [
    SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=10, seed=4, temperature=1.3, top_k=20, ignore_eos=True, n=2, logprobs=1),
    SamplingParams(max_tokens=10, seed=5, top_p=0.8, min_p=0.02, ignore_eos=True, frequency_penalty=0.5),
    SamplingParams(max_tokens=10, seed=6, top_k=40, top_p=0.9, ignore_eos=True, repetition_penalty=1.2),
]


@pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")
@pytest.mark.parametrize("name", ["wide-heads", *FAMILIES])
def test_of_every_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = write_model(tmp_path / "model", seed=3, **(VARIANTS | FAMILIES)[name])
    config = EngineConfig(
        device="cpu", threads=1, kernels="native", max_num_seqs=6, kv_cache_bytes=1 << 20, block_size=4
    )
    with Engine.load(folder, config) as plain:
        expected = plain.generate(PROMPTS, PARAMS)

    def right(seq: Sequence, tokens: list[int]) -> int:
        said = next(
            one for prompt, one in zip(PROMPTS, expected, strict=True) if list(seq.request.prompt_ids) == prompt
        )
        rest = said.choices[seq.choice].token_ids[len(tokens) - seq.prompt_len :]
        return rest[0] if rest else 5

    monkeypatch.setattr("engine.execution.placement.Lookup", lambda slots, vocab: Guesser(right, 0.7, 320, whole=True))
    with Engine.load(folder, replace(config, speculate="lookup", speculate_adaptive=False)) as guessing:
        assert guessing.generate(PROMPTS, PARAMS) == expected
        stats = guessing.stats()
    assert 0 < stats.draft_accepted < stats.drafted
