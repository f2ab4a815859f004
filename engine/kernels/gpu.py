"""The kernel set for CUDA: Triton kernels (triton/), and cuBLAS for dense products of more than one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from engine.errors import EngineError, ErrorText
from engine.kernels.fp8 import CAPABILITY, fp8_bytes, fp8_linear, fp8_product, multiplies_fp8, padded
from engine.kernels.layer import DenseProduct, ExpertChanges, ExpertParts, LowRank, PreparedExperts, PreparedLinear
from engine.kernels.packed import Int4Weight, Int8Weight
from engine.kernels.pruned import semi_structured_product
from engine.kernels.ragged import RaggedBatch
from engine.kernels.reference import SCALE_BYTES, Reference, stored_width
from engine.kernels.triton.attention.compressed_kv import INT8, KINDS, PLAIN
from engine.kernels.triton.attention.paged import PagedAttention
from engine.kernels.triton.attention.rope_kv import rope_and_write
from engine.kernels.triton.experts import GroupedProduct, add_shares, route, sort
from engine.kernels.triton.products.one_row import one_row_product
from engine.kernels.triton.products.quantised import LEAST_GROUP, int4_linear, int8_linear
from engine.kernels.triton.rowwise import (
    WIDEST,
    add_rms_norm,
    gelu_tanh_mul,
    norm_heads,
    quantise_rows,
    rms_norm,
    silu_mul,
)

#: The version of what these kernels compute. A change that gives other bits raises it.
_VERSION = 4


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return bool(knobs.runtime.interpret)


def _multiplies_fp8(device: torch.device) -> bool:
    """Whether the GPU multiplies 8-bit floats. For tensors without memory, this is the GPU that kernels are compiled
    for."""
    if device.type != "meta":
        return multiplies_fp8(device)
    major, minor = CAPABILITY
    return bool(driver.active.get_current_target().arch >= 10 * major + minor)


@dataclass(frozen=True, slots=True)
class TabledLowRank(LowRank):
    """A LowRankChange whose matrices steps also find by tables (triton/low_rank.py)."""

    a: Tensor
    """All parts' A, [ranks of all parts, inputs]."""
    bs: tuple[Tensor, ...]
    """scale * B of each part, [outputs, rank]."""


