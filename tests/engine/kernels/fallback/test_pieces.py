"""What one thread takes in pieces is what it would be in one."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.fallback.cpu import Cpu
from engine.kernels.fallback.pieces import piece
from engine.kernels.reference import Reference


@pytest.mark.parametrize(
    ("rows", "width", "taken"), [(1, 40000, 1), (21, 1536, 21), (22, 1536, 21), (84, 1536, 21), (85, 1536, 85)]
)
def test_pieces_are_of_what_one_thread_computes(rows: int, width: int, taken: int) -> None:
    assert piece(rows, width) == taken


@pytest.mark.parametrize("rows", [6, 20, 40])
@pytest.mark.parametrize("gate", ["silu_mul", "gelu_tanh_mul"])
def test_gates_in_pieces_are_gates(gate: str, rows: int) -> None:
    x = torch.randn(rows, 2 * 6000, generator=torch.Generator().manual_seed(0))
    wanted = getattr(Reference(torch.float32), gate)(x)
    torch.testing.assert_close(getattr(Cpu(torch.float32), gate)(x), wanted)
