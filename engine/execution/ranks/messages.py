"""A message of the lead: what to do, numbers and arrays, as bytes that a follower reads in place."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: The types of arrays. A message holds their indexes.
_TYPES = tuple(np.dtype(name) for name in ("int64", "int32", "float32", "bool"))
_CODES = {kind: i for i, kind in enumerate(_TYPES)}


def packed(kind: int, numbers: Sequence[int], arrays: Sequence[NDArray[Any]]) -> bytes:
    """`arrays`: of at most two dimensions."""
    head, parts = [kind, len(numbers), len(arrays), *numbers], [b""]
    for array in arrays:
        head += (_CODES[array.dtype], array.ndim, len(array), array.shape[1] if array.ndim == 2 else 1)
        parts.append(array.tobytes())
        if array.nbytes % 8:
            parts.append(bytes(-array.nbytes % 8))
    parts[0] = struct.pack(f"={len(head)}q", *head)
    return b"".join(parts)


def unpacked(message: memoryview) -> tuple[int, list[int], list[NDArray[Any]]]:
    """The kind, the numbers and the arrays of a message. The arrays are views of it."""
    kind, numbers, count = struct.unpack_from("=3q", message)
    head = struct.unpack_from(f"={numbers + 4 * count}q", message, 24)
    at, arrays = 24 + 8 * len(head), []
    for i in range(numbers, len(head), 4):
        code, dimensions, rows, columns = head[i : i + 4]
        dtype, shape = _TYPES[code], (rows, columns)[:dimensions]
        # numpy makes no empty view of the end of a buffer.
        array = np.frombuffer(message, dtype, rows * columns, at) if rows * columns else np.empty(0, dtype)
        arrays.append(array.reshape(shape))
        at += array.nbytes + -array.nbytes % 8
    return kind, list(head[:numbers]), arrays
