"""Sampling among the tokens that native kernels find chooses what sampling among all of them does."""

from __future__ import annotations

import pytest
import torch

from engine.sampling.draws import Filters, gumbel
from engine.sampling.rows import Draws
from engine.sampling.sampler import draw
from tests.engine.kernels.native.conftest import Make
from tests.engine.kernels.native.test_kernels import noise


def draws(rows: int, temperature: float, min_p: float = 0.0, seed: int = 0) -> Draws:
    keys = torch.randint(-(1 << 31), 1 << 31, (rows, 1, 2), generator=torch.Generator().manual_seed(seed))
    filters = None if min_p == 0 else Filters(min_p=torch.full((rows, 1), min_p).log())
    return Draws(torch.arange(rows), torch.full((rows, 1), temperature), keys.to(torch.int32), filters)


@pytest.mark.parametrize("tokens", [1, 7, 320, 5003])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0, 1e4])
def test_the_choice_is_the_same_to_the_token(make: Make, tokens: int, spread: float) -> None:
    kernels = make(torch.float32, 3)
    for seed in range(6):
        logits = noise(40, tokens, seed=seed) * spread
        for how in (draws(40, 1.0, seed=seed), draws(40, 0.3, seed=seed), draws(40, 1.7, 0.2, seed=seed)):
            assert torch.equal(draw(logits, how, kernels.candidates), draw(logits, how))


def test_the_winner_is_nearly_alone(make: Make) -> None:
    kernels, how = make(torch.float32, 2), draws(200, 1.0)
    logits = noise(200, 3000)
    found = kernels.candidates(logits, None, how.keys)
    assert found is not None
    rows, tokens = found
    assert 200 <= len(rows) < 210
    noisy = logits + gumbel(how.keys, torch.arange(3000, dtype=torch.int32))
    near = noisy >= noisy.amax(-1, keepdim=True) - 0.5e-3
    assert set(map(tuple, near.nonzero().tolist())) <= set(zip(rows.tolist(), tokens.tolist(), strict=True))


def test_all_tokens_are_candidates_if_numbers_are_too_large_to_tell_apart(make: Make) -> None:
    logits = torch.full((2, 500), 3e9)
    how = draws(2, 1.0)
    candidates = make(torch.float32, 1).candidates
    assert candidates(logits, None, how.keys) is None
    assert torch.equal(draw(logits, how, candidates), draw(logits, how))


def test_rows_that_have_nothing_to_choose_harm_no_other(make: Make) -> None:
    candidates, how = make(torch.float32, 1).candidates, draws(4, 1.0)
    logits = noise(4, 333)
    expected = draw(logits, how)
    logits[1], logits[2] = float("nan"), -float("inf")
    found = draw(logits, how, candidates)
    assert found[[0, 3]].equal(expected[[0, 3]])
    assert set(found.tolist()) <= set(range(333))
