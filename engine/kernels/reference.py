"""Every operation in the plainest torch there is, for any device: the oracle that the other sets are tested by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.groups import AttentionBatch
from engine.kernels.layer import LayerParts, PreparedLayers, PreparedLinear, Told
from engine.kernels.packed import Int4Weight, Int8Weight
from engine.kernels.ragged import Attended, RaggedBatch, causal, ragged_attention, write_ragged
from engine.kv import KvGroup

#: Weights that are dequantised at a time: as many as stay in a processor's cache until they are multiplied.
_DEQUANTISED = 1 << 20


class Reference:
    """The operations that models are made of. A faster set is a subclass that replaces some of them.

    An instance belongs to one model on one thread: sets may keep scratch memory between calls.
    """

    name = "reference"
    #: Sequences share a padded attention batch while the longest context is at most ratio * shortest + tokens.
    padding = (1.0, 0)
    #: Whether it reads the masks of AttentionGroup.
    masked = True
    #: A number of places that blocks must divide; 0 where any do.
    chunk = 0
    #: Which batch the set reads: RaggedBatch, or AttentionBatch. Every set takes the other one too, but slowly.
    ragged = False
    #: Whether a CUDA graph may record its operations: with a ragged batch they ask the device for nothing.
    recordable = False
    #: Where set before a model's layers are prepared: sets that run them in one call tell it what each went into.
    told: Told | None = None

    def __init__(self, compute_dtype: torch.dtype) -> None:
        self.compute_dtype = compute_dtype
        #: In which weights of products come to `prepare_linear`, and keys and values lie in the cache.
        self.weight_dtype = self.cache_dtype = compute_dtype
        #: Numbers of all weights that were prepared, and the bytes in which the set keeps them: what a step reads.
        self.weights = self.weight_bytes = 0

    def use_threads(self, threads: int | None) -> None:
        """Called on the thread that steps, before it does. `threads`: EngineConfig.threads."""
        if threads is not None:
            torch.set_num_threads(threads)

    @property
    def identity(self) -> str:
        """Goes into the engine's fingerprint: another where the same weights and tokens may give other tokens."""
        return self.name

    def keeps(self, shape: Sequence[int], nbytes: int) -> None:
        """Called for every weight that is prepared, without what its layout is padded by."""
        self.weights += math.prod(shape)
        self.weight_bytes += nbytes

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        """`weight` is [outputs, inputs], `bias` [outputs]; the caller drops both, so a set may repack them."""
        self.keeps(weight.shape, weight.nbytes)

        def linear(x: Tensor) -> Tensor:
            return F.linear(x, weight, bias)

        return linear

    def prepare_ordered(self, weight: Int4Weight | Int8Weight, bias: Tensor | None, order: Tensor) -> PreparedLinear:
        """As `prepare_quantised`, where `order`, int64 [inputs], says which input each column of the weight is for."""
        run = self.prepare_quantised(weight, bias)
        return lambda x: run(x.index_select(1, order))

    def prepare_head(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        """As `prepare_linear`, for the matrix that makes logits: sets that quantise the others leave it as it is."""
        return self.prepare_linear(weight, bias)

    def prepare_quantised(self, weight: Int4Weight | Int8Weight, bias: Tensor | None) -> PreparedLinear:
        """As `prepare_linear`, of a weight that is quantised already. It stays so: what a product takes of it is
        dequantised for that product, some outputs at a time."""
        outputs, inputs = weight.shape
        self.keeps(weight.shape, weight.nbytes)
        step = max(1, _DEQUANTISED // inputs)

        def linear(x: Tensor) -> Tensor:
            out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
            for start in range(0, outputs, step):
                part = slice(start, min(start + step, outputs))
                dense = weight.part(part.start, part.stop).dequantise().to(x.dtype)
                out[:, part] = F.linear(x, dense, None if bias is None else bias[part])
            return out

        return linear

    def prepare_fp8(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> PreparedLinear:
        """As `prepare_linear`, of a weight in 8-bit floats, e4m3 [outputs, inputs] times fp32 [outputs, 1]; written out
        where the device does not multiply such."""
        return self.prepare_linear((values.float() * scales).to(self.weight_dtype), bias)

    def peaks(self, head: PreparedLinear, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """What greedy rows want of the logits that `head`, a prepared one, makes of `hidden` [rows, width].

        int64 [rows]: where the largest is, the first of equals; bool [rows]: whether all are finite. None where the set
        has no way around the logits themselves."""
        return None

    def candidates(self, scaled: Tensor, floors: Tensor | None, keys: Tensor) -> tuple[Tensor, Tensor] | None:
        """Which tokens noise can make the largest of each row of `scaled` fp32 [rows, tokens], logits by temperature.

        `floors` fp32 [rows, 1]: what is below is left out. `keys` int32 [rows, 1, 2]: see sampling/noise.py. Returns
        (int64 rows, int64 tokens) of all that come near; row after row, each with one at least. None where the set
        cannot tell.
        """
        return None

    def zero_cache(self, *shape: int, device: torch.device) -> Tensor:
        """Zeros of `cache_dtype` for keys and values to be written into."""
        return torch.zeros(shape, dtype=self.cache_dtype, device=device)

    def kv_cache(self, group: KvGroup, blocks: int, block_size: int, device: torch.device) -> Tensor:
        """Zeros for keys and values of a KV group: [layers, 2, blocks, block_size, kv_heads, cache_width]."""
        width = self.cache_width(group.head_dim)
        return self.zero_cache(group.layers, 2, blocks, block_size, group.kv_heads, width, device=device)

    def cache_width(self, head_dim: int) -> int:
        """How many of the cache's numbers a key, or a value, of `head_dim` takes."""
        return head_dim

    def prepare_attention(self, heads: int, kv_heads: int, head_dim: int, softcap: float | None) -> None:
        """Called by every layer when it is packed, with the shape of its attention."""

    def prepare_layers(self, layers: Sequence[LayerParts], norm: Tensor) -> PreparedLayers | None:
        """One call for all of a model's layers and the `norm` after them, that does what the operations below do one
        after the other; None where the set has none for such layers."""
        return None

    def arrange(self, batch: AttentionBatch, block_size: int, zero_block: int) -> AttentionBatch:
        """A step of one KV group as this set wants it in `paged_attention`: made once for all of the group's layers."""
        return batch

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), computed in fp32.

        Rounded to the dtype of `x`; before the product with the weight, unless that is fp32.
        """
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). Either input may be overwritten."""
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def norm_heads(self, heads: Tensor, query_weight: Tensor, key_weight: Tensor, kv_heads: int, eps: float) -> Tensor:
        """`rms_norm` of each query and each key of `heads` [tokens, query heads + 2 * kv_heads, head_dim], which has
        queries, then keys, then values; with one weight [head_dim] for queries, one for keys. Values stay as they are.
        Returns the shape of `heads`, which may be overwritten."""
        queries, keys, values = heads.tensor_split((-2 * kv_heads, -kv_heads), 1)
        return torch.cat((self.rms_norm(queries, query_weight, eps), self.rms_norm(keys, key_weight, eps), values), 1)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x` [tokens, heads, head_dim] by pairs (i, i + head_dim / 2) (arXiv 2104.09864, half-split).

        `cos` and `sin` are [tokens, 1, rotary_dim]; the first half of `sin` carries the rotation's minus sign. Where
        rotary_dim is less than head_dim, only so many of the first dimensions turn, as if they were all.
        """
        turning = cos.shape[-1]
        if turning < x.shape[-1]:
            return torch.cat((self.rope(x[..., :turning], cos, sin), x[..., turning:]), -1)
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of `gate_up` [tokens, 2 * width] -> [tokens, width] (SwiGLU, arXiv 2002.05202)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """As silu_mul, with GELU by its tanh approximation (arXiv 1606.08415) in place of SiLU."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def write_kv(self, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Put `key` and `value` [tokens, kv_heads, head_dim] at `slots` of one layer's `cache`.

        `cache` is [2, blocks, block_size, kv_heads, head_dim].
        """
        flat = cache.view(2, -1, *cache.shape[3:])
        flat[0].index_copy_(0, slots, key)
        flat[1].index_copy_(0, slots, value)

    def rope_and_write(self, heads: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, batch: Attended) -> Tensor:
        """Turn queries and keys as `rope` does and put keys and values into `cache` at the slots of `batch`.

        `heads` [tokens, query heads + 2 * kv_heads, head_dim] has queries, then keys, then values; the cache tells how
        many are keys. Returns the turned queries [tokens, query heads, head_dim], whose heads lie one after another but
        whose tokens may lie further apart. `heads` may be overwritten.
        """
        kv_heads = cache.shape[3]
        rotated, values = self.rope(heads[:, :-kv_heads], cos, sin), heads[:, -kv_heads:]
        write = write_ragged if isinstance(batch, RaggedBatch) else self.write_kv
        write(rotated[:, -kv_heads:], values, cache, batch.slots)
        return rotated[:, :-kv_heads]

    def paged_attention(
        self, query: Tensor, cache: Tensor, batch: Attended, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Causal attention of `query` [tokens, heads, head_dim] over what `write_kv` put into `cache`.

        Query head h reads KV head h // (heads / kv_heads). Scores are multiplied by `scale`; with `softcap` they
        then become softcap * tanh(score / softcap). Returns [tokens, heads, head_dim].
        """
        if isinstance(batch, RaggedBatch):
            return ragged_attention(query, cache, batch, scale, softcap)
        out = torch.empty_like(query)
        for group in batch.groups:
            for i, kv_len in enumerate(group.kv_lens):
                row = group.row + i * group.query_len
                rows = slice(row, row + group.query_len)
                keys, values = cache[:, group.block_tables[i]].flatten(1, 2)[:, :kv_len]
                out[rows] = causal(query[rows], keys, values, scale, softcap, batch.window)
        return out


class Ragged(Reference):
    """The same over ragged batches: what the runner for accelerators runs on where there is none."""

    name = "ragged"
    ragged = True
