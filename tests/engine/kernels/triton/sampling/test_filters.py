"""The bounds that the filter kernel finds keep what engine.sampling.draws keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels import sampling_state as layout
from engine.sampling.draws import Filters, Ranked, narrow
from tests.exhaustive import few

pytest.importorskip("triton")

import triton

from engine.kernels.triton.sampling.filters import sampling_filter_kernel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

#: top_k, top_p, min_p, typical_p
ASKED = [
    (1, 1.0, 0.0, 1.0),
    (7, 1.0, 0.0, 1.0),
    (300, 1.0, 0.0, 1.0),
    (0, 0.001, 0.0, 1.0),
    (0, 0.5, 0.0, 1.0),
    (0, 0.97, 0.0, 1.0),
    (0, 1.0, 0.1, 1.0),
    (0, 1.0, 0.0, 0.3),
    (0, 1.0, 0.0, 0.95),
    (60, 0.8, 0.0, 1.0),
    (200, 0.9, 0.01, 0.7),
]


def table_of(asked: list[tuple[int, float, float, float]]) -> Tensor:
    table = torch.zeros(len(asked), layout.WIDTH, dtype=torch.int32)
    reals = table.view(torch.float32)
    table[:, layout.FLAGS] = layout.FILTERED
    table[:, layout.TOP_K] = torch.tensor([one[0] for one in asked])
    for column, place in ((layout.TOP_P, 1), (layout.MIN_P, 2), (layout.TYPICAL, 3)):
        reals[:, column] = torch.tensor([one[place] for one in asked])
    reals[:, layout.MIN_P] = reals[:, layout.MIN_P].log()
    return table


def kept(x: Tensor, asked: list[tuple[int, float, float, float]], where: torch.device, tile: int, room: int) -> Tensor:
    """bool, as `x` fp32 [rows, vocabulary]."""
    rows, vocab = x.shape
    work = torch.full((rows, vocab + room), float("nan"))
    work[:, :vocab] = x
    work, table = work.to(where), table_of(asked).to(where)
    bounds = torch.zeros(rows, 4, device=where)
    # Two parts, the larger one of which has the largest.
    tops = torch.stack((x.amax(-1) - 1, x.amax(-1)), 1).to(where)
    slots = torch.arange(rows, dtype=torch.int32, device=where)
    sampling_filter_kernel[(rows,)](
        slots,
        1,
        table,
        table.view(torch.float32),
        work,
        vocab + room,
        vocab,
        tops,
        bounds,
        vocab,
        2,
        PARTS=triton.next_power_of_2(2),
        TILE=tile,
        ROOM=room,
        num_warps=4,
        enable_fp_fusion=False,
    )
    floor, total, entropy, limit = (column[:, None] for column in bounds.cpu().unbind(1))
    return (x >= floor) & ((x - total + entropy).abs() <= limit) & (x > float("-inf"))


def theirs(x: Tensor, asked: list[tuple[int, float, float, float]]) -> Tensor:
    """The same by engine.sampling.draws, row after row."""
    found = []
    for row, (top_k, top_p, min_p, mass) in zip(x, asked, strict=True):
        ranked = Ranked(None, torch.tensor([top_k]), torch.tensor([top_p]), top_k, top_p < 1)
        filters = Filters(
            ranked if top_k or top_p < 1 else None,
            torch.tensor([[min_p]]).log() if min_p else None,
            (torch.tensor([0]), torch.tensor([[mass]])) if mass < 1 else None,
        )
        own = row[None].clone()
        floor = narrow(own, filters)
        stays = own > float("-inf")
        found.append(stays if floor is None else stays & (own >= floor))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("vocab", "tile", "room", "spread"),
    few([(1000, 256, 64, 0.01), (1000, 1024, 256, 6.0), (97, 128, 16, 1.0)], (97, 128, 16, 1.0)),
)
def test_what_is_kept(where: torch.device, vocab: int, tile: int, room: int, spread: float) -> None:
    x = torch.randn(len(ASKED), vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    assert torch.equal(kept(x, ASKED, where, tile, room), theirs(x, ASKED))


def test_ties_stay_together(where: torch.device) -> None:
    """Halves between -4 and 4, zeros of both signs, and a row that is all the same."""
    asked = ASKED[2::2]
    x = (torch.randn(len(asked), 600, generator=torch.Generator().manual_seed(1)) * 2).round() / 2
    x[0] = 1.25
    assert (x == 0).any()
    assert x[x == 0].signbit().any()
    x += 0.0  # as sampling_edit_kernel leaves them
    assert torch.equal(kept(x, asked, where, 1024, 32), theirs(x, asked))


def test_what_is_forbidden_stays_out(where: torch.device) -> None:
    asked = ASKED[1::3]
    x = torch.randn(len(asked), 300, generator=torch.Generator().manual_seed(2))
    x[:, 20:] = float("-inf")
    x[1] = float("-inf")
    x[1, 17] = -3.0
    found = kept(x, asked, where, 512, 16)
    assert torch.equal(found, theirs(x, asked))
    assert found[1].nonzero().tolist() == [[17]]
