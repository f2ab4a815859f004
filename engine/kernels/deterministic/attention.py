"""Attention in chunks of fixed size: each chunk by itself, then joined in fp32 from the first to the last.

A chunk that a query does not see adds exactly nothing. So neither a batch's longest context nor blocks dropped behind a
window change a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.deterministic.agreement import agreeing
from engine.kernels.deterministic.chunks import CHUNK, ChunkedGroup, Tile

#: The row counts of tiles to try.
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
#: The most rows of a tile. Larger tiles read keys and values less often, but compute more hidden scores.
_MOST_ROWS = 64
#: The unit counts of calls to try: a single unit may be split among threads, several are distributed among them.
_UNITS = (1, 2, 3, 8)


class ChunkedAttention:
    """Chunked attention of one model, whose layers all have heads of one shape."""

    def __init__(self, share: int, kv_heads: int, head_dim: int, softcap: float | None, dtype: torch.dtype) -> None:
        """`share`: query heads of one KV head. Raises EngineError if no tile size gives the same bits in all places."""
        self.share = share
        self._kv_heads = kv_heads
        self._head_dim = head_dim
        self._dtype = dtype
        self._sizes, self.bits = agreeing(
            lambda size: self._trial(size, softcap), [size for size in _ROWS if size >= share]
        )
        if not self._sizes:
            raise EngineError(
                f"deterministic=True: on this machine attention of {share * kv_heads} query and {kv_heads} KV heads of "
                f"{head_dim} in {dtype} gives a query other bits in other places of a batch; serve this model without"
            )
        self.most_rows = max((size for size in self._sizes if size <= _MOST_ROWS), default=self._sizes[0])

    def padded(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)

    def _trial(self, rows: int, softcap: float | None) -> Tensor:
        """The results of one query in every place of tiles of `rows` rows, in calls of several unit counts."""
        generator = torch.Generator().manual_seed(self._head_dim)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self._dtype)

        query = normal(1, 1, 1, self._head_dim)
        keys, values = normal(1, CHUNK, 1, self._head_dim), normal(1, CHUNK, 1, self._head_dim)
        mask = torch.zeros(1, 1, 1, CHUNK, dtype=self._dtype)
        mask[..., -CHUNK // 3 :] = float("-inf")
        found = []
        for units in _UNITS:
            places = (units, CHUNK, self._kv_heads, self._head_dim)
            out, total = self._attend(
                query.repeat(units, self._kv_heads, rows, 1),
                keys.repeat(units, 1, self._kv_heads, 1).view(places).transpose(1, 2),
                values.repeat(units, 1, self._kv_heads, 1).view(places).transpose(1, 2),
                mask.repeat(units, 1, rows, 1),
                self._head_dim**-0.5,
                softcap,
            )
            found.append(torch.cat((out.float(), total[..., None]), -1).flatten(0, 2))
        return torch.cat(found)

    def __call__(
        self,
        out: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        group: ChunkedGroup,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Write the attention of `query` to `out`. Both: [sequences, query_len, heads, head_dim]. `keys`, `values`:
        [sequences, kv_heads, places of all chunks, head_dim]."""
        for tile in group.tiles:
            out[:, tile.queries] = self._tile(query[:, tile.queries], keys, values, tile, scale, softcap)

    def _tile(
        self, query: Tensor, keys: Tensor, values: Tensor, tile: Tile, scale: float, softcap: float | None
    ) -> Tensor:
        sequences, queries, heads, head_dim = query.shape
        kv_heads, used, count = keys.shape[1], queries * self.share, tile.seen.shape[1]
        # The query heads of one KV head become its rows, so that K and V are read once for all of them.
        folded = query.new_zeros(sequences, 1, kv_heads, tile.rows, head_dim)
        own = query.view(sequences, queries, kv_heads, self.share, head_dim).transpose(1, 2)
        folded[:, 0, :, :used] = own.reshape(sequences, kv_heads, used, head_dim)
        found, sums = self._attend(
            folded.expand(-1, count, -1, -1, -1).flatten(0, 1),
            _units(keys, tile.chunks),
            _units(values, tile.chunks),
            tile.mask,
            scale,
            softcap,
        )
        parts = found.float().view(sequences, count, *found.shape[1:])
        sums = sums.view(sequences, count, *sums.shape[1:]).masked_fill(~tile.seen, float("-inf"))
        weights = sums.sub_(sums.amax(1, keepdim=True)).exp_()
        parts = parts.mul_(weights[..., None])
        # Not torch's sum, whose order depends on the number of chunks.
        total = parts.new_zeros(sequences, kv_heads, tile.rows)
        joined = torch.zeros_like(parts[:, 0])
        for chunk in range(count):
            total += weights[:, chunk]
            joined += parts[:, chunk]
        joined /= total[..., None]
        mine = joined[:, :, :used].reshape(sequences, kv_heads, queries, self.share, head_dim).transpose(1, 2)
        return mine.reshape(sequences, queries, heads, head_dim).to(query.dtype)

    @staticmethod
    def _attend(
        query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attend to units of one chunk each.

        `query`: [units, kv_heads, rows, head_dim]. `keys`, `values`: [units, kv_heads, CHUNK, head_dim]. `mask`:
        [units, 1, rows, CHUNK]. Returns softmax(scores) values, [units, kv_heads, rows, head_dim], and the log of the
        sum of exp(scores), fp32 [units, kv_heads, rows].
        """
        if softcap is None:
            out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, keys, values, 0.0, False, attn_mask=mask, scale=scale
            )
            return out, sums
        scores = (query @ keys.transpose(2, 3)).float().mul_(scale / softcap).tanh_().mul_(softcap).add_(mask)
        peak = scores.amax(-1, keepdim=True)
        weights = scores.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        return (weights.to(values.dtype) @ values).float() / total, (peak + total.log())[..., 0]


def _units(places: Tensor, chunks: slice) -> Tensor:
    """The given chunks of `places`, [sequences, kv_heads, places, head_dim], as [units, kv_heads, CHUNK, head_dim]."""
    sequences, kv_heads, _, head_dim = places.shape
    cut = places.transpose(1, 2).reshape(sequences, -1, CHUNK, kv_heads, head_dim)[:, chunks]
    return cut.flatten(0, 1).transpose(1, 2)
