"""The operations that models are made of, one set a device, chosen in one place: `select`.

reference.py is every operation in plain torch and the oracle of the others; sdpa.py replaces attention by padded
batches (CUDA runs on it); cpu.py replaces what oneDNN and reused memory make faster. A set also says in which
dtype it computes. Weights come in through `prepare_linear`, which may repack them; attention reads the paged
cache through the groups of sequences that groups.py describes.
"""

from __future__ import annotations

import torch

from engine.kernels.cpu import Cpu, computes_natively
from engine.kernels.groups import AttentionBatch, AttentionGroup, visibility
from engine.kernels.ragged import Attended, RaggedBatch
from engine.kernels.reference import PreparedLinear, Reference
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


def select(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The set for weights of `dtype` on `device`.

    Where a CPU only emulates `dtype`, weights are still rounded to it, but held and computed in fp32: measured
    5 to 8 times as fast at 8 rows and more, for twice the memory.
    """
    if device.type == "cpu":
        return Cpu(dtype if computes_natively(dtype) else torch.float32)
    return Sdpa(dtype)
