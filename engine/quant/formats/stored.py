"""A matrix of a quantised checkpoint, in the tensors that the checkpoint has for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.quant.formats.matrix import Quantised
from engine.quant.formats.scheme import Scheme
from engine.text.checkpoint import StoredTensor

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Stored(ABC):
    """`places` is filled with the checkpoint's tensors; `read` is then called once."""

    def __init__(
        self,
        name: str,
        outputs: int,
        inputs: int,
        scheme: Scheme,
        held: Mapping[str, StoredTensor],
        device: torch.device,
    ) -> None:
        """`held`: what the checkpoint's headers say of the tensors of the matrix `name`, by the ends of their names.
        Raises ModelError for a shape that the scheme cannot have."""
        self.name, self.outputs, self.inputs, self.scheme = name, outputs, inputs, scheme
        self.held, self.device = held, device
        self.places: dict[str, Tensor] = self.wanted()
        """By the ends of the tensors' names; the matrix itself is the first."""

    @abstractmethod
    def wanted(self) -> dict[str, Tensor]:
        """The tensors, empty, as the scheme has them."""

    @abstractmethod
    def read(self) -> Quantised:
        """Raises ModelError naming the tensor whose content cannot be."""

    def to_host(self) -> None:
        """Give all tensors but the matrix memory on the host: what they say decides which product it is prepared as."""
        for end in list(self.places)[1:]:
            self.places[end] = torch.empty_like(self.places[end], device="cpu")

    def ignored(self) -> frozenset[str]:
        """Ends of names of tensors that are there and change nothing."""
        return frozenset()

    def empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def scale(self, end: str, *shape: int) -> Tensor:
        """As the checkpoint has them: a scale's digits are not to be lost."""
        stored = self.held.get(end)
        return self.empty(*shape, dtype=torch.float32 if stored is None else _FLOATS.get(stored.dtype, torch.float32))

    def finite(self, end: str) -> Tensor:
        """The scales of that name. Raises ModelError where they are none."""
        scales = self.places[end]
        if not bool(torch.isfinite(scales.float()).all()):
            raise ModelError(f"{self.name}.{end} has scales that are no finite numbers")
        return scales


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """uint8, the numbers of `bits` bits in int32 `words`, the lowest first, along `dim` of two."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    apart = words.unsqueeze(dim + 1) >> shifts.view(-1, 1) if dim == 0 else words.unsqueeze(2) >> shifts
    flat: Tensor = (apart & (2**bits - 1)).to(torch.uint8).flatten(dim, dim + 1)
    return flat
