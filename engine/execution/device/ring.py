"""A ring of pinned host buffers for copies to the device. No buffer is reused before its copy has ended."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Begins a copy of a host tensor (second) into a device tensor (first). Returns a function that waits for its end.
Copy = Callable[[Tensor, Tensor], Callable[[], None]]

#: At most two steps are in flight at one time. The third buffer is the one that is being filled.
_DEPTH = 3


def copy_to(device: torch.device) -> Copy:
    """The function that begins copies to `device`."""
    return _begin_copy if device.type == "cuda" else _copy_at_once


def _begin_copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    target.copy_(source, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _copy_at_once(target: Tensor, source: Tensor) -> Callable[[], None]:
    target.copy_(source)
    return lambda: None


class PinnedRing:
    """A ring of host buffers, used by one thread: `lend` a buffer, fill it, `send` it."""

    def __init__(self, device: torch.device, copy: Copy | None = None, depth: int = _DEPTH) -> None:
        """`copy`: `copy_to(device)`, unless a test passes its own."""
        self._copy = copy_to(device) if copy is None else copy
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(depth)]
        self._waits: list[Callable[[], None] | None] = [None] * depth
        self._index = 0

    def lend(self, size: int) -> NDArray[np.int32]:
        """A buffer to fill, int32 [size]. Waits if the buffer's last copy has not ended."""
        self._index = (self._index + 1) % len(self._buffers)
        wait = self._waits[self._index]
        if wait is not None:
            wait()
            self._waits[self._index] = None
        if len(self._buffers[self._index]) < size:
            # Larger than asked, because sizes differ from step to step and pinning takes milliseconds.
            self._buffers[self._index] = torch.empty(2 * size, dtype=torch.int32, pin_memory=self._pinned)
        lent: NDArray[np.int32] = self._buffers[self._index][:size].numpy()
        return lent

    def send(self, size: int, target: Tensor) -> None:
        """Begin to copy the first `size` numbers of the buffer lent last to the beginning of `target`, int32."""
        self._waits[self._index] = self._copy(target[:size], self._buffers[self._index][:size])
