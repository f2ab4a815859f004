"""How much memory the KV cache takes when nobody says, and how its groups share it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.errors import EngineError, ModelError
from engine.kv import KvGroup, KvSpace, window_blocks

GIB = 1 << 30
_CGROUP, _MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/meminfo")
#: On a CPU the cache shares the machine with everything else.
_CPU_PART, _CPU_MOST = 0.25, 4 * GIB
#: The driver, cuBLAS, torch's allocator for the CPU.
_LACKING = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
#: How long a typical sequence is, in windows: groups with a window and without share the memory so that such sequences
#: use up both. Longer ones run out of blocks without a window first, shorter ones of those with one.
_TYPICAL_WINDOWS = 4


def kv_spaces(
    asked_bytes: int | None,
    groups: Sequence[KvGroup],
    element_bytes: int,
    *,
    block_size: int,
    sequences: int,
    length: int,
    step_tokens: int,
    free: int,
    beside: Sequence[int] | None = None,
) -> tuple[KvSpace, ...]:
    """Blocks of each group: together what `asked_bytes` holds, or, where that is None, the `free` bytes.

    `beside`: of each group, bytes that each of its blocks takes in a draft model's cache, too.
    Never more than `sequences` of `length` tokens could fill, of which `step_tokens` are computed in one step. Raises
    EngineError when a group would not have the blocks that a single sequence takes to begin.
    """
    budget = free if asked_bytes is None else asked_bytes

    def of_one(group: KvGroup, tokens: int) -> int:
        """Blocks of a sequence of so many tokens between two steps."""
        blocks = -(-tokens // block_size)
        return blocks if group.window is None else min(blocks, window_blocks(group.window, block_size))

    windows = [group.window for group in groups if group.window is not None]
    typical = min(length, _TYPICAL_WINDOWS * max(windows, default=length))
    drafts = beside or [0] * len(groups)
    sizes = [block_bytes(group, block_size, element_bytes) + one for group, one in zip(groups, drafts, strict=True)]
    shares = [of_one(group, typical) for group in groups]
    least = [1 if group.window is None else of_one(group, length) for group in groups]
    # Behind a window a step's tokens come on top: at most so many whole blocks, and one begun by each sequence.
    on_top = -(-step_tokens // block_size) + sequences
    most = [min(sequences * -(-length // block_size), sequences * of_one(group, length) + on_top) for group in groups]
    whole = budget // sum(size * share for size, share in zip(sizes, shares, strict=True))
    counts = [max(low, min(whole * share, high)) for low, share, high in zip(least, shares, most, strict=True)]
    left = budget - sum(count * size for count, size in zip(counts, sizes, strict=True))
    if left < 0:
        source = f"kv_cache_bytes={asked_bytes}" if asked_bytes is not None else f"the free memory ({budget} bytes)"
        needed = " and ".join(f"{count} of {size} bytes" for count, size in zip(least, sizes, strict=True))
        raise EngineError(f"{source} does not hold the KV blocks of a single sequence: {needed} ({block_size} tokens)")
    # What is left goes to those that grow with every token, and what they cannot use to the others.
    for i in sorted(range(len(groups)), key=lambda i: groups[i].window is not None):
        more = min(most[i] - counts[i], left // sizes[i])
        counts[i] += more
        left -= more * sizes[i]
    return tuple(KvSpace(count, group.window) for count, group in zip(counts, groups, strict=True))


def block_bytes(group: KvGroup, block_size: int, element_bytes: int) -> int:
    """Memory that one block of a group takes, over all of its layers."""
    return group.layers * 2 * block_size * group.kv_heads * group.head_dim * element_bytes


def check_weights(folder: Path, wanted: int, device: torch.device) -> None:
    """Raise ModelError where `device` has less memory than the `wanted` bytes of a model's weights."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _available_on_host()
    if wanted > free:
        raise ModelError(
            f"{folder}: its weights take {wanted / GIB:.1f} GiB, and {device.type} has {free / GIB:.1f} GiB free"
        )


def free_bytes(device: torch.device, share: float, step: int) -> int:
    """Bytes that the cache may take on `device`, after the model was loaded.

    On a GPU: of `share` of its memory, what neither the weights nor others have taken, less the `step` bytes that a
    step takes besides; the rest is for what nobody foresees. On a CPU a bounded part of what is free.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * share) - (total - free) - step)
    return min(int(_available_on_host() * _CPU_PART), _CPU_MOST)


def release(error: BaseException) -> bool:
    """Whether `error` says that memory is lacking, which some libraries tell by their text alone. If so, what torch
    keeps on GPUs for later is given back."""
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _LACKING)
    ):
        return False
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return True


def _available_on_host() -> int:
    """Linux's own estimate of what can be had without swapping, within the container's limit."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        # Not Linux: half of what is built in.
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        # Cached pages of files, such as those of the checkpoint itself, go when memory is wanted.
        cached = int(stat["active_file"]) + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return available  # no cgroup v2, or "max"
    return min(available, max(0, limit - used + cached))
