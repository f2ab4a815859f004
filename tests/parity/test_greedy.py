"""Greedy fp32 output is transformers', token for token, however the work was cut up."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.fallback.sdpa import Sdpa
from engine.kernels.reference import Reference
from engine.models import Model, load_model
from tests.parity.conftest import Truth
from tests.parity.driver import Driver, greedy, prompts_of

LENGTHS = [1, 2, 15, 16, 17, 50, 120]
COUNT = 14


def check_all(truth: Truth, prompts: list[list[int]], found: dict[str, list[int]]) -> None:
    for i, prompt in enumerate(prompts):
        assert len(found[str(i)]) == COUNT
        truth.check(prompt, found[str(i)])


def submit(driver: Driver, prompts: list[list[int]]) -> None:
    for i, prompt in enumerate(prompts):
        driver.add(str(i), prompt, greedy(COUNT))


@pytest.mark.parametrize("tokens", [16, 64, 512])
def test_in_one_batch_at_every_chunk_size(model: Model, truth: Truth, tokens: int) -> None:
    prompts = prompts_of(LENGTHS, model.vocab_size)
    driver = Driver(model, tokens=tokens)
    submit(driver, prompts)
    found = driver.run()
    check_all(truth, prompts, found)
    # Where nothing is tied, also what transformers' own loop generates.
    generated = [truth.greedy(prompt, COUNT) for prompt in prompts]
    assert sum(found[str(i)] == tokens for i, tokens in enumerate(generated)) >= len(prompts) - 1


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_with_a_preemption_at_every_kth_step(model: Model, truth: Truth, every: int) -> None:
    prompts = prompts_of(LENGTHS, model.vocab_size)
    driver = Driver(model, tokens=64)
    submit(driver, prompts)
    check_all(truth, prompts, driver.run(preempt_every=every))
    assert driver.scheduler.stats().preemptions >= driver.steps // every - len(prompts)


@pytest.mark.parametrize("caching", [True, False])
def test_with_too_little_memory_for_all(model: Model, truth: Truth, caching: bool) -> None:
    prompts = prompts_of(LENGTHS, model.vocab_size)
    driver = Driver(model, blocks=38, block_size=4, tokens=64, enable_prefix_caching=caching)
    submit(driver, prompts)
    check_all(truth, prompts, driver.run())
    assert driver.scheduler.stats().preemptions > 0


@pytest.mark.parametrize("block_size", [4, 16])
def test_behind_cached_prefixes(model: Model, truth: Truth, block_size: int) -> None:
    shared = prompts_of([70], model.vocab_size, seed=3)[0]
    tails = prompts_of([1, 5, 30, 8], model.vocab_size, seed=4)
    prompts = [shared, *(shared + tail for tail in tails), shared[:40], shared]
    driver = Driver(model, tokens=64, block_size=block_size)
    for i, prompt in enumerate(prompts):
        driver.add(str(i), prompt, greedy(COUNT))
        found = driver.run()
    check_all(truth, prompts, found)
    whole = (70 - 1) // block_size * block_size
    assert driver.cached["0"] == 0
    assert [driver.cached[str(i)] for i in (2, 3, 4, 6)] == [70 // block_size * block_size] * 3 + [whole]


@pytest.mark.parametrize("kernels", [Reference, Sdpa])
def test_with_every_kernel_set(model: Model, folders: dict, variant: str, truth: Truth, kernels: type) -> None:
    prompts = prompts_of(LENGTHS, model.vocab_size)
    driver = Driver(load_model(folders[variant], "float32", model.device, kernels))
    submit(driver, prompts)
    check_all(truth, prompts, driver.run())


def test_logits_are_those_of_transformers(model: Model, truth: Truth) -> None:
    """Closer than tokens can tell: a slip in scaling or rotation that no argmax shows would be seen here."""
    prompt = prompts_of([180], model.vocab_size, seed=9)[0]
    driver = Driver(model, tokens=64)
    seen = []
    logits = model.logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits(hidden).clone())
        return seen[-1]

    model.logits = record  # type: ignore[method-assign]
    model.peaks = lambda hidden: None  # type: ignore[method-assign]  # by logits also where greedy rows need none
    driver.add("a", prompt, greedy(COUNT))
    found = driver.run()["a"]
    expected = truth.logits(prompt + found)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen).cpu(), expected, atol=2e-4, rtol=1e-4)
