"""The deterministic sets for CUDA: a row's result depends on nothing but the row. Norms, gates, rotation and sampling
of the ordinary set already do this, because one program, or one fixed tile, sums a row."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.fp8 import fp8_bytes
from engine.kernels.gpu import Gpu
from engine.kernels.layer import DenseProduct, PreparedLinear
from engine.kernels.packed import Int4Weight, Int8Weight
from engine.kernels.ragged import RaggedBatch
from engine.kernels.triton.attention.fixed import FixedAttention
from engine.kernels.triton.experts import FIXED_PLACES
from engine.kernels.triton.products.product import fixed_fp8_linear, fixed_linear
from engine.kernels.triton.rowwise import quantise_rows


class DeterministicGpu(Gpu):
    """The deterministic set for CUDA. Products and attention use tiles and parts of fixed sizes, independent of the
    device's size."""

    name = "triton-deterministic"
    places_of_tile = FIXED_PLACES

    def __init__(self, compute_dtype: torch.dtype, *, multiprocessors: int | None = None) -> None:
        super().__init__(compute_dtype, multiprocessors=multiprocessors)
        self._fixed = FixedAttention()

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        return self._fixed_linear(weight, bias)

    def prepare_pruned(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        return self._fixed_linear(weight, bias)

    def prepare_quantised(self, weight: Int4Weight | Int8Weight, bias: Tensor | None) -> PreparedLinear:
        """Dequantise the weight, because the kernels for few rows have other tiles than cuBLAS has for many rows."""
        return self._fixed_linear(weight.dequantise().to(self.compute_dtype), bias)

    def prepare_fp8(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> PreparedLinear:
        return self._fixed_linear((values.float() * scales).to(self.compute_dtype), bias)

    def prepare_adapter(self, weight: Tensor) -> PreparedLinear:
        return fixed_linear(weight, None)

    def _fixed_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        self.keeps(weight.shape, weight.nbytes)
        return DenseProduct(weight, bias, fixed_linear(weight, bias))

    def paged_attention(
        self, query: Tensor, cache: Tensor, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        return self._fixed(query, cache, batch, scale, softcap)


class DeterministicFp8Gpu(DeterministicGpu):
    """The deterministic CUDA set with all products but the output head in 8-bit floats. It computes in bfloat16."""

    name = "triton-fp8-deterministic"

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        self.keeps(weight.shape, fp8_bytes(weight))
        return fixed_fp8_linear(weight, bias, quantise_rows)

    def prepare_head(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        return self._fixed_linear(weight, bias)
