"""Top-k and top-p where rows, ties and candidates are special; test_against_transformers.py has the rest."""

from __future__ import annotations

import pytest
import torch

from engine.sampling import draws
from engine.sampling.draws import Filters, Ranked, narrow


def kept(logits: torch.Tensor, top_k: list[int], top_p: list[float], device: str = "cpu") -> list[set[int]]:
    """What top-k and top-p keep of each row."""
    ranked = Ranked(
        rows=None,
        top_k=torch.tensor(top_k, device=device),
        top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
        largest_k=max(top_k),
        any_top_p=min(top_p) < 1,
    )
    return left(logits.to(device), Filters(ranked=ranked))


def left(logits: torch.Tensor, filters: Filters) -> list[set[int]]:
    logits = logits.clone()
    floor = narrow(logits, filters)
    stays = logits > float("-inf")
    if floor is not None:
        stays &= logits >= floor
    return [set(row.nonzero().view(-1).tolist()) for row in stays]


def test_rows_do_not_know_of_each_other(device: torch.device) -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0))
    top_k = [0, 1, 5, 0, 700, 2999]
    top_p = [1.0, 1.0, 0.5, 0.9, 0.3, 0.99]
    together = kept(logits, top_k, top_p, device.type)
    for i in range(1, 6):
        assert kept(logits[i : i + 1], [top_k[i]], [top_p[i]], device.type) == [together[i]]
    assert len(together[0]) == 3000
    assert len(together[1]) == 1


def test_a_flat_row_needs_more_than_the_first_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.stack((torch.randn(500, generator=generator) * 0.01, torch.randn(500, generator=generator) * 9))
    by_head = {}
    for head in (500, 8):
        monkeypatch.setattr(draws, "_HEAD", head)
        by_head[head] = kept(logits, [0, 0], [0.9, 0.9])
    found = by_head[8]
    assert found == by_head[500]
    assert len(found[0]) > 400
    assert len(found[1]) < 8


def test_ties_with_the_kth_stay_even_past_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_HEAD", 4)
    logits = torch.zeros(1, 20)
    assert kept(logits, [3], [1.0]) == [set(range(20))]
    assert kept(logits, [3], [0.5]) == [set(range(20))]


def test_the_likeliest_token_is_always_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert kept(logits, [0], [1e-7]) == [{1}]
    assert kept(logits, [1], [1.0]) == [{1}]


def test_banned_tokens_stay_out() -> None:
    logits = torch.tensor([[1.0, float("-inf"), 2.0]])
    assert kept(logits, [0], [0.999999]) == [{0, 2}]
    assert kept(logits, [2], [1.0]) == [{0, 2}]