class Gpu(Reference):
    """The kernel set for CUDA. All its operations can be recorded in a CUDA graph after a first run, which compiles
    them.

    On a CPU it runs in Triton's interpreter (TRITON_INTERPRET=1), for tests.
    """

    name = "triton"
    ragged = True
    recordable = True
    tabled = True
    #: The places of a tile of experts' products. None: it depends on the number of rows.
    places_of_tile: int | None = None

    def __init__(
        self, compute_dtype: torch.dtype, *, multiprocessors: int | None = None, kv_cache_dtype: str = "auto"
    ) -> None:
        """`multiprocessors`: the number to split attention for; None asks the GPU. `kv_cache_dtype`: "auto" is
        `compute_dtype`; see `stored_width` for "int8" and "fp8"."""
        super().__init__(compute_dtype)
        self._kv_cache_dtype, self._kind = kv_cache_dtype, KINDS[kv_cache_dtype]
        if self._kind != PLAIN:
            self.cache_dtype = torch.uint8
            self.name = f"{self.name}-{kv_cache_dtype}-kv"
        self._attention = PagedAttention(multiprocessors)
        # Without this, cuBLAS may add partial sums in half precision. That loses digits and, measured on an H200, gains
        # less than 1%. The setting applies to the whole process.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    @property
    def identity(self) -> str:
        return f"{self.name}-{_VERSION}"

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        self.keeps(weight.shape, weight.nbytes)

        def linear(x: Tensor) -> Tensor:
            # On a CPU, the interpreter would take seconds.
            if len(x) == 1 and x.device.type != "cpu":
                return one_row_product(x, weight, bias)
            return F.linear(x, weight, bias)

        return DenseProduct(weight, bias, linear)

    def prepare_pruned(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        product = semi_structured_product(weight, bias)
        if product is None:
            return self.prepare_linear(weight, bias)
        self.keeps(weight.shape, weight.nbytes * 9 // 16)
        return product

    def prepare_low_rank(self, down: Tensor, ups: Sequence[tuple[slice, slice, Tensor]]) -> TabledLowRank:
        prepared = tuple((outputs, ranks, self.prepare_adapter(up)) for outputs, ranks, up in ups)
        return TabledLowRank(self.prepare_adapter(down), prepared, down, tuple(up for _, _, up in ups))

    def prepare_quantised(self, weight: Int4Weight | Int8Weight, bias: Tensor | None) -> PreparedLinear:
        """Like `prepare_linear`, for a packed weight. The kernels have no minima and are not made for groups of fewer
        than 32 inputs: such a weight is rounded to 8 bits in groups of 32."""
        if weight.minima is not None or (weight.group < LEAST_GROUP and weight.shape[1] % LEAST_GROUP == 0):
            weight = Int8Weight.quantise(weight.dequantise(), LEAST_GROUP)
        self.keeps(weight.shape, weight.nbytes)
        return int4_linear(weight, bias) if isinstance(weight, Int4Weight) else int8_linear(weight, bias)

    def prepare_fp8(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> PreparedLinear:
        if self.compute_dtype != torch.bfloat16 or not _multiplies_fp8(values.device):
            return super().prepare_fp8(values, scales, bias)
        self.keeps(values.shape, values.nbytes + scales.nbytes)
        return fp8_product(len(values), padded(values), scales, bias, quantise_rows, one_row_product)

    def prepare_experts(self, parts: ExpertParts) -> PreparedExperts:
        gate_up, down = GroupedProduct(self._dense(parts.gate_ups)), GroupedProduct(self._dense(parts.downs))
        gate, chosen, tile = self.gate(parts.activation), parts.chosen, self.places_of_tile
        one_by_one = super().prepare_experts(parts)

        def experts(x: Tensor, logits: Tensor, changes: Sequence[ExpertChanges] = ()) -> Tensor:
            if not len(x):
                return torch.empty_like(x)
            if changes:
                return one_by_one(x, logits, changes)  # waits for the device, so such a step is not recorded
            experts_of_rows, shares = route(logits, chosen, parts.normed)
            order, starts = sort(experts_of_rows, len(parts.downs))
            inside = gate(gate_up(x, order, starts, chosen, tile))
            return add_shares(down(inside, order, starts, 1, tile), shares)

        return experts

    def _dense(self, products: Sequence[PreparedLinear]) -> list[Tensor]:
        """The weights of experts' products. Raises EngineError if they are quantised."""
        dense = [product.weight for product in products if isinstance(product, DenseProduct) and product.bias is None]
        if len(dense) < len(products):
            raise EngineError(
                ErrorText.of(
                    "experts with quantised weights or biases are not served by {}: serve this model with "
                    "{device}='cpu', with {kernels}='sdpa', or from a checkpoint that is not quantised",
                    self.name,
                )
            )
        return dense

    def route(self, logits: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
        experts, shares = route(logits, chosen, normed)
        return experts.long(), shares

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps) if x.shape[-1] <= WIDEST else super().rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.shape[-1] > WIDEST:
            return super().add_rms_norm(x, residual, weight, eps)
        return add_rms_norm(x, residual, weight, eps)

    def norm_heads(self, heads: Tensor, query_weight: Tensor, key_weight: Tensor, kv_heads: int, eps: float) -> Tensor:
        if heads.shape[-1] > WIDEST:
            return super().norm_heads(heads, query_weight, key_weight, kv_heads, eps)
        return norm_heads(heads, query_weight, key_weight, kv_heads, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return gelu_tanh_mul(gate_up)

    def cache_width(self, head_dim: int) -> int:
        return stored_width(head_dim, self._kv_cache_dtype)

    def prepare_attention(self, heads: int, kv_heads: int, head_dim: int, softcap: float | None) -> None:
        if self._kind == INT8 and head_dim % SCALE_BYTES:
            raise EngineError(
                ErrorText.of(
                    "{kv_cache_dtype}='int8' on {} goes with heads of a multiple of {}, and the model has heads of {}; "
                    "use 'fp8'",
                    self.name,
                    SCALE_BYTES,
                    head_dim,
                )
            )

    def rope_and_write(self, heads: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, batch: RaggedBatch) -> Tensor:
        return rope_and_write(heads, cos, sin, cache, batch.slots, self._kind)

    def paged_attention(
        self, query: Tensor, cache: Tensor, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        return self._attention(query, cache, batch, scale, softcap, self._kind)


class Fp8Gpu(Gpu):
    """The CUDA set with all products but the output head in 8-bit floats (kernels/fp8.py). It computes in bfloat16."""

    name = "triton-fp8"

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        self.keeps(weight.shape, fp8_bytes(weight))
        return fp8_linear(weight, bias, quantise_rows, one_row_product)

    def prepare_head(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        return super().prepare_linear(weight, bias)
