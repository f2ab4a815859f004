"""How much memory the KV cache takes when nobody says."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine.errors import EngineError, ModelError

GIB = 1 << 30
#: On a CPU the cache shares the machine with everything else.
_CPU_PART, _CPU_MOST = 0.25, 4 * GIB
#: On an accelerator it gets what the weights leave, less room for activations.
_CUDA_PART, _CUDA_SPARE = 0.9, 1 * GIB


def kv_blocks(
    asked_bytes: int | None, block_bytes: int, block_size: int, sequences: int, length: int, device: torch.device
) -> int:
    """Blocks in the pool: what `asked_bytes` holds, else a part of the free memory.

    Never more than `sequences` of `length` tokens could fill. Raises EngineError when not even one block fits.
    """
    budget = free_bytes(device) if asked_bytes is None else asked_bytes
    blocks = min(budget // block_bytes, sequences * -(-length // block_size))
    if blocks < 1:
        source = f"kv_cache_bytes={asked_bytes}" if asked_bytes is not None else f"the free memory ({budget} bytes)"
        raise EngineError(f"{source} does not hold one KV block of {block_bytes} bytes ({block_size} tokens)")
    return blocks


def check_weights(folder: Path, wanted: int, device: torch.device) -> None:
    """Raise ModelError where `device` has less memory than the `wanted` bytes of a model's weights."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _available_on_host()
    if wanted > free:
        raise ModelError(
            f"{folder}: its weights take {wanted / GIB:.1f} GiB, and {device.type} has {free / GIB:.1f} GiB free"
        )


def free_bytes(device: torch.device) -> int:
    """Bytes that the cache may take on `device`, after the model was loaded."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(0, int(free * _CUDA_PART) - _CUDA_SPARE)
    return min(int(_available_on_host() * _CPU_PART), _CPU_MOST)


def _available_on_host() -> int:
    """Linux's own estimate of what can be had without swapping, within the container's limit."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        # Not Linux: half of what is built in.
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available  # no cgroup v2, or "max"
    return min(available, max(0, limit - used))
