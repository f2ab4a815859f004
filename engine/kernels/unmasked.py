"""Attention of encoders, in which a token sees those on both sides, and their activations: the operations in plain
torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

#: Distances that a table of biases has behind the farthest: kernels read whole vectors of it.
SPARE_DISTANCES: Final = 16
#: The queries of one call of attention with a window. Its mask has that many rows, whatever the sequence's length.
_WINDOW_QUERIES: Final = 256


# torch's own GELU of tanh, SiLU and sigmoid are of other bits at the end of a tensor than elsewhere; its tanh is not.


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _silu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.5 * x))


#: Activations, each of whose results depends, to the bit, on its input alone.
ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": _silu,
    "tanh": torch.tanh,
    "": lambda x: x,
}


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Whole sequences, one after another."""

    lengths: Sequence[int]
    """The tokens of each. Sequences of one length stand beside each other, for sets that compute them in one call."""
    starts: Tensor
    """int32 [sequences + 1]: the rows of sequence i are starts[i] .. starts[i + 1]."""
    biases: Tensor | None = None
    """The numbers added to scores, by the distance of the key after the query: fp32 [heads, 2 * farthest +
    SPARE_DISTANCES], from -farthest on, with the longest sequence's length for `farthest`. None: nothing."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, biases: Tensor | None = None) -> TextBatch:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, starts.to(device), biases)

    @property
    def farthest(self) -> int:
        return max(self.lengths)


def attend_unmasked(rows: Tensor, batch: TextBatch, reach: int | None) -> Tensor:
    """See Reference.attend_unmasked."""
    tokens, _, heads, head_dim = rows.shape
    query, key, value = rows.unbind(1)
    out = torch.empty(tokens, heads, head_dim, dtype=rows.dtype, device=rows.device)
    start = 0
    for length, equal in groupby(batch.lengths):
        count = len(list(equal))
        span = slice(start, start := start + length * count)
        q, k, v = (part[span].view(count, length, heads, head_dim).transpose(1, 2) for part in (query, key, value))
        attended = out[span].view(count, length, heads, head_dim).transpose(1, 2)
        if reach is not None and length > reach + 1:
            _attend_near(q, k, v, reach, attended)
        else:
            attended.copy_(F.scaled_dot_product_attention(q, k, v, _biases_of(batch, length)))
    return out.view(tokens, -1)


def _biases_of(batch: TextBatch, length: int) -> Tensor | None:
    """Biases of the scores of `length` tokens: [1, heads, length, length]."""
    if batch.biases is None:
        return None
    index = torch.arange(length, device=batch.biases.device)
    return batch.biases[:, index[None, :] - index[:, None] + batch.farthest].unsqueeze(0)


def _attend_near(query: Tensor, key: Tensor, value: Tensor, reach: int, out: Tensor) -> None:
    """Attention to tokens at most `reach` away, into `out`; all are [sequences, heads, length, head_dim]."""
    length = query.shape[2]
    for start in range(0, length, _WINDOW_QUERIES):
        end = min(start + _WINDOW_QUERIES, length)
        low, high = max(0, start - reach), min(length, end + reach)
        distance = torch.arange(start, end, device=query.device)[:, None] - torch.arange(low, high, device=query.device)
        near = F.scaled_dot_product_attention(
            query[:, :, start:end], key[:, :, low:high], value[:, :, low:high], distance.abs() <= reach
        )
        out[:, :, start:end].copy_(near)
