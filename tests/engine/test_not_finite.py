"""Logits that are NaN end the request that has them, alone, and are counted; nothing of it stays in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig, SamplingParams
from tests.engine.random_models import write_model

#: A token whose embedding is NaN.
SPOILED = 99


@pytest.fixture(params=["sdpa", "ragged"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    write_model(tmp_path, tie_word_embeddings=False)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][SPOILED] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = EngineConfig(
        device="cpu", max_num_seqs=4, kv_cache_bytes=1 << 17, threads=1, dtype="float32", kernels=request.param
    )
    with Engine.load(tmp_path, config) as engine:
        yield engine


def test_it_fails_alone_and_is_counted(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    healthy = [[1 + k, *range(10, 40)] for k in range(3)]
    expected = [output.token_ids for output in engine.generate(healthy, params)]
    # Several times, with a cache of a few sequences: blocks that NaN was written to go to others.
    for count in range(1, 7):
        found = engine.generate([[*range(10, 40), SPOILED, count], *healthy], params)
        assert [output.finish_reason for output in found] == ["error", "length", "length", "length"]
        assert [output.token_ids for output in found[1:]] == expected
        stats = engine.stats()
        assert (stats.not_finite, stats.kv_blocks_used, stats.running) == (count, 0, 0)


def test_so_does_one_whose_prompt_is_scored(engine: Engine) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    failed, fine = engine.generate([[5, SPOILED, 6], [5, 6]], params)
    assert (failed.finish_reason, fine.finish_reason) == ("error", "length")
    assert engine.stats().not_finite == 1
