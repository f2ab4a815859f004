"""What requests may ask for is the same with ranks: choices, log-probabilities, guessed tokens, preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.execution.placement import plan_capacity
from engine.kernels.native import load_library
from engine.models import load_model
from engine.params import SamplingParams
from engine.speculate import Lookup, Speculation
from tests.engine.execution.ranks.in_threads import ranks_of
from tests.engine.random_models import FAMILIES, write_model
from tests.parity.driver import Driver, greedy, prompts_of

pytestmark = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")

#: Three choices, which begin with one prompt's blocks and copy the last.
SEVERAL = SamplingParams(n=3, max_tokens=8, temperature=0.8, seed=7, logprobs=2, prompt_logprobs=2, ignore_eos=True)


def run(driver: Driver) -> tuple[dict[str, dict[int, list[int]]], list[Any]]:
    for i, prompt in enumerate(prompts_of([21, 40], 320)):
        driver.add(f"several {i}", prompt, SEVERAL)
    driver.add("repeats", [5, 6, 7, 8] * 8, greedy(16))
    driver.run(preempt_every=5)
    return driver.found, [event.prompt_logprobs for event in driver.events if event.prompt_logprobs is not None]


def guessing() -> dict[str, Any]:
    return {"speculation": Speculation(Lookup(8, 320), max_tokens=4, adaptive=False)}


def test_requests_are_answered_alike(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", seed=2, tokenizer=False, **FAMILIES["gemma3"])
    alone = load_model(folder, "float32", torch.device("cpu"), "native")
    tokens, scores = run(Driver(alone, **guessing()))
    with ranks_of(folder, 2) as together:
        own_tokens, own_scores = run(together.driver(**guessing()))
    assert own_tokens == tokens
    assert len(own_scores) == len(scores) == 2
    for ours, theirs in zip(own_scores, scores, strict=True):
        for own, expected in zip(ours[1:], theirs[1:], strict=True):
            assert own.logprob == pytest.approx(expected.logprob, abs=1e-3)


def test_a_kv_cache_that_is_too_small_is_refused_by_the_bytes_that_were_given(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", tokenizer=False)
    with (
        ranks_of(folder, 2) as together,
        pytest.raises(EngineError, match="kv_cache_bytes=999 does not hold"),
    ):
        plan_capacity(together.lead, EngineConfig(tensor_parallel=2, kv_cache_bytes=999))


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_the_cache_is_sized_by_the_machine_with_the_least_memory(
    ranks: int, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "m", tokenizer=False, **FAMILIES["qwen3"])
    # The lead is the first to measure its own.
    sizes, measured = [5 << 20, *[6 << 20] * (ranks * stages - 2), 8 << 20], list[Any]()

    def free(*how: Any) -> int:
        measured.append(how)
        return sizes.pop()

    monkeypatch.setattr("engine.execution.ranks.runner.free_bytes", free)
    settings: dict[str, Any] = {"tensor_parallel": ranks, "pipeline_parallel": stages, "max_num_seqs": 512}
    with ranks_of(folder, ranks, stages) as together:
        capacity = plan_capacity(together.lead, EngineConfig(**settings, memory_share=0.5, share=0.25))
        expected = plan_capacity(together.lead, EngineConfig(**settings, kv_cache_bytes=5 << 20))
    assert capacity == expected
    assert measured == [(torch.device("cpu"), 0.5, 0, 0.25)] * ranks * stages


def test_a_sequence_depends_on_no_other_to_the_bit(tmp_path: Path) -> None:
    """However its prompt is cut, and whatever runs beside it: as deterministic mode promises."""
    folder = write_model(tmp_path / "m", seed=3, tokenizer=False, **FAMILIES["qwen3"])
    prompts = prompts_of([33, 5, 50], 320)
    scored = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)

    def scores(driver: Driver, chosen: range) -> dict[str, list[float]]:
        for i in chosen:
            driver.add(str(i), prompts[i], scored)
        driver.run()
        found: dict[str, list[float]] = {}
        for event in driver.events:
            found.setdefault(event.request_id, []).extend(each.logprob for each in event.logprobs or [])
        return found

    with ranks_of(folder, 2, deterministic=True) as together:
        batched = scores(together.driver(tokens=64), range(3))
        for i in range(3):
            assert scores(together.driver(tokens=16), range(i, i + 1)) == {str(i): batched[str(i)]}
