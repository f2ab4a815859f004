"""Detects a lost device: after some faults CUDA answers every call of a process with the same error."""

from __future__ import annotations

import torch

from engine.errors import DeviceLostError, brief


def check_alive(device: torch.device) -> None:
    """Wait for all queued work. Raises DeviceLostError if the device will run nothing more for this process.

    An illegal memory access by a kernel, or a fault of the GPU, ends CUDA for the whole process.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        # A transient error is reported only once.
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLostError(
                f"{device} does nothing more for this process, which has to be started anew: {brief(error)}"
            ) from error
