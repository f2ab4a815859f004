"""Whether a device still works: after some faults CUDA answers every call of a process with the same error."""

from __future__ import annotations

import torch

from engine.errors import DeviceLostError, brief


def check_alive(device: torch.device) -> None:
    """Wait for all that was queued. Raises DeviceLostError where nothing queued from now on will run: a kernel that
    read or wrote where it must not, or a fault of the GPU, ends CUDA for the whole process."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        # An error that is over is told once.
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLostError(
                f"{device} does nothing more for this process, which has to be started anew: {brief(error)}"
            ) from error
