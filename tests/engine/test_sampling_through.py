"""Sampling parameters from the request to the text, on a real (random) model."""

from __future__ import annotations

from collections import Counter
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


def text(engine: Engine, **params: Any) -> str:
    return engine.generate([PROMPT], SamplingParams(**{"max_tokens": 24, "seed": 3, "ignore_eos": True} | params))[
        0
    ].text


def test_greedy_output_heeds_penalties_and_lists(engine: Engine) -> None:
    plain = tokens(engine)
    assert max(Counter(plain).values()) > 2
    assert max(Counter(tokens(engine, presence_penalty=2.0, frequency_penalty=2.0)).values()) <= 2
    assert len(set(tokens(engine, repetition_penalty=10.0))) > len(set(plain))
    assert plain[0] not in tokens(engine, banned_token_ids=[plain[0]])
    assert set(tokens(engine, allowed_token_ids=[5, 6, 7])) <= {5, 6, 7}
    assert set(tokens(engine, logit_bias={9: 100})) == {9}


@pytest.mark.parametrize("word", ["e", "th", "ll", "lxl"])
def test_bad_words_do_not_come(engine: Engine, word: str) -> None:
    assert engine.tokenizer is not None
    # With nothing else to write but this and another letter, it comes soon; and it cannot come by another spelling.
    few = engine.tokenizer.encode(word) + engine.tokenizer.encode("x")
    free = {"allowed_token_ids": few, "temperature": 50.0, "max_tokens": 60}
    assert word in text(engine, **free)
    assert word not in text(engine, bad_words=[word], **free)


def test_a_stop_string_may_stay(engine: Engine) -> None:
    whole = text(engine)
    stop = whole[8:11]
    cut = text(engine, stop=[stop])
    assert whole.startswith(cut)
    assert text(engine, stop=[stop], include_stop=True) == cut + stop


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


def test_a_request_that_generates_nothing_ends_at_once(engine: Engine) -> None:
    (output,) = engine.generate([PROMPT], SamplingParams(max_tokens=0, n=2))
    assert [(one.token_ids, one.text, one.finish_reason) for one in output.choices] == [([], "", "length")] * 2
    (output,) = engine.generate([PROMPT], SamplingParams(max_tokens=0, n=2, prompt_logprobs=1))
    assert [one.finish_reason for one in output.choices] == ["length", "length"]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == output.prompt_tokens
