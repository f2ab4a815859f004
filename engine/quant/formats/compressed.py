"""The compressed-tensors formats "pack-quantized" (4 and 8 bits) and "int-quantized" (8 bits).

weight_packed      int32 [outputs, inputs * bits / 32], the first number in the lowest bits, zero in the middle
weight_scale       [outputs, groups]
weight_zero_point  int32 [outputs * bits / 32, groups], packed along outputs; present if the scheme is not symmetric
weight_g_idx       int32 [inputs]: the group of each input; -1 everywhere means none
weight_shape       [2]: outputs and inputs

int-quantized has int8 `weight` [outputs, inputs] instead of weight_packed, and no zero points.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.quant.formats.gptq import beside_middle
from engine.quant.formats.matrix import Matrix, grouped_order
from engine.quant.formats.stored import Stored, unpacked


class PackedMatrix(Stored):
    def empty_tensors(self) -> dict[str, Tensor]:
        each, groups = 32 // self.scheme.bits, self.scheme.groups(self.inputs)
        shape = self.headers.get("weight_shape")
        places = {
            "weight_packed": self.empty(self.outputs, -(-self.inputs // each)),
            "weight_scale": self.scale("weight_scale", self.outputs, groups),
            "weight_shape": self.empty(2, dtype=torch.int32 if shape and shape.dtype == "I32" else torch.int64),
        }
        if self.scheme.zeros:
            places["weight_zero_point"] = self.empty(-(-self.outputs // each), groups)
        if "weight_g_idx" in self.headers or self.scheme.shuffled:
            places["weight_g_idx"] = self.empty(self.inputs)
        return places

    def read(self) -> Matrix:
        bits, places = self.scheme.bits, self.places
        shape = places["weight_shape"].tolist()
        if shape != [self.outputs, self.inputs]:
            raise ModelError(
                f"{self.name}.weight_shape is {shape}; config.json asks for [{self.outputs}, {self.inputs}]"
            )
        scales = self.finite("weight_scale").T.contiguous()
        q = unpacked(places["weight_packed"], bits, 1)[:, : self.inputs]
        zeros = None
        if self.scheme.zeros:
            zeros = beside_middle(unpacked(places["weight_zero_point"], bits, 0)[: self.outputs].T, bits)
        order, index = None, places.get("weight_g_idx")
        if index is not None and not bool((index == -1).all()):
            order = grouped_order(f"{self.name}.weight_g_idx", index, len(scales))
        if order is not None:
            q = q.index_select(1, order.to(q.device))
        return Matrix(bits, q.contiguous(), scales, zeros, order)


class Int8Matrix(Stored):
    def empty_tensors(self) -> dict[str, Tensor]:
        groups = self.scheme.groups(self.inputs)
        return {
            "weight": self.empty(self.outputs, self.inputs, dtype=torch.int8),
            "weight_scale": self.scale("weight_scale", self.outputs, groups),
        }

    def ignored(self) -> frozenset[str]:
        # Scales of activations. Activations are not quantised here, or with scales of their own.
        return frozenset({"input_scale", "input_zero_point"})

    def read(self) -> Matrix:
        scales = self.finite("weight_scale").T.contiguous()
        q = (self.places["weight"].to(torch.int16) + 128).to(torch.uint8)
        return Matrix(8, q, scales, None, None)
