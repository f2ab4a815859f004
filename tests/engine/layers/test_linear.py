from __future__ import annotations

import pytest
import torch

from engine.kernels.reference import Reference
from engine.layers import Embedding, Linear

CPU = torch.device("cpu")


def test_parts_of_a_checkpoint_become_one_product() -> None:
    layer = Linear(Reference(torch.float32), 3, {"q": 2, "k": 1}, bias=True, device=CPU)
    places = layer.weights("attn.")
    assert {name: list(place.shape) for name, place in places.items()} == {
        "attn.q.weight": [2, 3],
        "attn.q.bias": [2],
        "attn.k.weight": [1, 3],
        "attn.k.bias": [1],
    }
    for i, place in enumerate(places.values()):
        place.copy_(torch.arange(place.numel()).view(place.shape) + 10.0 * i)
    expected = torch.cat((places["attn.q.weight"], places["attn.k.weight"])).clone()
    bias = torch.cat((places["attn.q.bias"], places["attn.k.bias"])).clone()
    layer.pack()
    x = torch.tensor([[1.0, 2.0, 3.0]])
    torch.testing.assert_close(layer(x), x @ expected.T + bias)


def test_a_linear_runs_only_packed_and_packs_only_once() -> None:
    layer = Linear(Reference(torch.float32), 3, {"q": 2}, bias=False, device=CPU)
    with pytest.raises(RuntimeError, match="packed before"):
        layer(torch.ones(1, 3))
    layer.weights("")["q.weight"].zero_()
    layer.pack()
    with pytest.raises(RuntimeError, match="packed once"):
        layer.pack()
    with pytest.raises(RuntimeError, match="cannot be loaded again"):
        layer.weights("")


def test_only_a_tied_embedding_is_also_the_head() -> None:
    for tied in (False, True):
        layer = Embedding(Reference(torch.float32), 5, 4, tied=tied, dtype=torch.bfloat16, device=CPU)
        table = layer.weights("e.")["e.weight"]
        table.copy_(torch.arange(20.0).view(5, 4))
        layer.pack()
        rows = layer(torch.tensor([1, 4]))
        assert rows.dtype == torch.float32
        assert rows.tolist() == table[[1, 4]].tolist()
        if tied:
            assert layer.head is not None
            torch.testing.assert_close(layer.head(rows), rows @ table.float().T)
        else:
            assert layer.head is None
