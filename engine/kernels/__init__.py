"""The operations that models are made of. Each kernel set implements them for a device; `select` picks the set.

reference: every operation in plain torch, the test oracle of the other sets
gpu: CUDA, with the kernels in triton/; native/: CPUs, in C++; fallback/: CPUs and CUDA without these, with torch
deterministic/: sets in which a row's result depends on nothing but the row; compressed_kv: sets with an 8-bit KV cache
`prepare_linear` takes the weights, and may repack or quantise them (fp8, packed)
attention reads the paged KV cache as ragged or groups describe a step; a set also has a compute dtype
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from engine.errors import EngineError
from engine.kernels.compressed_kv import COMPRESSED
from engine.kernels.deterministic import DeterministicCpu
from engine.kernels.fallback.cpu import Cpu, computes_natively
from engine.kernels.fallback.sdpa import Sdpa
from engine.kernels.fp8 import CAPABILITY
from engine.kernels.groups import AttentionBatch, AttentionGroup, visibility
from engine.kernels.layer import LayerParts, PreparedLayers, PreparedLinear
from engine.kernels.native import Native, load_library
from engine.kernels.ragged import Attended, RaggedBatch
from engine.kernels.reference import Ragged, Reference

if TYPE_CHECKING:
    from engine.kernels.gpu import Gpu

#: The interface: every set is a Reference.
Kernels = Reference

__all__ = [
    "Attended",
    "AttentionBatch",
    "AttentionGroup",
    "Kernels",
    "LayerParts",
    "PreparedLayers",
    "PreparedLinear",
    "RaggedBatch",
    "select",
    "visibility",
]


#: The sets by their names in EngineConfig.
_SETS: dict[str, type[Kernels]] = {one.name: one for one in (Reference, Ragged, Sdpa, Cpu)}


def select(
    device: torch.device,
    dtype: torch.dtype,
    name: str = "auto",
    quantization: str = "none",
    deterministic: bool = False,
    kv_cache_dtype: str = "auto",
) -> Kernels:
    """Pick the kernel set for weights of `dtype` on `device`: the named one, or the device's default.

    If a CPU only emulates `dtype`, weights are rounded to it, but held and computed in fp32. That was measured 5 to 8
    times as fast at 8 rows and more, for twice the memory. Raises EngineError if no set has this combination of
    `device`, `dtype`, `name`, `quantization` ("none" or "fp8"), `deterministic` and `kv_cache_dtype` ("auto", "int8" or
    "fp8").
    """
    if kv_cache_dtype != "auto":
        return _compressed(device, dtype, name, quantization, kv_cache_dtype, deterministic)
    if deterministic:
        return _deterministic(device, dtype, select(device, dtype, name, quantization))
    if quantization == "fp8":
        return _fp8(device, dtype, name)
    if name == "auto" and device.type == "cpu":
        name = "cpu" if load_library() is None else "native"
    elif name == "auto":
        name = "triton" if _has_triton() else "sdpa"
    if name in ("cpu", "native") and device.type != "cpu":
        raise EngineError(f"kernels={name!r} are for CPUs, and the device is {device.type}; use 'auto'")
    if name == "native":
        return _native(dtype)
    if name == "triton":
        return _triton(device)(dtype)
    native = device.type != "cpu" or computes_natively(dtype)
    return _SETS[name](dtype if native else torch.float32)


def _compressed(
    device: torch.device, dtype: torch.dtype, name: str, quantization: str, kind: str, deterministic: bool
) -> Kernels:
    if device.type == "cuda" or name == "triton":
        return _compressed_gpu(device, dtype, name, quantization, kind, deterministic)
    if quantization == "fp8":
        return _fp8(device, dtype, name)
    if device.type != "cpu" or name not in ("auto", "native", "cpu"):
        raise EngineError(
            f"kv_cache_dtype={kind!r} goes with kernels='native' or 'cpu' on a CPU and kernels='triton' on a CUDA "
            f"device, and not with {name!r} on {device.type}; use kv_cache_dtype='auto'"
        )
    if name == "native" or (name == "auto" and load_library() is not None):
        return _native(dtype, deterministic=deterministic, kv_cache_dtype=kind)
    return COMPRESSED[kind, deterministic](dtype if computes_natively(dtype) else torch.float32)


def _compressed_gpu(
    device: torch.device, dtype: torch.dtype, name: str, quantization: str, kind: str, deterministic: bool
) -> Kernels:
    if deterministic:
        raise EngineError(f"kv_cache_dtype={kind!r} with deterministic=True is for CPUs; use one of the two")
    if name not in ("auto", "triton"):
        raise EngineError(
            f"kv_cache_dtype={kind!r} on {device.type} goes with kernels='triton', not with {name!r}; use 'auto'"
        )
    chosen = _triton(device)
    if kind == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise EngineError(
            f"kv_cache_dtype='fp8' needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more (Ada, "
            "Hopper); use 'int8'"
        )
    if quantization == "fp8":
        chosen = type(_fp8(device, dtype, name))
    return chosen(dtype, kv_cache_dtype=kind)


def _deterministic(device: torch.device, dtype: torch.dtype, ordinary: Kernels) -> Kernels:
    """The deterministic counterpart of a set. Native kernels are their own, because their rows never depend on
    others."""
    if isinstance(ordinary, Native):
        return _native(dtype, deterministic=True)
    if ordinary.name == "cpu":
        return DeterministicCpu(ordinary.compute_dtype)
    if ordinary.name in ("triton", "triton-fp8"):
        from engine.kernels.deterministic.gpu import DeterministicFp8Gpu, DeterministicGpu

        return (DeterministicGpu if ordinary.name == "triton" else DeterministicFp8Gpu)(dtype)
    raise EngineError(
        f"deterministic=True goes with kernels='native' or 'cpu' on a CPU and kernels='triton' on a CUDA device, and "
        f"on {device.type} they are {ordinary.name!r}"
    )


def _native(dtype: torch.dtype, *, deterministic: bool = False, kv_cache_dtype: str = "auto") -> Kernels:
    built = load_library()
    if built is None:
        raise EngineError(
            "kernels='native' are not built for this CPU: install penstock where a C++ compiler is, or use 'auto'"
        )
    return Native(dtype, built, deterministic=deterministic, kv_cache_dtype=kv_cache_dtype)


def _has_triton() -> bool:
    return find_spec("triton") is not None


def _triton(device: torch.device) -> type[Gpu]:
    if not _has_triton():
        raise EngineError("kernels='triton' need triton, which is not installed: pip install 'penstock[gpu]'")
    from engine.kernels.gpu import Gpu, interpreted

    if device.type == "cpu" and not interpreted():
        raise EngineError("kernels='triton' are for CUDA devices, and the device is cpu; use 'auto'")
    return Gpu


def _fp8(device: torch.device, dtype: torch.dtype, name: str) -> Gpu:
    if device.type != "cuda":
        raise EngineError(f"quantization='fp8' needs a CUDA device, and the device is {device.type}; use 'none'")
    found, least = torch.cuda.get_device_capability(device), CAPABILITY
    if found < least:
        raise EngineError(
            f"quantization='fp8' needs a GPU of compute capability {least[0]}.{least[1]} or more (Ada, Hopper), and "
            f"this one has {found[0]}.{found[1]}; use 'none'"
        )
    if dtype != torch.bfloat16:
        raise EngineError(
            f"quantization='fp8' computes in bfloat16, and dtype is {str(dtype).removeprefix('torch.')}; "
            f"use dtype='bfloat16'"
        )
    if name not in ("auto", "triton"):
        raise EngineError(f"quantization='fp8' goes with kernels='triton', not with {name!r}; use 'auto'")
    _triton(device)
    from engine.kernels.gpu import Fp8Gpu

    return Fp8Gpu(dtype)
