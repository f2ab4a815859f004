"""The operations that models are made of, one set a device, chosen in one place: `select`.

reference.py is every operation in plain torch and the oracle of the others; sdpa.py replaces attention by padded
batches (CUDA runs on it); cpu.py replaces what oneDNN and reused memory make faster. A set also says in which
dtype it computes. Weights come in through `prepare_linear`, which may repack them; attention reads the paged
cache through the groups of sequences that groups.py describes.
"""

from __future__ import annotations

import torch

from engine.errors import EngineError
from engine.kernels.cpu import Cpu, computes_natively
from engine.kernels.groups import AttentionBatch, AttentionGroup, visibility
from engine.kernels.ragged import Attended, RaggedBatch
from engine.kernels.reference import PreparedLinear, Ragged, Reference
from engine.kernels.sdpa import Sdpa

#: The interface: every set is a Reference.
Kernels = Reference

__all__ = [
    "Attended",
    "AttentionBatch",
    "AttentionGroup",
    "Kernels",
    "PreparedLinear",
    "RaggedBatch",
    "select",
    "visibility",
]


#: By the names that EngineConfig has for them.
_SETS: dict[str, type[Kernels]] = {one.name: one for one in (Reference, Ragged, Sdpa, Cpu)}


def select(device: torch.device, dtype: torch.dtype, name: str = "auto") -> Kernels:
    """The set for weights of `dtype` on `device`, the one that is asked for by name or the device's own.

    Where a CPU only emulates `dtype`, weights are still rounded to it, but held and computed in fp32: measured
    5 to 8 times as fast at 8 rows and more, for twice the memory. Raises EngineError where the set is not for `device`.
    """
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "sdpa"
    if name == "cpu" and device.type != "cpu":
        raise EngineError(f"kernels='cpu' are for CPUs, and the device is {device.type}; use 'auto'")
    native = device.type != "cpu" or computes_natively(dtype)
    return _SETS[name](dtype if native else torch.float32)
