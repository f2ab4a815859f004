"""The AWQ format (arXiv 2306.00978) as AutoAWQ's "gemm" writes it: inputs are in order, outputs interleaved.

qweight   int32 [inputs, outputs / 8]: 8 outputs in each word, in the order 0 2 4 6 1 3 5 7 from the lowest bits up
qzeros    int32 [groups, outputs / 8], in the same order
scales    [groups, outputs]
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.quant.formats.gptq import beside_middle
from engine.quant.formats.matrix import Matrix
from engine.quant.formats.stored import Stored, unpacked

#: The place of each of 8 outputs in its word.
_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqMatrix(Stored):
    def empty_tensors(self) -> dict[str, Tensor]:
        groups = self.scheme.groups(self.inputs)
        if self.outputs % 8:
            raise ModelError(f"{self.name} has {self.outputs} outputs: AWQ packs multiples of 8")
        return {
            "qweight": self.empty(self.inputs, self.outputs // 8),
            "qzeros": self.empty(groups, self.outputs // 8),
            "scales": self.scale("scales", groups, self.outputs),
        }

    def read(self) -> Matrix:
        zeros = _in_order(self.places["qzeros"])
        q = _in_order(self.places["qweight"]).T.contiguous()
        return Matrix(4, q, self.finite("scales"), beside_middle(zeros, 4), None)


def _in_order(packed: Tensor) -> Tensor:
    places = torch.tensor(_PLACES, device=packed.device)
    return unpacked(packed, 4, 1).view(len(packed), -1, 8).index_select(2, places).flatten(1)
