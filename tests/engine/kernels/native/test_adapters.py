"""An adapter's change of a product in native code: that of plain torch, and each row's as if alone, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.native import adapters
from engine.kernels.reference import Reference
from tests.engine.kernels.native.conftest import Make

#: Inputs, and for each part its outputs and ranks: with remainders of blocks, panels and pairs.
SHAPES = [(64, [(100, 3), (31, 16), (64, 1)]), (577, [(1536, 16)]), (33, [(7, 256)])]
ROWS = [3, 0, 7, 22, 11, 5, 6, 8, 9, 10, 1]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "parts"), SHAPES, ids=str)
def test_a_change_is_that_of_the_reference(
    make: Make,
    dtype: torch.dtype,
    inputs: int,
    parts: list[tuple[int, int]],
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = make(dtype, threads)
    down = drawn(sum(ranks for _, ranks in parts), inputs, seed=0).to(dtype)
    ups, output, rank = [], 0, 0
    for i, (outputs, ranks) in enumerate(parts):
        ups.append(
            (slice(output, output + outputs), slice(rank, rank + ranks), drawn(outputs, ranks, seed=i).to(dtype))
        )
        output, rank = output + outputs, rank + ranks
    change, other = (kernels.prepare_low_rank(down, ups) for _ in range(2))
    wide = Reference(torch.float32).prepare_low_rank(down.float(), [(*slices, up.float()) for *slices, up in ups])
    x, base = drawn(23, inputs, seed=5), drawn(23, output, seed=6)
    rows = torch.tensor(ROWS)
    found, expected, alone, every = (base.clone() for _ in range(4))
    change.add(x, found, rows)
    wide.add(x, expected, rows)
    # Matrices in bf16 may be multiplied by rounded rows.
    torch.testing.assert_close(found, expected, atol=1e-5 if dtype is torch.float32 else 2e-2, rtol=1e-5)
    for row in rows:
        change.add(x, alone, row[None])
    assert torch.equal(alone, found)
    change.add(x, every, None)
    assert torch.equal(every[rows], found[rows])
    # In large pages, beside another.
    monkeypatch.setattr(adapters, "_LEAST_MOVED", 0)
    before = change.entry.down  # type: ignore[attr-defined]
    kernels.bring_together([change, other])
    assert change.entry.down != before  # type: ignore[attr-defined]
    for moved in (change, other):
        again = base.clone()
        moved.add(x, again, rows)
        assert torch.equal(again, found)
