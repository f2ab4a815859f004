"""A message of the lead: what to do, numbers and arrays, as bytes that a follower reads in place."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: The types of arrays. A message holds their indexes.
_TYPES = tuple(np.dtype(name) for name in ("int64", "int32", "float32", "bool"))
_CODES = {kind: i for i, kind in enumerate(_TYPES)}


def packed(kind: int, numbers: Sequence[int], tensors: Sequence[Tensor]) -> bytes:
    """`tensors`: on the CPU, of at most two dimensions."""
    arrays: list[NDArray[Any]] = [tensor.numpy() for tensor in tensors]
    head = [kind, len(numbers), len(arrays), *numbers]
    for array in arrays:
        head += (_CODES[array.dtype], array.ndim, len(array), array.shape[1] if array.ndim == 2 else 1)
    parts = [struct.pack(f"={len(head)}q", *head)]
    for array in arrays:
        parts.append(array.tobytes())
        if array.nbytes % 8:
            parts.append(bytes(-array.nbytes % 8))
    return b"".join(parts)


def unpacked(message: memoryview) -> tuple[int, list[int], list[Tensor]]:
    """The kind, the numbers and the arrays of a message. The arrays are views of it."""
    kind, numbers, arrays = struct.unpack_from("=3q", message)
    head = struct.unpack_from(f"={numbers + 4 * arrays}q", message, 24)
    at, tensors = 24 + 8 * len(head), []
    for i in range(numbers, len(head), 4):
        code, dimensions, rows, columns = head[i : i + 4]
        dtype, shape = _TYPES[code], (rows, columns)[:dimensions]
        array = np.frombuffer(message, dtype, rows * columns, at) if rows * columns else np.empty(shape, dtype)
        tensors.append(torch.from_numpy(array.reshape(shape)))
        at += array.nbytes + -array.nbytes % 8
    return kind, list(head[:numbers]), tensors
