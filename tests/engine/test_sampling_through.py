"""Sampling parameters from the request to the text, on a real (random) model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, RequestError, SamplingParams
from tests.engine.random_models import write_model

PROMPT = "def write_model(folder"


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    config = EngineConfig(device="cpu", max_num_seqs=8, kv_cache_bytes=1 << 20, threads=1, dtype="float32")
    with Engine.load(model_folder, config) as engine:
        yield engine


def tokens(engine: Engine, **params: Any) -> list[int]:
    shared = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    return engine.generate([PROMPT], SamplingParams(**shared | params))[0].token_ids


def test_what_the_model_does_not_have_is_refused(engine: Engine, tmp_path: Path) -> None:
    for name, value in (
        ("logit_bias", {320: 1.0}),
        ("allowed_token_ids", [320]),
        ("banned_token_ids", [320]),
        ("stop_token_ids", [320]),
        ("banned_token_ids", list(range(320))),
    ):
        with pytest.raises(RequestError, match=name) as refused:
            tokens(engine, **{name: value})
        assert refused.value.param == name
    folder = write_model(tmp_path / "bare", tokenizer=False)
    config = EngineConfig(device="cpu", kv_cache_bytes=1 << 20, threads=1, max_num_seqs=2)
    with Engine.load(folder, config) as bare, pytest.raises(RequestError, match=r"no tokenizer\.json: bad_words"):
        bare.generate([[1, 2]], SamplingParams(bad_words=["x"]))
