"""Seeded output does not depend on neighbours, chunks, preemption or resumption."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from engine.models import Model
from engine.params import SamplingParams
from tests.exhaustive import few
from tests.parity.driver import Driver, prompts_of

PARAMS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.8, "n": 3},
    {"temperature": 0.0},
    {"temperature": 1.5, "n": 2, "min_tokens": 5},
    {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.3, "frequency_penalty": 0.6},
    {"temperature": 1.1, "typical_p": 0.8, "presence_penalty": 1.0, "logit_bias": {7: 2.0}, "n": 2},
    {"temperature": 0.0, "frequency_penalty": 2.0, "banned_token_ids": [1, 2, 3]},
    {"temperature": 1.0, "allowed_token_ids": list(range(100)), "repetition_penalty": 0.7},
]
COUNT = 16


@pytest.fixture
def variant() -> str:
    return "gqa"


@pytest.fixture
def jobs(model: Model) -> list[tuple[list[int], SamplingParams]]:
    prompts = prompts_of([3, 16, 31, 50, 64, 90, 20, 40, 12, 33], model.vocab_size, seed=1)
    return [
        (prompt, SamplingParams(max_tokens=COUNT, seed=100 + i, ignore_eos=True, **params))
        for i, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True))
    ]


@pytest.fixture
def alone(model: Model, jobs: list[tuple[list[int], SamplingParams]]) -> list[dict[int, list[int]]]:
    found = []
    for prompt, params in jobs:
        driver = Driver(model)
        driver.add("a", prompt, params)
        driver.run()
        found.append(driver.found["a"])
    return found


@pytest.mark.parametrize(("tokens", "every"), few(itertools.product((16, 512), (None, 1, 3)), (16, 3), (512, None)))
def test_a_batch_changes_nothing(
    model: Model, jobs: Any, alone: list[dict[int, list[int]]], tokens: int, every: int | None
) -> None:
    driver = Driver(model, tokens=tokens, blocks=64)
    for i, (prompt, params) in enumerate(jobs):
        driver.add(str(i), prompt, params)
    driver.run(preempt_every=every)
    assert [driver.found[str(i)] for i in range(len(jobs))] == alone


@pytest.mark.parametrize("done", [1, 7, COUNT - 1])
def test_resuming_goes_on_with_the_same_tokens(
    model: Model, jobs: Any, alone: list[dict[int, list[int]]], done: int
) -> None:
    """Each choice resumes at a place of its own."""
    driver = Driver(model)
    published = []
    for i, (prompt, params) in enumerate(jobs):
        resume = [tokens[: max(0, done - 3 * choice)] for choice, tokens in alone[i].items()]
        published.append(resume)
        driver.add(str(i), prompt, params, resume=resume)
    driver.run()
    for i, choices in enumerate(alone):
        for choice, tokens in choices.items():
            assert published[i][choice] + driver.found[str(i)][choice] == tokens


def test_another_seed_gives_other_tokens(model: Model, jobs: Any, alone: list[dict[int, list[int]]]) -> None:
    prompt = jobs[0][0]
    driver = Driver(model)
    driver.add("a", prompt, SamplingParams(max_tokens=COUNT, seed=999, ignore_eos=True))
    assert driver.run()["a"] != alone[0][0]
