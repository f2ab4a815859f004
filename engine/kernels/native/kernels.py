"""The kernel set of the native library: fp32 arithmetic, weights in fp32 or bf16, and a KV cache in these types or in 8
bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.layer import ExpertParts, LayerParts, LowRankChange, PreparedExperts, PreparedLayers, PreparedLinear
from engine.kernels.native.adapters import NativeLowRank, bring_together
from engine.kernels.native.layers import NativeLayers, fit, leads
from engine.kernels.native.library import VERSION, Library, Pool, Storage
from engine.kernels.native.pages import Pages
from engine.kernels.native.product import BF16, FP32, NativeExperts, PackedProduct, dense_rows, experts_fit, route
from engine.kernels.native.quantised import quantised_product
from engine.kernels.packed import Int4Weight, Int8Weight
from engine.kernels.ragged import RaggedBatch
from engine.kernels.reference import Reference, stored_width
from engine.kernels.unmasked import TextBatch

#: Attention needs a head size that is a multiple of this.
_HEAD_MULTIPLE = 8
#: Kernels compute powers of two in place of powers of e.
_LOG2_E: Final = math.log2(math.e)
#: Activations by the numbers that rows.h gives them.
_ACTIVATIONS: Final = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
#: The most candidates of a sampled row. More are that close to each other only if logits are huge.
_MOST_CANDIDATES = 64


class Native(Reference):
    """The native kernel set. A row's result depends neither on other rows nor on the number of threads, to the bit."""

    def __init__(
        self,
        dtype: torch.dtype,
        library: Library,
        threads: int | None = None,
        *,
        deterministic: bool = False,
        kv_cache_dtype: str = "auto",
    ) -> None:
        """`dtype`: of the weights; bfloat16 is kept, others are held in fp32. `threads`: None is torch's number.
        `deterministic`: refuse shapes that need torch's operations. `kv_cache_dtype`: "auto" is the weights' type; see
        `stored_width` for "int8" and "fp8"."""
        super().__init__(torch.float32)
        self._compressed = None if kv_cache_dtype == "auto" else kv_cache_dtype
        self.name = f"native-{library.isa}" + (f"-{kv_cache_dtype}-kv" if self._compressed else "")
        self._deterministic = deterministic
        self._half = dtype == torch.bfloat16
        self.weight_dtype = self.cache_dtype = torch.bfloat16 if self._half else torch.float32
        if self._compressed:
            self.cache_dtype = torch.uint8
        self._storage = Storage(library, self._compressed or str(self.cache_dtype).removeprefix("torch."))
        self.rounds_rows = self._half and library.rounds
        self._library = library
        self._threads = Pool(library, threads or torch.get_num_threads())
        self._pool = self._threads.address
        self._pages = Pages()
        #: Those of caches that have small pages yet.
        self._caches: list[Pages] = []

    @property
    def identity(self) -> str:
        return f"{self.name}-{VERSION}"

    def use_threads(self, threads: int | None) -> None:
        # torch has little left to do, and its threads would spin on the cores where the pool's threads compute.
        torch.set_num_threads(1)

    def zero_cache(self, *shape: int, device: torch.device) -> Tensor:
        # Separate pages, because the cache may be freed while the weights stay.
        pages = Pages(large=False)
        self._caches.append(pages)
        return pages.zeros(*shape, dtype=self.cache_dtype)

    def settle(self) -> None:
        for pages in self._caches:
            pages.enlarge()
        self._caches.clear()

    def cache_width(self, head_dim: int) -> int:
        return stored_width(head_dim, self._compressed or "auto")

    def prepare_attention(self, heads: int, kv_heads: int, head_dim: int, softcap: float | None) -> None:
        setting = "deterministic=True" if self._deterministic else f"kv_cache_dtype={self._compressed!r}"
        if (self._deterministic or self._compressed) and head_dim % _HEAD_MULTIPLE:
            raise EngineError(
                f"{setting} on native kernels goes with heads of a multiple of {_HEAD_MULTIPLE}, and the model has "
                f"heads of {head_dim}; serve this model without"
            )

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        self.keeps(weight.shape, weight.numel() * self.weight_dtype.itemsize)
        return self._packed(weight, bias, self._pages.zeros, self._threads)

    def _packed(self, weight: Tensor, bias: Tensor | None, zeros: Callable[..., Tensor], pool: Pool) -> PackedProduct:
        """`zeros`: allocates the memory for the weight. `pool`: packs it."""
        outputs, inputs = weight.shape
        half = int(self._half)
        panels = -(-outputs // self._library.columns)
        packed = zeros(panels * self._library.columns, inputs + inputs % 2 * half, dtype=self.weight_dtype)
        weight = weight.to(self.weight_dtype).contiguous()
        self._library.pack(pool.address, weight.data_ptr(), packed.data_ptr(), half, inputs, outputs)
        kind = BF16 if self._half else FP32
        product = PackedProduct(self._library, self._threads, packed.data_ptr(), kind, packed, bias, outputs, inputs)
        product.nbytes, product.rows = weight.nbytes, dense_rows(packed, inputs, self._library.columns)
        return product

    def prepare_adapter(self, weight: Tensor) -> PreparedLinear:
        # In memory and by a thread of its own: the adapter may be unloaded, and a step may run meanwhile.
        return self._packed(weight, None, torch.zeros, Pool(self._library, 1))

    def prepare_low_rank(self, down: Tensor, ups: Sequence[tuple[slice, slice, Tensor]]) -> LowRankChange:
        return NativeLowRank(self._library, self._threads, down, ups)

    def bring_together(self, changes: Sequence[LowRankChange]) -> None:
        bring_together(changes)

    def prepare_quantised(self, weight: Int4Weight | Int8Weight, bias: Tensor | None) -> PreparedLinear:
        product = quantised_product(self._library, self._threads, self._pages, weight, bias)
        self.keeps(weight.shape, product.nbytes)
        return product

    def prepare_ordered(self, weight: Int4Weight | Int8Weight, bias: Tensor | None, order: Tensor) -> PreparedLinear:
        product = quantised_product(self._library, self._threads, self._pages, weight, bias, order)
        self.keeps(weight.shape, product.nbytes)
        return product

    def lookup(self, head: PreparedLinear) -> Callable[[Tensor], Tensor] | None:
        return head.rows if isinstance(head, PackedProduct) else None

    def prepare_layers(self, layers: Sequence[LayerParts], norm: Tensor | None) -> PreparedLayers | None:
        if not fit(layers, _HEAD_MULTIPLE):
            return None
        return NativeLayers(self._library, self._threads, layers, norm, self._storage, self.report_time, self.exchange)

    def prepare_experts(self, parts: ExpertParts) -> PreparedExperts:
        if not experts_fit(parts):
            return super().prepare_experts(parts)
        return NativeExperts(self._library, self._threads, parts)

    def route(self, logits: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
        return route(self._library, self._threads, logits.float(), chosen, normed)

    def peaks(self, head: PreparedLinear, hidden: Tensor, first: int = 0) -> tuple[Tensor, Tensor] | None:
        return head.peaks(hidden, first, self.exchange) if isinstance(head, PackedProduct) else None

    def sum_ranks(self, x: Tensor) -> Tensor:
        return x if self.exchange is None else self.exchange.sum(self._threads, x.contiguous())

    def candidates(self, scaled: Tensor, floors: Tensor | None, keys: Tensor) -> tuple[Tensor, Tensor] | None:
        rows, tokens = scaled.shape
        scaled, keys = scaled.contiguous(), keys.contiguous()
        floors = None if floors is None else floors.contiguous()
        token_ids = torch.empty(rows, _MOST_CANDIDATES, dtype=torch.int64)
        counts = torch.empty(rows, dtype=torch.int64)
        self._library.candidates(
            self._pool,
            scaled.data_ptr(),
            None if floors is None else floors.data_ptr(),
            keys.data_ptr(),
            rows,
            tokens,
            _MOST_CANDIDATES,
            token_ids.data_ptr(),
            counts.data_ptr(),
        )
        if bool((counts < 0).any()):
            return None
        row_indexes = torch.arange(rows).repeat_interleave(counts)
        return row_indexes, token_ids[torch.arange(_MOST_CANDIDATES) < counts[:, None]]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != self.compute_dtype:
            return super().rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._library.norm(
            self._pool, x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        x, residual = x.contiguous(), residual.contiguous()
        self._library.norm(
            self._pool, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), x.data_ptr(), rows, width, eps
        )
        return x, residual

    def norm_heads(self, heads: Tensor, query_weight: Tensor, key_weight: Tensor, kv_heads: int, eps: float) -> Tensor:
        heads = heads.contiguous()
        self._library.norm_heads(
            self._pool,
            heads.data_ptr(),
            query_weight.data_ptr(),
            key_weight.data_ptr(),
            *heads.shape[:2],
            kv_heads,
            heads.shape[2],
            eps,
        )
        return heads

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._layer_norm(x, None, weight, bias, eps, out)
        return out

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        self._layer_norm(x, residual, weight, bias, eps, x)
        return x, residual

    def _layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
    ) -> None:
        self._library.layer_norm(
            self._pool,
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *x.shape,
            eps,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up, "silu")

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up, "gelu_tanh")

    def gate(self, activation: str) -> Callable[[Tensor], Tensor]:
        return partial(self._gate, name=activation) if activation in _ACTIVATIONS else super().gate(activation)

    def _gate(self, gate_up: Tensor, name: str) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, both = gate_up.shape
        out = torch.empty(rows, both // 2)
        self._library.gate(self._pool, gate_up.data_ptr(), out.data_ptr(), _ACTIVATIONS[name], rows, both // 2)
        return out

    def activation(self, name: str) -> Callable[[Tensor], Tensor]:
        if name not in _ACTIVATIONS:
            return super().activation(name)
        kind = _ACTIVATIONS[name]

        def activate(x: Tensor) -> Tensor:
            x = x.contiguous()
            out = torch.empty_like(x)
            self._library.activate(self._pool, x.data_ptr(), out.data_ptr(), kind, *x.shape)
            return out

        return activate

    def rope_and_write(self, heads: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, batch: RaggedBatch) -> Tensor:
        heads, cos, sin = heads.contiguous(), cos.contiguous(), sin.contiguous()
        tokens, count, head_dim = heads.shape
        keys, values = cache[0], cache[1]
        kv_heads = cache.shape[3]
        self._library.rope_and_write(
            self._pool,
            heads.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            self._storage.kind(cache),
            batch.slots.data_ptr(),
            tokens,
            count,
            kv_heads,
            head_dim,
            cos.shape[-1],
        )
        return heads[:, : count - 2 * kv_heads]

    def paged_attention(
        self, query: Tensor, cache: Tensor, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        tokens, heads, head_dim = query.shape
        if head_dim % _HEAD_MULTIPLE:
            return super().paged_attention(query, cache, batch, scale, softcap)
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()
        before = leads(batch)
        out = torch.empty(tokens, heads, head_dim)
        sequence_tokens = int(batch.query_starts[-1])
        if sequence_tokens < tokens:
            out[sequence_tokens:] = 0
        keys, values = cache[0], cache[1]
        self._library.attention(
            self._pool,
            query.data_ptr(),
            query.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            self._storage.kind(cache),
            batch.query_starts.data_ptr(),
            batch.kv_lens.data_ptr(),
            before.data_ptr(),
            batch.tables.data_ptr(),
            batch.tables.stride(0),
            batch.table_rows.data_ptr(),
            len(batch.kv_lens),
            heads,
            cache.shape[3],
            head_dim,
            cache.shape[2],
            batch.window or 0,
            scale,
            softcap or 0.0,
            out.data_ptr(),
        )
        return out

    def attend_unmasked(self, rows: Tensor, batch: TextBatch, reach: int | None) -> Tensor:
        tokens, _, heads, head_dim = rows.shape
        rows = rows.contiguous()
        biases = None if batch.biases is None else batch.biases * _LOG2_E
        out = torch.empty(tokens, heads * head_dim)
        self._library.attend_unmasked(
            self._pool,
            rows.data_ptr(),
            batch.starts.data_ptr(),
            len(batch.lengths),
            heads,
            head_dim,
            -1 if reach is None else reach,
            None if biases is None else biases.data_ptr(),
            0 if biases is None else biases.shape[1],
            batch.farthest,
            head_dim**-0.5 * _LOG2_E,
            out.data_ptr(),
        )
        return out
