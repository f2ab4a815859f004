"""What adapters change of a product, by tables and tiles: what plain torch finds, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.kernels.triton.low_rank import TILE, LowRankProduct, LowRankTables, LowRankTiles
from tests.engine.kernels.triton.conftest import noise

PARTS = (70, 20, 20)
#: Of each adapter, the ranks of each part; 0 for a part that it does not change.
RANKS = ((3, 1, 0), (0, 0, 0), (17, 17, 17), (0, 0, 66))


@pytest.mark.parametrize("inputs", [100, 128])
def test_each_row_gets_its_own_adapters_change(where: torch.device, dtype: torch.dtype, inputs: int) -> None:
    """Adapters of many rows, of one, and of none; rows of no adapter stay as they are."""
    owners = [0] * (TILE + 3) + [-1, 2, 3, 1, 0, 3]
    x = noise(len(owners), inputs, dtype=dtype, seed=1).to(where)
    results = noise(len(owners), sum(PARTS), dtype=dtype, seed=2).to(where)
    downs = [noise(max(1, sum(ranks)), inputs, dtype=dtype, seed=10 + i).to(where) for i, ranks in enumerate(RANKS)]
    ups = [
        [
            (noise(outputs, rank, dtype=dtype, seed=20 + i) / 8).to(where)
            for outputs, rank in zip(PARTS, ranks, strict=True)
        ]
        for i, ranks in enumerate(RANKS)
    ]
    found = results.clone()
    product = LowRankProduct(2, inputs, PARTS, where)
    product.add(x, found, tables(downs, ups, where), tiles(owners, where), 3 * 128, 128)

    expected = results.double()
    for row, owner in enumerate(owners):
        first_rank = first = 0
        for outputs, up in zip(PARTS, ups[owner] if owner >= 0 else [], strict=owner >= 0):
            rank = up.shape[1]
            inner = (downs[owner][first_rank : first_rank + rank].double() @ x[row].double()).to(dtype).double()
            expected[row, first : first + outputs] += up.double() @ inner
            first, first_rank = first + outputs, first_rank + rank
    near = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=near * 16)
    alone = owners.index(-1)
    assert torch.equal(found[alone], results[alone])
    assert torch.equal(found[:, PARTS[0] :][owners.index(1)], results[:, PARTS[0] :][owners.index(1)])


def tables(downs: list[Tensor], ups: list[list[Tensor]], where: torch.device) -> LowRankTables:
    """With two entries of another product before those of this one."""
    anchor = torch.zeros(16, dtype=downs[0].dtype, device=where)

    def offset(tensor: Tensor) -> int:
        return (tensor.data_ptr() - anchor.data_ptr()) // anchor.element_size() if tensor.numel() else 0

    offsets, starts, ranks = [], [], []
    for down, parts in zip(downs, ups, strict=True):
        of_parts = [part.shape[1] for part in parts]
        offsets.append([0, 0, offset(down), *map(offset, parts)])
        starts.append([0, 0, 0, *(sum(of_parts[:i]) for i in range(len(parts)))])
        ranks.append([0, 0, sum(of_parts), *of_parts])
    return LowRankTables(
        anchor,
        torch.tensor(offsets, device=where),
        torch.tensor(starts, dtype=torch.int32, device=where),
        torch.tensor(ranks, dtype=torch.int32, device=where),
    )


def tiles(owners: list[int], where: torch.device) -> LowRankTiles:
    """With two tiles of no adapter at the end."""
    order: list[int] = []
    made: list[list[int]] = []
    for place in sorted({*owners} - {-1}):
        rows = [row for row, owner in enumerate(owners) if owner == place]
        end = len(order) + len(rows)
        made += [[place, first, min(first + TILE, end)] for first in range(len(order), end, TILE)]
        order += rows
    made = [*made, [-1, 0, 0], [-1, 0, 0]]
    room = [*order, *[0] * (len(owners) - len(order))]
    return LowRankTiles(
        torch.tensor(room, dtype=torch.int32, device=where),
        torch.tensor(made, dtype=torch.int32, device=where),
        len(made),
    )
