"""The GPTQ format (arXiv 2210.17323) as AutoGPTQ and GPTQModel write it.

qweight   int32 [inputs * bits / 32, outputs], the first input in the lowest bits
qzeros    int32 [groups, outputs * bits / 32], packed in the same way along outputs; the first version stores them less
         one, with wrap-around
scales    [groups, outputs]
g_idx     int32 [inputs]: the group of each input; with desc_act inputs are grouped by importance
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.quant.formats.matrix import Matrix, grouped_order
from engine.quant.formats.stored import Stored, unpacked


class GptqMatrix(Stored):
    def empty_tensors(self) -> dict[str, Tensor]:
        bits, groups = self.scheme.bits, self.scheme.groups(self.inputs)
        each = 32 // bits
        if self.inputs % each or self.outputs % each:
            raise ModelError(f"{self.name} is [{self.outputs}, {self.inputs}]: GPTQ packs multiples of {each}")
        places = {
            "qweight": self.empty(self.inputs // each, self.outputs),
            "qzeros": self.empty(groups, self.outputs // each),
            "scales": self.scale("scales", groups, self.outputs),
        }
        # Early checkpoints leave it out if inputs are in order.
        if "g_idx" in self.headers or self.scheme.shuffled:
            places["g_idx"] = self.empty(self.inputs)
        return places

    def read(self) -> Matrix:
        bits, places = self.scheme.bits, self.places
        scales = self.finite("scales")
        zeros = unpacked(places["qzeros"], bits, 1)
        if self.scheme.one_less:
            zeros = (zeros + 1) & (2**bits - 1)
        q = unpacked(places["qweight"], bits, 0).T
        order = None
        if "g_idx" in places:
            order = grouped_order(f"{self.name}.g_idx", places["g_idx"], len(scales))
        if order is not None:
            q = q.index_select(1, order.to(q.device))
        return Matrix(bits, q.contiguous(), scales, beside_middle(zeros, bits), order)


def beside_middle(zeros: Tensor, bits: int) -> Tensor | None:
    """The zero points, or None if all of them are the middle, so that kernels need not read them."""
    return None if bool((zeros == torch.tensor(2 ** (bits - 1), device=zeros.device)).all()) else zeros.contiguous()
