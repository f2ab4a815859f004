"""The reference kernel set: every operation in plain torch, for any device. It is the test oracle of the other sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.layer import (
    ExpertChanges,
    ExpertParts,
    LayerParts,
    LowRank,
    LowRankChange,
    PreparedExperts,
    PreparedLayers,
    PreparedLinear,
    ReportTime,
)
from engine.kernels.packed import Int4Weight, Int8Weight
from engine.kernels.ragged import RaggedBatch, ragged_attention
from engine.kernels.unmasked import ACTIVATIONS, TextBatch, attend_unmasked
from engine.kv import KvGroup

if TYPE_CHECKING:
    from engine.kernels.collectives import Collectives
    from engine.kernels.native.exchange import Exchange, Share

#: The numbers dequantised at one time, few enough to stay in a processor's cache until they are multiplied.
_DEQUANTISED = 1 << 20
#: The bytes of the scale after each key and each value, for KV caches of "int8".
SCALE_BYTES: Final = 4


class Reference:
    """The operations that models are made of. A faster set is a subclass that replaces some of them.

    An instance belongs to one model on one thread, because sets may keep scratch memory between calls.
    """

    name = "reference"
    #: Whether the set's steps may have padding rows, and lengths that only the device knows: the steps of
    #: engine/execution/device.
    ragged = False
    #: Whether a CUDA graph can record its operations: with a ragged batch they never wait for the device.
    recordable = False
    #: Whether adapters' changes of products come from tables on the device, so that recorded steps have them, too
    #: (`engine/execution/device/adapters.py`). `prepare_low_rank` returns TabledLowRank then.
    tabled = False
    #: If set before a model's layers are prepared, sets that run layers in one call report their times by kernel class.
    report_time: ReportTime | None = None
    #: This rank's end, if the model is one rank's share: in shared memory, or by torch.distributed. One of them is set
    #: before the model is made.
    exchange: Exchange | None = None
    collectives: Collectives | None = None

    def __init__(self, compute_dtype: torch.dtype) -> None:
        self.compute_dtype = compute_dtype
        #: The dtypes of weights passed to `prepare_linear`, and of the KV cache.
        self.weight_dtype = self.cache_dtype = compute_dtype
        #: The count of all prepared weights, and the bytes in which the set keeps them, which a step reads.
        self.weights = self.weight_bytes = 0

    @property
    def share(self) -> Share | None:
        """This rank's part of the model. None: all of it."""
        end = self.exchange or self.collectives
        return None if end is None else end.share

    def use_threads(self, threads: int | None) -> None:
        """Set the number of threads. Called on the thread that runs steps, before the first step. `threads`:
        EngineConfig.threads."""
        if threads is not None:
            torch.set_num_threads(threads)

    @property
    def identity(self) -> str:
        """A part of the engine's fingerprint. It differs if the same weights and tokens may give other tokens."""
        return self.name

    def keeps(self, shape: Sequence[int], nbytes: int) -> None:
        """Count a prepared weight. Called for every weight, without the padding of its layout."""
        self.weights += math.prod(shape)
        self.weight_bytes += nbytes

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        """Prepare a product. `weight`: [outputs, inputs]; `bias`: [outputs]. The caller drops both, so a set may repack
        them."""
        self.keeps(weight.shape, weight.nbytes)

        def linear(x: Tensor) -> Tensor:
            return F.linear(x, weight, bias)

        return linear

    def prepare_pruned(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        """Like `prepare_linear`, for a weight of which two of each four adjacent inputs are zero. Sets that cannot skip
        these multiply them, too."""
        return self.prepare_linear(weight, bias)

    def prepare_ordered(self, weight: Int4Weight | Int8Weight, bias: Tensor | None, order: Tensor) -> PreparedLinear:
        """Like `prepare_quantised`. `order`: int64 [inputs], the input of each column of the weight."""
        run = self.prepare_quantised(weight, bias)
        return lambda x: run(x.index_select(1, order))

    def prepare_head(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        """Like `prepare_linear`, for the matrix that makes logits. Sets that quantise other matrices do not quantise
        it."""
        return self.prepare_linear(weight, bias)

    def prepare_adapter(self, weight: Tensor) -> PreparedLinear:
        """Like `prepare_linear`, for a matrix of an adapter, which is freed with it. Any thread may call it, also while
        a step runs. `weight`: of `weight_dtype`, which sets that quantise other matrices leave as it is."""
        return lambda x: F.linear(x, weight)

    def prepare_low_rank(self, down: Tensor, ups: Sequence[tuple[slice, slice, Tensor]]) -> LowRankChange:
        """Prepare an adapter's change of a product, as `prepare_adapter`. `down`: A of all parts, one below another,
        [ranks, inputs]. `ups`: for each part its outputs, its ranks, and scale * B, [outputs, ranks]."""
        prepared = tuple((outputs, ranks, self.prepare_adapter(up)) for outputs, ranks, up in ups)
        return LowRank(self.prepare_adapter(down), prepared)

    def bring_together(self, changes: Sequence[LowRankChange]) -> None:
        """Arrange the memory of an adapter's changes: once all are prepared, before any is used."""

    def prepare_quantised(self, weight: Int4Weight | Int8Weight, bias: Tensor | None) -> PreparedLinear:
        """Like `prepare_linear`, for a quantised weight. It stays quantised: each product dequantises it, some outputs
        at a time."""
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
        """Like `prepare_linear`, for a weight in 8-bit floats: e4m3 [outputs, inputs] times fp32 [outputs, 1]. It is
        dequantised if the device cannot multiply such floats."""
        return self.prepare_linear((values.float() * scales).to(self.weight_dtype), bias)

    def lookup(self, head: PreparedLinear) -> Callable[[Tensor], Tensor] | None:
        """A function that looks up rows of a prepared weight, int64 [rows] to [rows, inputs], as exact as the weight.
        None if the set keeps the weight as it was given, so that the caller's own copy is the same memory."""
        return None

    def prepare_experts(self, parts: ExpertParts) -> PreparedExperts:
        """Prepare a mixture of experts. A row's result is the sum over its experts, the likeliest first, of share times
        result, in fp32. Only experts with rows run."""
        gate = self.gate(parts.activation)

        def experts(x: Tensor, logits: Tensor, changes: Sequence[ExpertChanges] = ()) -> Tensor:
            members = [(change, _members(change.rows, len(x), x.device)) for change in changes]
            chosen, shares = self.route(logits, parts.chosen, parts.normed)
            # A row's places, one for each of its experts, sorted by expert.
            order = chosen.flatten().argsort(stable=True)
            counts = chosen.flatten().bincount(minlength=len(parts.downs)).tolist()
            results = torch.empty(len(order), x.shape[1], dtype=torch.float32, device=x.device)
            for i, places in enumerate(torch.split(order, counts)):
                if len(places):
                    rows = places // parts.chosen
                    adapted = [(change, member[rows].nonzero()[:, 0]) for change, member in members]
                    entering = x[rows]
                    both = parts.gate_ups[i](entering)
                    for change, own in adapted:
                        _add_change(change.gate_ups[i], entering, both, own)
                    inside = gate(both)
                    out = parts.downs[i](inside)
                    for change, own in adapted:
                        _add_change(change.downs[i], inside, out, own)
                    results[places] = out.float()
            results = results.view(len(x), parts.chosen, x.shape[1]).mul_(shares.unsqueeze(-1))
            total = results[:, 0]
            for choice in range(1, parts.chosen):
                total = total + results[:, choice]
            return total.to(x.dtype)

        return experts

    def route(self, logits: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
        """Choose the experts of each row: those of the `chosen` largest of softmax(`logits`), [rows, experts], in fp32.

        Returns int64 [rows, chosen], the likeliest first, and their shares, fp32 [rows, chosen]: the probabilities, or
        with `normed` these divided by their sum. Equal ones are taken as torch.topk takes them.
        """
        shares, experts = logits.float().softmax(-1).topk(chosen, -1)
        return experts, shares / shares.sum(-1, keepdim=True) if normed else shares

    def peaks(self, head: PreparedLinear, hidden: Tensor, first: int = 0) -> tuple[Tensor, Tensor] | None:
        """The greedy tokens of the logits that `head`, a prepared product, makes of `hidden`, [rows, width].

        Returns int64 [rows], the index of the largest logit, the first of equal ones; and bool [rows], whether all
        logits are finite. None if the set cannot do this without storing the logits. With an exchange all ranks call
        it, each with its part of the vocabulary, which begins at `first`; the result is that of all, and on rank 0
        alone.
        """
        return None

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Add up `x` over all ranks, if there are several. May overwrite `x`."""
        return x if self.collectives is None else self.collectives.sum(x)

    def candidates(self, scaled: Tensor, floors: Tensor | None, keys: Tensor) -> tuple[Tensor, Tensor] | None:
        """The tokens that Gumbel noise can make the largest of each row of `scaled`.

        `scaled`: fp32 [rows, tokens], logits as they are sampled. `floors`: fp32 [rows, 1], smaller logits are
        left out. `keys`: int32 [rows, 1, 2], see sampling/draws.py. Returns (int64 rows, int64 tokens), row after row,
        at least one for each row. None if the set has no such operation.
        """
        return None

    def zero_cache(self, *shape: int, device: torch.device) -> Tensor:
        """Zeros of `cache_dtype` for keys and values."""
        return torch.zeros(shape, dtype=self.cache_dtype, device=device)

    def kv_cache(self, group: KvGroup, blocks: int, block_size: int, device: torch.device) -> Tensor:
        """The zeroed cache of a KV group, [layers, 2, blocks, block_size, kv_heads, cache_width]."""
        width = self.cache_width(group.head_dim)
        return self.zero_cache(group.layers, 2, blocks, block_size, group.kv_heads, width, device=device)

    def settle(self) -> None:
        """Do what would have delayed the first step, if that is left to do. Called after each step's forward pass."""

    def cache_width(self, head_dim: int) -> int:
        """The number of cache elements that a key, or a value, of `head_dim` takes."""
        return head_dim

    def prepare_attention(self, heads: int, kv_heads: int, head_dim: int, softcap: float | None) -> None:
        """Prepare attention of this shape. Every layer calls it when it is packed."""

    def prepare_layers(self, layers: Sequence[LayerParts], norm: Tensor | None) -> PreparedLayers | None:
        """A function that runs all of a model's layers and the `norm` after them in one call, with the same results as
        the operations below. `norm`: None if the layers of another stage follow. None if the set cannot run such
        layers."""
        return None

    def arrange(self, batch: RaggedBatch, block_size: int, zero_block: int) -> RaggedBatch:
        """Add to a step of one KV group what `paged_attention` needs beside it, once for all of the group's layers.

        The step has no padding rows. Tables are padded with `zero_block`, the cache's last block, which is zero.
        """
        return batch

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), computed in fp32.

        The result has the dtype of `x`. It is rounded before the product with the weight, unless the weight is fp32. A
        row whose squares are too large for fp32 becomes NaN, here and in each other kernel set: its norm would be zero,
        and a request whose hidden states overflow would get the first token, not an error.
        """
        wide = x.float()
        square = wide.square().mean(-1, keepdim=True) + eps
        normed = wide * torch.rsqrt(square.nan_to_num(float("nan"), posinf=-1.0))
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns (rms_norm(x + residual), x + residual). Either input may be overwritten."""
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Layer normalisation over the last dimension (arXiv 1607.06450)."""
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Returns (layer_norm(x + residual), x + residual). Either input may be overwritten."""
        total = residual + x
        return self.layer_norm(total, weight, bias, eps), total

    def norm_heads(self, heads: Tensor, query_weight: Tensor, key_weight: Tensor, kv_heads: int, eps: float) -> Tensor:
        """Apply `rms_norm` to each query and each key of `heads`, with one weight [head_dim] for queries and one for
        keys.

        `heads`: [tokens, query heads + 2 * kv_heads, head_dim], queries, then keys, then values. Values are not
        changed. Returns the shape of `heads`, which may be overwritten.
        """
        queries, keys, values = heads.tensor_split((-2 * kv_heads, -kv_heads), 1)
        return torch.cat((self.rms_norm(queries, query_weight, eps), self.rms_norm(keys, key_weight, eps), values), 1)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x`, [tokens, heads, head_dim], by pairs (i, i + head_dim / 2) (arXiv 2104.09864, half-split).

        `cos`, `sin`: [tokens, 1, rotary_dim]; the first half of `sin` has the rotation's minus sign. If rotary_dim is
        less than head_dim, only the first rotary_dim dimensions are rotated, in pairs among themselves.
        """
        turning = cos.shape[-1]
        if turning < x.shape[-1]:
            return torch.cat((self.rope(x[..., :turning], cos, sin), x[..., turning:]), -1)
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin

    def gate(self, activation: str) -> Callable[[Tensor], Tensor]:
        """The operation that multiplies the activation of a row's first half with its second, [tokens, 2 * width] ->
        [tokens, width]. `activation`: a key of ACTIVATIONS."""
        if activation in ("silu", "gelu_tanh"):
            return {"silu": self.silu_mul, "gelu_tanh": self.gelu_tanh_mul}[activation]
        activate = self.activation(activation)

        def gated(x: Tensor) -> Tensor:
            # Contiguous: what lies apart, as of more rows than one, is computed by another routine, with other last
            # bits.
            half = x.shape[-1] // 2
            return activate(x[:, :half].contiguous()) * x[:, half:]

        return gated

    def activation(self, name: str) -> Callable[[Tensor], Tensor]:
        """The operation of an activation, a key of ACTIVATIONS, on a tensor of two dimensions."""
        return ACTIVATIONS[name]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of `gate_up`, [tokens, 2 * width] -> [tokens, width] (SwiGLU, arXiv 2002.05202)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """Like silu_mul, with GELU in its tanh approximation (arXiv 1606.08415) instead of SiLU."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def write_kv(self, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Write `key` and `value`, [tokens, kv_heads, head_dim], at `slots` of one layer's `cache`. Rows whose slot is
        -1 are not written.

        `cache`: [2, blocks, block_size, kv_heads, head_dim].
        """
        stored = slots >= 0
        flat = cache.view(2, -1, *cache.shape[3:])
        flat[0].index_copy_(0, slots[stored], key[stored])
        flat[1].index_copy_(0, slots[stored], value[stored])

    def rope_and_write(self, heads: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, batch: RaggedBatch) -> Tensor:
        """Rotate queries and keys as `rope` does, and write keys and values into `cache` at the slots of `batch`.

        `heads`: [tokens, query heads + 2 * kv_heads, head_dim], queries, then keys, then values; the cache's shape
        gives kv_heads. It may be overwritten. Returns the rotated queries [tokens, query heads, head_dim]. Their heads
        are contiguous in memory, but their tokens may be further apart.
        """
        kv_heads = cache.shape[3]
        rotated, values = self.rope(heads[:, :-kv_heads], cos, sin), heads[:, -kv_heads:]
        self.write_kv(rotated[:, -kv_heads:], values, cache, batch.slots)
        return rotated[:, :-kv_heads]

    def paged_attention(
        self, query: Tensor, cache: Tensor, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Causal attention of `query`, [tokens, heads, head_dim], over the keys and values in `cache`.

        Query head h reads KV head h // (heads / kv_heads). Scores are multiplied by `scale`; with `softcap` they then
        become softcap * tanh(score / softcap). Returns [tokens, heads, head_dim].
        """
        return ragged_attention(query, cache, batch, scale, softcap)

    def attend_unmasked(self, rows: Tensor, batch: TextBatch, reach: int | None) -> Tensor:
        """Attention in which a token sees those of its sequence on both sides, up to `reach` away; None for all.

        `rows`: [tokens, 3, heads, head_dim], queries, keys and values. Returns [tokens, heads * head_dim].
        """
        return attend_unmasked(rows, batch, reach)


class Ragged(Reference):
    """The reference set for ragged batches, with which the runner for accelerators runs on a CPU."""

    name = "ragged"
    ragged = True


def stored_width(head_dim: int, kind: str) -> int:
    """The numbers that a key or value of a head takes in a KV cache, its scale included.

    `kind`: EngineConfig.kv_cache_dtype. In a cache of 8 bits, each key and each value of a head is rounded by itself
    when it is written, and widened when it is read. "int8" has numbers from -127 to 127 and one scale, stored after
    them as fp32. "fp8" is plain e4m3 without a scale, because its exponent covers the range of keys and values. Both
    caches are bytes.
    """
    return head_dim + SCALE_BYTES * (kind == "int8")


def _members(rows: Tensor | None, count: int, device: torch.device) -> Tensor:
    """A mask of the `count` rows that are among `rows`, bool [count]."""
    if rows is None:
        return torch.ones(count, dtype=torch.bool, device=device)
    members = torch.zeros(count, dtype=torch.bool, device=device)
    members[rows] = True
    return members


def _add_change(change: LowRankChange | None, x: Tensor, out: Tensor, rows: Tensor) -> None:
    if change is not None and len(rows):
        change.add(x, out, rows)
