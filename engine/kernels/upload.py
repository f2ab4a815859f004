"""Host arrays to the device, all of a step's in one transfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Offset granularity in the shared buffer; views of every dtype start where they may.
_ALIGN = 16


def upload(arrays: list[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors of their own shapes and dtypes. Does not wait for the device.

    On the CPU the tensors share memory with the arrays.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    places = []
    total = 0
    for array in arrays:
        places.append(total)
        total += -(-array.nbytes // _ALIGN) * _ALIGN
    # Pinned, since a copy from pageable memory waits for what the device is doing. torch's allocator of pinned
    # memory hands a buffer out again only when the copies that read it have ended.
    staging = torch.empty(max(total, _ALIGN), dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = staging.numpy()
    for array, place in zip(arrays, places, strict=True):
        host[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = staging.to(device, non_blocking=True)
    return [
        there[place : place + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, place in zip(arrays, places, strict=True)
    ]
