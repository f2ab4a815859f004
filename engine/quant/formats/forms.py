"""Which form a matrix of a checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from engine.errors import ModelError
from engine.quant.formats.awq import AwqMatrix
from engine.quant.formats.compressed import Int8Matrix, PackedMatrix
from engine.quant.formats.fp8 import Fp8Stored
from engine.quant.formats.gptq import GptqMatrix
from engine.quant.formats.scheme import Form, Scheme
from engine.quant.formats.stored import Stored
from engine.text.checkpoint import StoredTensor

_FORMS: Final[dict[Form, type[Stored]]] = {
    "gptq": GptqMatrix,
    "awq": AwqMatrix,
    "packed": PackedMatrix,
    "int8": Int8Matrix,
    "fp8": Fp8Stored,
}
#: Tensors by whose names a matrix is known to be quantised -> the forms whose they are.
_NAMES: Final[dict[str, tuple[Form, ...]]] = {"qweight": ("gptq", "awq"), "weight_packed": ("packed",)}
#: Forms whose tensor has the name that it has everywhere -> its dtype.
_DTYPES: Final[dict[Form, str]] = {"int8": "I8", "fp8": "F8_E4M3"}


def stored_as(
    scheme: Scheme,
    name: str,
    outputs: int,
    inputs: int,
    held: Mapping[str, StoredTensor],
    device: torch.device,
) -> Stored | None:
    """How the checkpoint has the matrix `name`, of which `held` are the tensors by the ends of their names; None where
    it is not quantised, or is not there at all.

    A checkpoint need not quantise all of its matrices, and there are several ways to say which: its tensors tell.
    Raises ModelError where they are of another form than `scheme`, or have a shape that it cannot have.
    """
    for end, forms in _NAMES.items():
        if end in held and scheme.form not in forms:
            raise ModelError(
                f"{name}.{end} is of another form than config.json's quantization_config says, {scheme.form}"
            )
    if scheme.form in _DTYPES:
        quantised = "weight" in held and held["weight"].dtype == _DTYPES[scheme.form]
    else:
        quantised = any(end in held for end, forms in _NAMES.items() if scheme.form in forms)
    return _FORMS[scheme.form](name, outputs, inputs, scheme, held, device) if quantised else None
