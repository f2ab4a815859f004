"""A quantised matrix in its checkpoint's own tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.quant.formats.matrix import Quantised
from engine.quant.formats.scheme import Scheme
from engine.text.tensors import StoredTensor

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Stored(ABC):
    """A matrix in its stored format. The loader fills `places` with the checkpoint's tensors, then calls `read`
    once."""

    def __init__(
        self,
        name: str,
        outputs: int,
        inputs: int,
        scheme: Scheme,
        headers: Mapping[str, StoredTensor],
        device: torch.device,
    ) -> None:
        """`headers`: the header entries of the matrix's tensors, by their name suffixes. Raises ModelError for a shape
        that the scheme cannot have."""
        self.name, self.outputs, self.inputs, self.scheme = name, outputs, inputs, scheme
        self.headers, self.device = headers, device
        self.places: dict[str, Tensor] = self.empty_tensors()
        """The tensors by their name suffixes. The first is the matrix itself."""

    @abstractmethod
    def empty_tensors(self) -> dict[str, Tensor]:
        """Allocate the empty tensors that the scheme asks for."""

    @abstractmethod
    def read(self) -> Quantised:
        """Unpack the tensors. Raises ModelError naming a tensor with impossible content."""

    def to_host(self) -> None:
        """Allocate all tensors but the matrix on the host. Their contents decide as which product it is prepared."""
        for end in list(self.places)[1:]:
            self.places[end] = torch.empty_like(self.places[end], device="cpu")

    def ignored(self) -> frozenset[str]:
        """The name suffixes of tensors that have no effect."""
        return frozenset()

    def empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def scale(self, end: str, *shape: int) -> Tensor:
        """An empty tensor for scales, in the checkpoint's dtype, so that they keep all digits."""
        stored = self.headers.get(end)
        return self.empty(*shape, dtype=torch.float32 if stored is None else _FLOATS.get(stored.dtype, torch.float32))

    def finite(self, end: str) -> Tensor:
        """The scales with this suffix. Raises ModelError if some are not finite."""
        scales = self.places[end]
        if not bool(torch.isfinite(scales.float()).all()):
            raise ModelError(f"{self.name}.{end} has scales that are no finite numbers")
        return scales


def unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack the numbers of `bits` bits in int32 `packed`, lowest bits first, along `dim` of two. Returns uint8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    apart = packed.unsqueeze(dim + 1) >> shifts.view(-1, 1) if dim == 0 else packed.unsqueeze(2) >> shifts
    flat: Tensor = (apart & (2**bits - 1)).to(torch.uint8).flatten(dim, dim + 1)
    return flat
