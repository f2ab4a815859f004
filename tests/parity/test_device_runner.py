"""The device's runner says what the plain one says to whatever is asked for, its log probabilities too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import Model, load_model
from engine.params import SamplingParams
from tests.exhaustive import few
from tests.parity.driver import Driver, prompts_of

COUNT = 12

#: A job's prompt and what it asks for.
Job = tuple[list[int], SamplingParams]


class Telling(Driver):
    """Tells what came of each job."""

    def tell(self, jobs: list[Job], every: int | None) -> list[Any]:
        """Of each job and choice its tokens, their log probabilities and, first, the prompt's."""
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
def compare(model: Model, ragged: Model) -> Callable[..., None]:
    """Runs the same history on both runners."""

    def run(jobs: list[Job], every: int | None = None, **settings: Any) -> None:
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

    return run


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


@pytest.mark.parametrize("variant", few(["gqa", "gemma3", "phi3-longrope"], "gemma3", "phi3-longrope"))
@pytest.mark.parametrize(("tokens", "every"), few([(16, 4), (256, None)], (16, 4)))
def test_whatever_is_asked_for(compare: Callable[..., None], model: Model, tokens: int, every: int | None) -> None:
    prompts = prompts_of([3, 50, 31, 16, 20, 64, 12, 33], model.vocab_size, seed=1)
    asked = [
        (prompt, SamplingParams(**({"max_tokens": COUNT, "seed": 100 + i, "ignore_eos": True} | params)))
        for i, (prompt, params) in enumerate(zip(prompts, MIXED, strict=True))
    ]
    compare(asked, every, tokens=tokens, blocks=64)
