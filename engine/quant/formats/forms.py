"""Detects the format of a checkpoint's matrix."""

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
from engine.text.tensors import StoredTensor

_FORMS: Final[dict[Form, type[Stored]]] = {
    "gptq": GptqMatrix,
    "awq": AwqMatrix,
    "packed": PackedMatrix,
    "int8": Int8Matrix,
    "fp8": Fp8Stored,
}
#: Maps the tensor names that only quantised matrices have to the formats that use them.
_NAMES: Final[dict[str, tuple[Form, ...]]] = {"qweight": ("gptq", "awq"), "weight_packed": ("packed",)}
#: Maps formats whose tensor has the usual name "weight" to its dtype.
_DTYPES: Final[dict[Form, str]] = {"int8": "I8", "fp8": "F8_E4M3"}


def stored_as(
    scheme: Scheme,
    name: str,
    outputs: int,
    inputs: int,
    headers: Mapping[str, StoredTensor],
    device: torch.device,
) -> Stored | None:
    """The stored form of the matrix `name`. None if it is not quantised or is absent.

    `headers`: the matrix's tensors by their name suffixes. They decide, because a checkpoint need not quantise all
    of its matrices and has several ways to say which. Raises ModelError if they have another format than `scheme`, or a
    shape that it cannot have.
    """
    for end, forms in _NAMES.items():
        if end in headers and scheme.form not in forms:
            raise ModelError(
                f"{name}.{end} is of another form than config.json's quantization_config says, {scheme.form}"
            )
    if scheme.form in _DTYPES:
        quantised = "weight" in headers and headers["weight"].dtype == _DTYPES[scheme.form]
    else:
        quantised = any(end in headers for end, forms in _NAMES.items() if scheme.form in forms)
    return _FORMS[scheme.form](name, outputs, inputs, scheme, headers, device) if quantised else None
