"""The operations that models are made of. Each kernel set implements them for a device; `select` picks the set.

choice: the table of what each set can do, and `select`
reference: every operation in plain torch, the test oracle of the other sets
gpu: CUDA, with the kernels in triton/; native/: CPUs, in C++; fallback: CPUs and CUDA without these, with torch
deterministic: CUDA, with rows that depend on nothing but themselves. On a CPU the native set is one
`prepare_linear` takes the weights, and may repack or quantise them (fp8, packed)
attention reads the paged KV cache as a ragged batch describes a step; a set also has a compute dtype
"""

from engine.kernels.choice import select
from engine.kernels.layer import (
    AdapterGroups,
    ExpertChanges,
    ExpertParts,
    LayerParts,
    LowRankChange,
    PreparedExperts,
    PreparedLayers,
    PreparedLinear,
)
from engine.kernels.ragged import RaggedBatch
from engine.kernels.reference import Reference

#: The interface: every set is a Reference.
Kernels = Reference

__all__ = [
    "AdapterGroups",
    "ExpertChanges",
    "ExpertParts",
    "Kernels",
    "LayerParts",
    "LowRankChange",
    "PreparedExperts",
    "PreparedLayers",
    "PreparedLinear",
    "RaggedBatch",
    "select",
]
