"""A prompt's log probabilities are transformers' own, however the prompt is cut up, put out, or known before."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from engine.models import Model
from engine.params import SamplingParams
from engine.request import Event
from engine.sampling import sampler as logprobs_module
from tests.exhaustive import few
from tests.parity.conftest import Truth
from tests.parity.driver import Driver, prompts_of

LENGTHS = [1, 2, 17, 64, 90, 150]
TOP = 3


def scored(driver: Driver, prompts: list[list[int]], every: int | None = None, **params: int) -> list[list[Event]]:
    """Each prompt's events."""
    driver.events.clear()
    for i, prompt in enumerate(prompts):
        params = {"max_tokens": 4, "prompt_logprobs": TOP} | params
        driver.add(str(i), prompt, SamplingParams(temperature=0.0, **params))
    driver.run(preempt_every=every)
    return [[event for event in driver.events if event.request_id == str(i)] for i in range(len(prompts))]


@pytest.fixture
def variant() -> str:
    return "gqa"


@pytest.fixture
def prompts(model: Model) -> list[list[int]]:
    return prompts_of(LENGTHS, model.vocab_size, seed=3)


def check(truth: Truth, prompt: list[int], events: list[Event], top: int = TOP) -> None:
    """Told once, before the first token, for each token but the first, as transformers has it."""
    telling = [event for event in events if event.prompt_logprobs is not None]
    assert [telling[0].index, *telling[0].token_ids] == [0]
    assert telling == events[: len(telling)]
    assert len(telling) == 1
    found = telling[0].prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    said = truth.logits(prompt).log_softmax(-1)
    for place, one in enumerate(found[1:], start=1):
        assert one is not None
        assert one.token_id == prompt[place]
        expected = said[place - 1]
        assert one.logprob == pytest.approx(float(expected[prompt[place]]), abs=2e-4)
        assert len(one.top) == top
        best = expected.topk(top).values
        assert torch.allclose(torch.tensor([value for _, value in one.top]), best, atol=2e-4)
        for token_id, value in one.top:
            assert value == pytest.approx(float(expected[token_id]), abs=2e-4)


@pytest.mark.parametrize(("tokens", "every"), few(product([16, 512], [None, 1, 3]), (16, 1), (512, 3)))
def test_chunks_and_preemption_change_nothing(
    model: Model, prompts: list[list[int]], truth: Truth, tokens: int, every: int | None
) -> None:
    found = scored(Driver(model, tokens=tokens, blocks=64), prompts, every)
    for prompt, events in zip(prompts, found, strict=True):
        check(truth, prompt, events)
        assert sum(len(event.token_ids) for event in events) == 4


def test_what_is_cached_is_computed_again_to_be_scored(model: Model, prompts: list[list[int]], truth: Truth) -> None:
    driver = Driver(model)
    scored(driver, prompts)
    again = scored(driver, prompts)
    for prompt, events in zip(prompts, again, strict=True):
        check(truth, prompt, events)
        assert events[-1].cached_tokens == 0
    driver.add("plain", prompts[-1], SamplingParams(max_tokens=1))
    driver.run()
    assert driver.events[-1].cached_tokens == 144


def test_slices_of_any_size_give_the_same(
    model: Model, prompts: list[list[int]], truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "_SLICE", 7 * model.vocab_size)
    for prompt, events in zip(prompts, scored(Driver(model, tokens=512), prompts), strict=True):
        check(truth, prompt, events)


def test_a_prompt_may_be_scored_for_its_own_sake(model: Model, prompts: list[list[int]], truth: Truth) -> None:
    found = scored(Driver(model, tokens=16), prompts, max_tokens=0, prompt_logprobs=0)
    for prompt, events in zip(prompts, found, strict=True):
        check(truth, prompt, events, top=0)
        assert [event.finish_reason for event in events] == [None, "length"]
        assert events[-1].done
        assert not any(event.token_ids for event in events)


def test_choices_share_one_scoring(model: Model, prompts: list[list[int]], truth: Truth) -> None:
    found = scored(Driver(model), prompts, n=3, max_tokens=5)
    for prompt, events in zip(prompts, found, strict=True):
        check(truth, prompt, events)
        assert sum(len(event.token_ids) for event in events) == 15
