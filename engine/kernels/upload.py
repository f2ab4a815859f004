"""Copies host arrays to the device, all of a step's arrays in one transfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: The alignment of arrays in the shared buffer, which suits views of every dtype.
_ALIGN = 16


def upload(arrays: list[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to tensors of the same shapes and dtypes. It does not wait for the device.

    On the CPU the tensors share memory with the arrays.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    places = []
    total = 0
    for array in arrays:
        places.append(total)
        total += -(-array.nbytes // _ALIGN) * _ALIGN
    # Pinned, because a copy from pageable memory waits for the device's current work. torch's allocator reuses a
    # pinned buffer only after the copies from it have ended.
    staging = torch.empty(max(total, _ALIGN), dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = staging.numpy()
    for array, offset in zip(arrays, places, strict=True):
        host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = staging.to(device, non_blocking=True)
    return [
        there[offset : offset + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, offset in zip(arrays, places, strict=True)
    ]
