"""The table of an embedding, and the head that is tied to it."""

from __future__ import annotations

import weakref

import pytest
import torch

from engine.kernels import Kernels, select
from engine.kernels.native import load_library
from engine.layers import Embedding

CPU = torch.device("cpu")
TOKENS = torch.tensor([3, 0, 319, 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_table_that_is_tied_to_the_head_is_in_memory_once(dtype: torch.dtype) -> None:
    """Native kernels have a layout of their own for the head: rows are looked up there."""
    if load_library() is None:
        pytest.skip("native kernels are not built for this CPU")
    embedding = Embedding(select(CPU, dtype), 320, 65, tied=True, scale=8.0, dtype=dtype, device=CPU)
    table = embedding.weights("")["weight"].normal_()
    expected, kept = table[TOKENS].float() * 8, weakref.ref(table)
    del table
    embedding.pack()
    assert kept() is None
    assert torch.equal(embedding(TOKENS), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_is_kept_where_the_kernels_keep_weights_as_they_are(tied: bool) -> None:
    kernels: Kernels = select(CPU, torch.float32, "reference")
    embedding = Embedding(kernels, 320, 64, tied=tied, dtype=torch.float32, device=CPU)
    table = embedding.weights("")["weight"].normal_()
    embedding.pack()
    assert torch.equal(embedding(TOKENS), table[TOKENS])
    assert (embedding.head is not None) == tied
