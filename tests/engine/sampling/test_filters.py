"""Top-k and top-p against a plain reading of their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling import filters
from engine.sampling.filters import Filters, Ranked, narrow


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


def by_definition(logits: list[float], top_k: int, top_p: float) -> tuple[set[int], bool]:
    """(what is kept, whether rounding could decide otherwise). Ties with the last one kept stay."""
    ranked = sorted(logits, reverse=True)
    floor = ranked[min(top_k, len(ranked)) - 1] if top_k else -math.inf
    left = [x for x in ranked if x >= floor]
    close = False
    if top_p < 1:
        total = math.fsum(math.exp(x - ranked[0]) for x in left)
        mass = 0.0
        for x in left:
            mass += math.exp(x - ranked[0]) / total
            close |= abs(mass - top_p) < 1e-5
            floor = x
            if mass >= top_p:
                break
    return {i for i, x in enumerate(logits) if x >= floor}, close


values = st.lists(st.integers(-40, 40).map(lambda n: n / 20), min_size=1, max_size=40)


@given(values, st.integers(0, 45), st.floats(0.01, 1.0))
def test_what_is_kept_is_what_the_definition_keeps(logits: list[float], top_k: int, top_p: float) -> None:
    if not top_k and top_p == 1:
        return
    expected, close = by_definition(logits, top_k, top_p)
    if not close:
        assert kept(torch.tensor([logits]), [top_k], [top_p]) == [expected]


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
    monkeypatch.setattr(filters, "_HEAD", 8)
    generator = torch.Generator().manual_seed(1)
    logits = torch.stack((torch.randn(500, generator=generator) * 0.01, torch.randn(500, generator=generator) * 9))
    found = kept(logits, [0, 0], [0.9, 0.9])
    assert found[0] == by_definition(logits[0].tolist(), 0, 0.9)[0]
    assert found[1] == by_definition(logits[1].tolist(), 0, 0.9)[0]
    assert len(found[0]) > 400
    assert len(found[1]) < 8


def test_ties_with_the_kth_stay_even_past_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "_HEAD", 4)
    logits = torch.zeros(1, 20)
    assert kept(logits, [3], [1.0]) == [set(range(20))]
    assert kept(logits, [3], [0.5]) == [set(range(20))]


def test_top_p_is_of_what_top_k_leaves() -> None:
    """Ten nearly equal tokens: half of the first five is three, half of all would be five."""
    logits = torch.arange(10.0)[None] * 0.01
    assert kept(logits, [5], [0.5]) == [{7, 8, 9}]
    assert kept(logits, [0], [0.5]) == [{5, 6, 7, 8, 9}]


def test_the_likeliest_token_is_always_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert kept(logits, [0], [1e-7]) == [{1}]
    assert kept(logits, [1], [1.0]) == [{1}]


def test_banned_tokens_stay_out() -> None:
    logits = torch.tensor([[1.0, float("-inf"), 2.0]])
    assert kept(logits, [0], [0.999999]) == [{0, 2}]
    assert kept(logits, [2], [1.0]) == [{0, 2}]
