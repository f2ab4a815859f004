"""What each filter and penalty leaves of random logits is what transformers' own logits processors leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from engine.sampling.draws import Filters, Ranked, narrow
from engine.sampling.rows import SamplingRows
from tests.engine.sampling.sequences import sequence

VOCAB = 3000
ROWS = 48


def random_logits(spread: float, seed: int) -> torch.Tensor:
    """fp64: which side of a limit a token is on is then not a matter of rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * spread


def theirs(logits: torch.Tensor, *warpers: LogitsProcessor) -> torch.Tensor:
    """bool [rows, vocabulary]: the tokens that they leave possible, one filter after the other."""
    scores = logits.clone()
    for warper in warpers:
        scores = warper(torch.zeros(ROWS, 0, dtype=torch.int64), scores)
    return scores > float("-inf")


def ours(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """The same by way of the permanent rows, the fp32 sampler and its arrays."""
    rows = SamplingRows(ROWS, VOCAB, torch.device("cpu"))
    sequences = [sequence(i, **params) for i in range(ROWS)]
    for one in sequences:
        rows.admit(one)
    draws = rows.gather(sequences).draws
    assert draws is not None
    assert draws.filters is not None
    scaled = logits.clone()
    floor = narrow(scaled, draws.filters)
    return (scaled > float("-inf")) & (scaled >= (float("-inf") if floor is None else floor))


def fp32(share: float) -> float:
    """As the rows have it: the sums differ from fp64's by less than a token's probability."""
    return float(torch.tensor(share))


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize(
    ("name", "value", "warper"),
    [
        *(("top_k", k, TopKLogitsWarper(k)) for k in (1, 7, 300, 2999)),
        *(("top_p", p, TopPLogitsWarper(fp32(p))) for p in (0.01, 0.5, 0.93, 0.999)),
        *(("min_p", p, MinPLogitsWarper(p)) for p in (0.001, 0.1, 0.7, 1.0)),
        *(("typical_p", mass, TypicalLogitsWarper(fp32(mass))) for mass in (0.02, 0.2, 0.6, 0.95)),
    ],
)
def test_each_filter(name: str, value: float, warper: LogitsProcessor, spread: float) -> None:
    logits = random_logits(spread, round(1000 * value))
    assert torch.equal(ours(logits, **{name: value}), theirs(logits, warper))


def test_all_filters_one_after_the_other() -> None:
    logits = random_logits(1.5, 5)
    warpers = (TopKLogitsWarper(200), TopPLogitsWarper(0.875), MinPLogitsWarper(0.05), TypicalLogitsWarper(0.75))
    found = ours(logits, top_k=200, top_p=0.875, min_p=0.05, typical_p=0.75)
    assert torch.equal(found, theirs(logits, *warpers))
    assert 1 < int(found.sum(-1).float().mean()) < 100


def test_a_row_without_filters_keeps_all_beside_rows_that_have_them() -> None:
    logits = random_logits(1.0, 1)[:3].float()
    ranked = Ranked(torch.tensor([1]), torch.tensor([4]), torch.tensor([1.0]), 4, False)
    distance = torch.tensor([[float("-inf")], [float("-inf")], [-1.0]])
    floor = narrow(logits, Filters(ranked=ranked, min_p=distance))
    assert floor is not None
    assert (logits >= floor).sum(-1)[:2].tolist() == [VOCAB, 4]
    assert torch.equal(logits[2] >= floor[2], logits[2] >= logits[2].max() - 1)
