"""Whatever happens between steps, those who get to their end get there with the right tokens, and no block is lost."""

from __future__ import annotations

import random

import pytest

from engine.models import Model
from tests.exhaustive import few
from tests.histories import seeds
from tests.parity.conftest import Truth
from tests.parity.driver import Driver, greedy, prompts_of


@pytest.fixture
def variant() -> str:
    return "gqa"


@pytest.mark.parametrize("seed", few(seeds(12), *seeds(12)[:2]))
def test_random_arrivals_aborts_and_preemptions(model: Model, truth: Truth, seed: int) -> None:
    dice = random.Random(seed)
    stems = prompts_of([20, 45], model.vocab_size, seed=seed)
    blocks, tokens = dice.choice([12, 20, 40]), dice.choice([8, 24, 100])
    driver = Driver(model, blocks=blocks, tokens=tokens, sequences=6, overlap=seed % 2)
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    arrivals = 20
    while arrivals or driver.scheduler.has_work:
        if arrivals and dice.random() < 0.3:
            name = str(len(prompts))
            tail = prompts_of([dice.randint(1, 40)], model.vocab_size, seed=1000 * seed + arrivals)[0]
            prompts[name] = dice.choice([[], *stems]) + tail
            driver.add(name, prompts[name], greedy(dice.randint(1, 25)), tier=dice.randint(0, 3))
            arrivals -= 1
        if dice.random() < 0.15:
            driver.preempt()
        if prompts and dice.random() < 0.06:
            victim = dice.choice(list(prompts))
            if driver.scheduler.abort(victim):
                aborted.add(victim)
        driver.scheduler.check_integrity()
        if driver.scheduler.has_work:
            driver.step()
    driver.run()
    assert driver.finished == prompts.keys() - aborted
    for name in driver.finished:
        truth.check(prompts[name], driver.found[name][0])
    # Also what the aborted had said until then was right.
    for name in aborted:
        if driver.found[name][0]:
            truth.check(prompts[name], driver.found[name][0])
