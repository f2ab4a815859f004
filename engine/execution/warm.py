"""Compiles a model's kernels ahead of time, also on a machine without a GPU.

   shape_of (registry) -> DeviceRunner on the device "meta" -> `rehearse` as at load, below `compiling_for`

It compiles the kernels that the rehearsed steps launch: prompts, decodes of every recorded size, all ways to choose
tokens. It reads no weights, except scales and the like of a quantised checkpoint. A kernel depends on the model's shape
and dtype, on the GPU's architecture, and on nothing else of a step than the rehearsal covers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.errors import EngineError, ErrorText
from engine.execution.device import rehearse
from engine.execution.device.rehearsal import CONTEXTS, PROMPTS
from engine.execution.placement import SEQUENCES, device_runner_of
from engine.execution.ranks.device import DeviceLead
from engine.kernels import Kernels
from engine.kernels.choice import narrow_and_deterministic
from engine.kernels.collectives import Communicators
from engine.kernels.fp8 import CAPABILITY
from engine.kv import KvSpace
from engine.models import Model, shape_of

if TYPE_CHECKING:
    from engine.kernels.triton.ahead import Build


@dataclass(frozen=True, slots=True)
class Warmed:
    """The result of a call of `warm`."""

    arch: str
    cache: Path
    dtype: str
    builds: list[Build]
    seconds: float
    verified: bool
    """Whether a second pass, as a new process would make it, found every kernel in the cache."""


def architecture_here() -> str:
    """The architecture of this machine's GPU. Raises EngineError if there is none."""
    if not torch.cuda.is_available():
        raise EngineError("there is no GPU here: name an architecture, such as --arch sm_90 (H100, H200)")
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def warm(
    folder: Path,
    arch: str,
    cache: Path,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    deterministic: bool = False,
    tensor_parallel: int = 1,
    max_num_seqs: int | None = None,
    block_size: int = 16,
) -> Warmed:
    """Compile into `cache` all kernels for serving the model in `folder` on a GPU of `arch`, or on `tensor_parallel` of
    them.

    Raises EngineError if Triton is missing, interprets kernels, or lacks a C compiler or Python's headers; ModelError
    about the folder.
    """
    try:
        from engine.kernels.deterministic import DeterministicFp8Gpu, DeterministicGpu
        from engine.kernels.gpu import Fp8Gpu, Gpu, interpreted
        from engine.kernels.triton.ahead import compiling_for, target_of
    except ModuleNotFoundError as error:
        raise EngineError(f"{error.name} is not installed; it comes with: pip install 'penstock[gpu]'") from error
    if interpreted():
        raise EngineError("TRITON_INTERPRET is set: kernels are interpreted then, not compiled; unset it")
    if kv_cache_dtype != "auto" and deterministic:
        raise narrow_and_deterministic(kv_cache_dtype)
    least = 10 * CAPABILITY[0] + CAPABILITY[1]
    if "fp8" in (quantization, kv_cache_dtype) and target_of(arch).arch < least:
        raise EngineError(
            ErrorText.of(
                "{} has no 8-bit floats: {quantization}='fp8' and {kv_cache_dtype}='fp8' need sm_{}", arch, least
            )
        )
    began, slots = time.perf_counter(), max_num_seqs or SEQUENCES["cuda"]
    sets: tuple[type[Gpu], type[Gpu]] = (DeterministicGpu, DeterministicFp8Gpu) if deterministic else (Gpu, Fp8Gpu)
    chosen = sets[quantization == "fp8"]
    kernels = chosen if deterministic else partial(chosen, kv_cache_dtype=kv_cache_dtype)
    with compiling_for(arch, cache) as builds:
        model = _shape_of(folder, dtype, kernels, quantization, tensor_parallel, deterministic=deterministic)
        _launch_all(model, slots, block_size)
    seconds = time.perf_counter() - began
    # Triton remembers what it compiled for this target object. For a new target object it asks the cache.
    with compiling_for(arch, cache) as again:
        _launch_all(model, slots, block_size)
    verified = all(build.cached for build in again) and {build.key for build in again} == {
        build.key for build in builds
    }
    return Warmed(arch, cache.resolve(), str(model.dtype).removeprefix("torch."), builds, seconds, verified)


def _shape_of(
    folder: Path,
    dtype: str,
    kernels: Callable[[torch.dtype], Kernels],
    quantization: str,
    ranks: int,
    *,
    deterministic: bool,
) -> Model:
    """The model without weights; of several ranks, the lead's share, which launches what the others do and samples."""
    if ranks == 1:
        return shape_of(folder, dtype, kernels, quantization)
    # All shares have these shapes, but where a width is no multiple of the ranks.
    communicators = Communicators(0, ranks, 1, "nccl", ordered=deterministic)
    return DeviceLead(shape_of(folder, dtype, kernels, quantization, communicators.sums), None, communicators)


def _launch_all(model: Model, slots: int, block_size: int) -> None:
    length = min(model.context_length, CONTEXTS[-1] + 1)
    blocks = -(-length // block_size)
    runner = device_runner_of(model)(
        model,
        spaces=[KvSpace(blocks, group.window) for group in model.kv_groups],
        block_size=block_size,
        max_num_seqs=slots,
        max_num_batched_tokens=max(slots, *PROMPTS),
        max_model_len=model.context_length,
    )
    rehearse(runner, length)


def default_cache() -> Path:
    """Triton's default cache folder."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
