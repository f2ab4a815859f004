"""A real model says the same with tokens guessed ahead as without, whatever is asked for and however often they are
right; on both runners, in step and a step ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, EngineError, Output, SamplingParams
from engine.sequence import Sequence
from tests.engine.conftest import Load
from tests.engine.guessing import Guesser
from tests.engine.random_models import write_model
from tests.engine.test_overlap import MIXED, PROMPTS, said, scored
from tests.exhaustive import few

#: Besides: a word that must not be said, and stop strings, found in what is said without.
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def asked(cramped: EngineConfig, awkward: Path) -> tuple[list[list[int]], list[SamplingParams], list[Output], int]:
    """Prompts, parameters, what is said without guessing, and how many tokens that took."""
    params = [SamplingParams(**({"max_tokens": 10, "seed": 7 + i} | each)) for i, each in enumerate(MIXED)]
    with Engine.load(awkward, cramped) as plain:
        text = plain.generate([PROMPTS[1]], GREEDY)[0].text
        words = [text[i : i + 3] for i in range(len(text))]
        word = next(word for word in words if word.isascii() and word.isprintable())
        params += [replace(GREEDY, bad_words=(word,)), replace(GREEDY, stop=(text[5:8], text[9:13]))]
        prompts = [*PROMPTS, PROMPTS[1], PROMPTS[1]]
        before = plain.stats().generated_tokens
        outputs = plain.generate(prompts, params)
        return prompts, params, outputs, plain.stats().generated_tokens - before


@pytest.mark.parametrize(("agreement", "overlap"), few([(0.0, 0), (0.5, 1), (1.0, 0)], (0.5, 1)))
def test_whatever_is_guessed(
    load_cramped: Load, asked: Any, monkeypatch: pytest.MonkeyPatch, agreement: float, overlap: int
) -> None:
    prompts, params, expected, generated = asked

    def right(seq: Sequence, tokens: list[int]) -> int:
        """What is known to be said, and beyond its end anything."""
        own = zip(prompts, params, expected, strict=True)
        outputs = [one for prompt, each, one in own if prompt == seq.request.prompt_ids and each == seq.request.params]
        rest = outputs[0].choices[seq.choice % len(outputs[0].choices)].token_ids[len(tokens) - seq.prompt_len :]
        return rest[0] if rest else 5

    monkeypatch.setattr(
        "engine.execution.placement.Lookup", lambda slots, vocab: Guesser(right, agreement, 300, whole=True)
    )
    engine = load_cramped(speculate="lookup", speculate_tokens=3, speculate_adaptive=False, overlap=overlap)
    found = engine.generate(prompts, params)
    assert said(found) == said(expected)
    assert scored(found) == scored(expected)
    stats = engine.stats()
    # What is computed past an end is in no count.
    assert stats.generated_tokens == generated
    assert stats.drafted > 40
    # How many more depends on who runs beside whom.
    assert (stats.draft_accepted > 0.1 * stats.drafted) == (agreement > 0)


def test_a_draft_model_that_is_the_model_itself_is_always_right(load_cramped: Load, asked: Any, awkward: Path) -> None:
    prompts, params, expected, _ = asked
    engine = load_cramped(speculate="draft", draft_model=str(awkward), speculate_adaptive=False, speculate_tokens=4)
    found = engine.generate(prompts, params)
    assert said(found) == said(expected)
    stats = engine.stats()
    assert stats.draft_accepted == stats.drafted > 40


def test_a_draft_model_of_other_tokens_is_refused(load_cramped: Load, tmp_path: Path, awkward: Path) -> None:
    other = write_model(tmp_path / "other", vocab_size=290)
    with pytest.raises(EngineError, match="vocabulary of 290 tokens, and the model one of"):
        load_cramped(speculate="draft", draft_model=str(other))
