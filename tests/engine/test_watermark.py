"""Watermarked outputs of an engine: the same however they are computed, found by their key, and as requests may ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, EngineError, Output, Request, RequestError, SamplingParams
from engine.sampling.watermark import detect
from engine.watermark import read_watermarks
from tests.engine.conftest import Load, loading
from tests.engine.looping import Listener

PROMPTS = [[5, 6, 7] * 6, list(range(20, 45))]
#: Draws, and takes the likeliest; with penalties, bans and a form.
ASKED: list[dict[str, Any]] = [
    {"seed": 4, "n": 2, "frequency_penalty": 0.2},
    {"temperature": 0.0, "banned_token_ids": list(range(5, 200, 5)), "ignore_eos": True},
    {"seed": 5, "regex": "[a-z ]{30,60}"},
]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(f"[weak]\nsecret = '{'w' * 16}'\ndelta = 1.0\n[strong]\nsecret = '{'s' * 16}'\ndelta = 20\n")
    return file


@pytest.fixture
def load(model_folder: Path) -> Iterator[Load]:
    config = EngineConfig(
        device="cpu", threads=1, kernels="reference", max_num_batched_tokens=40, max_num_seqs=6, kv_cache_bytes=1 << 20
    )
    with loading(model_folder, config) as make:
        yield make


def said(outputs: list[Output]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in each.choices] for each in outputs]


def asked(**more: Any) -> list[SamplingParams]:
    return [SamplingParams(**({"max_tokens": 24} | each | more)) for each in ASKED]


def test_it_is_the_same_with_drafts_and_overlap_and_found_by_its_key(load: Load, keys: Path) -> None:
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    engine = load(watermark_keys=str(keys))
    marked = said(engine.generate(prompts, asked(watermark="strong")))
    assert marked != said(engine.generate(prompts, asked()))
    key = read_watermarks(keys).keys["strong"]
    for prompt, choices in zip(prompts[:2], marked, strict=False):
        for tokens in choices:
            assert len(tokens) == 24
            assert detect(key, [*prompt[-key.context :], *tokens]).p < 1e-4
    assert not {*marked[1][0]} & {*range(5, 200, 5)}
    assert all(97 <= byte <= 122 or byte == 32 for byte in engine.tokenizer.decode(marked[2][0]).encode())  # type: ignore[union-attr]
    drafting: dict[str, Any] = {"speculate": "lookup", "speculate_tokens": 4, "speculate_adaptive": False}
    for how in (drafting, {"overlap": 1}):
        other = load(watermark_keys=str(keys), **how)
        assert said(other.generate(prompts, asked(watermark="strong"))) == marked


def test_it_goes_on_with_the_same_words_in_another_engine(load: Load, keys: Path) -> None:
    """As after a kill: the tokens that were published are all that the next worker has."""
    params = asked(watermark="weak")[0]
    (whole,) = said(load(watermark_keys=str(keys)).generate([PROMPTS[0]], params))
    for done in (1, 9):
        heard = Listener()
        resume = [tokens[:done] for tokens in whole]
        load(watermark_keys=str(keys)).submit(Request("again", PROMPTS[0], params, resume=resume), heard)
        events = heard.wait().events
        for choice, tokens in enumerate(whole):
            assert [t for event in events if event.choice == choice for t in event.token_ids] == tokens[done:]


def test_what_a_request_may_ask(load: Load, keys: Path) -> None:
    def tokens(engine: Engine, watermark: Any = None) -> Any:
        return said(engine.generate([PROMPTS[1]], SamplingParams(max_tokens=12, temperature=0, watermark=watermark)))

    without = load()
    plain = tokens(without)
    assert tokens(without, False) == tokens(without, "false") == plain
    with pytest.raises(RequestError, match="watermark='weak': the model is served without watermark keys"):
        tokens(without, "weak")
    strong = tokens(load(watermark_keys=str(keys)), "strong")
    assert strong != plain
    default = load(watermark_keys=str(keys), watermark_default="strong")
    assert tokens(default) == strong
    with pytest.raises(RequestError, match="does not let requests turn that off") as refused:
        tokens(default, False)
    assert refused.value.param == "watermark"
    with pytest.raises(RequestError, match="watermark='x': the model's watermark keys are strong, weak"):
        tokens(default, "x")
    free = load(watermark_keys=str(keys), watermark_default="strong", watermark_optional=True)
    assert (tokens(free), tokens(free, False)) == (strong, plain)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"watermark_default": "a"}, "watermark_default needs watermark_keys"),
        ({"watermark_keys": "x", "watermark_optional": True}, "watermark_optional needs watermark_default"),
        ({"watermark_keys": "{keys}", "watermark_default": "a"}, "has the keys strong, weak"),
        ({"watermark_keys": "{keys}", "kernels": "ragged"}, "kernels ragged on cpu has no watermark yet"),
    ],
)
def test_settings_that_cannot_be_are_refused(load: Load, keys: Path, settings: dict[str, Any], said: str) -> None:
    settings = {name: str(keys) if value == "{keys}" else value for name, value in settings.items()}
    with pytest.raises(EngineError) as refused:
        load(**settings)
    assert said in str(refused.value)
