"""Weights in 8-bit floats (e4m3): compressed-tensors' "float-quantized" and the "fp8" method.

weight             e4m3 [outputs, inputs]
weight_scale       one number, or [outputs] or [outputs, 1]; a weight is the stored number times its scale
weight_scale_inv   [outputs / block, inputs / block], rounded up: also factors, despite the name, one for each block
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.kernels import Kernels, PreparedLinear
from engine.quant.formats.matrix import Quantised
from engine.quant.formats.stored import Stored


@dataclass(frozen=True, slots=True)
class Fp8Matrix(Quantised):
    values: Tensor
    """e4m3 [outputs, inputs]."""
    scales: Tensor
    """fp32 [outputs, 1], or [outputs, inputs / block] with one scale for `block` inputs."""
    block: int

    def prepare(self, kernels: Kernels, bias: Tensor | None) -> PreparedLinear:
        if self.scales.shape[1] == 1:
            return kernels.prepare_fp8(self.values, self.scales, bias)
        return kernels.prepare_linear(self.dequantise().to(kernels.weight_dtype), bias)

    def dequantise(self) -> Tensor:
        wide = self.scales.repeat_interleave(self.block, 1)[:, : self.values.shape[1]]
        return self.values.float() * wide

    def table(self) -> None:
        return None

    def stacked_on(self, others: Sequence[Quantised]) -> Fp8Matrix | None:
        alike = [other for other in others if isinstance(other, Fp8Matrix) and other.block == self.block]
        if len(alike) < len(others):
            return None
        all_ = [self, *alike]
        # Joined as bytes, because not every device can join 8-bit floats.
        values = torch.cat([matrix.values.view(torch.uint8) for matrix in all_]).view(self.values.dtype)
        return Fp8Matrix(values, torch.cat([matrix.scales for matrix in all_]), self.block)


class Fp8Stored(Stored):
    def empty_tensors(self) -> dict[str, Tensor]:
        values = self.empty(self.outputs, self.inputs, dtype=torch.float8_e4m3fn)
        if self.scheme.block is not None:
            outputs, inputs = self.scheme.block
            end = "weight_scale_inv" if "weight_scale_inv" in self.headers else "weight_scale"
            return {"weight": values, end: self.scale(end, -(-self.outputs // outputs), -(-self.inputs // inputs))}
        stored = self.headers.get("weight_scale")
        shape = (self.outputs, 1) if stored is None else stored.shape
        if shape not in ((), (1,), (self.outputs,), (self.outputs, 1)):
            raise ModelError(
                f"{self.name}.weight_scale has shape {list(shape)}; one number, or one for each of the {self.outputs} "
                "outputs, is expected"
            )
        return {"weight": values, "weight_scale": self.scale("weight_scale", *shape)}

    def ignored(self) -> frozenset[str]:
        # Activations get one scale for each row, which is finer than the checkpoint's single one.
        return frozenset({"input_scale"})

    def read(self) -> Fp8Matrix:
        (end,) = (end for end in self.places if end != "weight")
        scales, block = self.finite(end).float(), self.inputs
        if self.scheme.block is None:
            scales = scales.reshape(-1, 1).expand(self.outputs, 1)
        else:
            scales = scales.repeat_interleave(self.scheme.block[0], 0)[: self.outputs]
            block = self.scheme.block[1]
        return Fp8Matrix(self.places["weight"], scales.contiguous(), block)
