"""The device's runner says what the plain one says, token for token, however the work was cut up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import Model, load_model
from engine.params import SamplingParams
from engine.request import Event
from tests.engine.random_models import FAMILIES
from tests.exhaustive import few
from tests.parity.driver import Driver, greedy, prompts_of

#: Shorter and longer than a window, on both sides of the switch of "phi3-longrope".
LENGTHS = [1, 17, 30, 59, 61, 120]
COUNT = 12
EACH = ["gqa", "mqa", *FAMILIES]

#: A job's prompt and what it asks for.
Job = tuple[list[int], SamplingParams]
Tell = Callable[..., list[Any]]


class Telling(Driver):
    """Keeps the events, in order."""

    def step(self) -> None:
        plan = self.scheduler.schedule(0.0)
        assert plan is not None
        self.events: list[Event]
        for event in self.scheduler.update(plan, self.runner.execute(plan), 0.0):
            assert event.error is None
            self.events.append(event)
        self.steps += 1

    def tell(self, jobs: list[Job], every: int | None) -> list[Any]:
        """Of each job and choice its tokens, their log probabilities and, first, the prompt's."""
        self.events = []
        for i, (prompt, params) in enumerate(jobs):
            self.add(str(i), prompt, params)
        self.run(every)
        return [
            (
                [event.token_ids for event in own],
                [one for event in own for one in [*(event.prompt_logprobs or ()), *(event.logprobs or ())]],
                own[-1].cached_tokens,
            )
            for i, (_, params) in enumerate(jobs)
            for choice in range(params.n)
            if (own := [e for e in self.events if e.request_id == str(i) and e.choice == choice])
        ]


@pytest.fixture(params=few(EACH, "gqa", "gemma3", "phi3-longrope"))
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model(variant: str, folders: dict[str, Path], device: torch.device) -> Model:
    """For the plain runner."""
    return load_model(folders[variant], "float32", device, "cpu" if device.type == "cpu" else "sdpa")


@pytest.fixture(params=["ragged", *(["triton"] if torch.cuda.is_available() else [])])
def ragged(variant: str, folders: dict[str, Path], device: torch.device, request: pytest.FixtureRequest) -> Model:
    if device.type == "cpu" and request.param == "triton":
        pytest.skip("interpreted it would take minutes")
    return load_model(folders[variant], "float32", device, request.param)


@pytest.fixture
def compare(model: Model, ragged: Model) -> Callable[..., Telling]:
    """Runs the same history on both runners; the device's driver, to be looked at."""

    def run(jobs: list[Job], every: int | None = None, **settings: Any) -> Telling:
        plain, device = (Telling(one, **settings) for one in (model, ragged))
        expected, found = plain.tell(jobs, every), device.tell(jobs, every)
        assert [(tokens, cached) for tokens, _, cached in found] == [(tokens, cached) for tokens, _, cached in expected]
        for (_, ours, _), (_, theirs, _) in zip(found, expected, strict=True):
            assert len(ours) == len(theirs)
            for one, other in zip(ours, theirs, strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    assert one.token_id == other.token_id
                    assert one.logprob == pytest.approx(other.logprob, abs=2e-4)
                    assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=2e-4)
        assert plain.scheduler.stats() == device.scheduler.stats()
        return device

    return run


@pytest.fixture
def jobs(model: Model) -> list[Job]:
    """Greedy and drawn by turns."""
    params = [greedy(COUNT), SamplingParams(max_tokens=COUNT, ignore_eos=True, seed=5, temperature=0.8, top_p=0.9)]
    return [(prompt, params[i % 2]) for i, prompt in enumerate(prompts_of(LENGTHS, model.vocab_size))]


@pytest.mark.parametrize(("tokens", "every"), [(16, None), (512, 3)])
def test_at_every_chunk_size_and_with_preemptions(compare: Tell, jobs: list[Job], tokens: int, every: int) -> None:
    compare(jobs, every, tokens=tokens, block_size=4 if every else 16)


def test_with_too_little_memory_for_all(compare: Tell, jobs: list[Job], model: Model) -> None:
    blocks = 14 if model.kv_groups[0].window == 21 else 38
    driver = compare(jobs, blocks=blocks, block_size=4, tokens=64)
    assert driver.scheduler.stats().preemptions > 0


@pytest.mark.parametrize("variant", ["gqa", "gemma3", "phi3-longrope"])
def test_behind_cached_prefixes_and_with_choices(compare: Tell, model: Model) -> None:
    shared, *tails = prompts_of([40, 1, 30, 8], model.vocab_size, seed=3)
    prompts = [shared, shared, *(shared + tail for tail in tails), shared[:30]]
    driver = compare([(prompt, replace(greedy(COUNT), n=2)) for prompt in prompts], sequences=3, block_size=4)
    assert driver.scheduler.stats().cached_tokens > 0


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "prompt_logprobs": 2, "logprobs": 0},
    {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.3, "frequency_penalty": 0.6},
    {"temperature": 1.1, "typical_p": 0.8, "presence_penalty": 1.0, "logit_bias": {7: 2.0}, "n": 2},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.8, "n": 2, "best_of": 4},
    {"temperature": 0.0, "banned_token_ids": [1, 2, 3], "prompt_logprobs": 0},
    {"temperature": 1.0, "allowed_token_ids": list(range(100)), "min_tokens": 5},
    {"max_tokens": 0, "prompt_logprobs": 3},
]


@pytest.mark.parametrize("variant", ["gqa", "gemma2"])
@pytest.mark.parametrize(("tokens", "every"), few([(16, None), (256, 4)], (16, None)))
def test_whatever_is_asked_for(compare: Tell, model: Model, tokens: int, every: int | None) -> None:
    prompts = prompts_of([3, 50, 31, 16, 20, 64, 12, 33], model.vocab_size, seed=1)
    asked = [
        (prompt, SamplingParams(**({"max_tokens": COUNT, "seed": 100 + i, "ignore_eos": True} | params)))
        for i, (prompt, params) in enumerate(zip(prompts, MIXED, strict=True))
    ]
    compare(asked, every, tokens=tokens, blocks=64)
