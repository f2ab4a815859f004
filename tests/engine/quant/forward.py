"""A model's ordinary pass over one sequence, for what is checked by it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import RaggedBatch
from engine.models import Model


def in_chunks(model: Model, tokens: list[int], chunk: int, block: int = 4) -> Tensor:
    """The last hidden states of all tokens, `chunk` of them at a time over a cache of several blocks."""
    blocks = -(-len(tokens) // block)
    caches = [model.kernels.kv_cache(group, blocks, block, model.device) for group in model.kv_groups]
    table = torch.arange(blocks, dtype=torch.int32)[None]
    states = []
    with torch.inference_mode():
        for start in range(0, len(tokens), chunk):
            stop = min(start + chunk, len(tokens))
            places, count = torch.arange(start, stop), stop - start
            attention = [
                RaggedBatch(
                    slots=places,
                    query_starts=torch.tensor([0, count], dtype=torch.int32),
                    kv_lens=torch.tensor([stop], dtype=torch.int32),
                    tables=table,
                    table_rows=torch.zeros(1, dtype=torch.int32),
                    most_queries=count,
                    most_places=stop,
                    window=group.window,
                )
                for group in model.kv_groups
            ]
            ids = torch.tensor(tokens[start:stop])
            states.append(model.forward(ids, places, None, attention, caches, torch.arange(count)))
    return torch.cat(states)
