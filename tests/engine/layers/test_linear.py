from __future__ import annotations

import torch

from engine.kernels.reference import Reference
from engine.layers import Embedding

CPU = torch.device("cpu")


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
