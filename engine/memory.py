"""Sizes the KV cache: how much memory it takes by default, and how its groups share it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from engine.errors import EngineError, ModelError
from engine.kv import Capacity, KvGroup, KvSpace, window_blocks

GIB = 1 << 30
_CGROUP, _MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/meminfo")
#: The default cache on a CPU: this part of the free memory, but at most this many bytes, as other programs run there
#: too.
_CPU_PART, _CPU_MOST = 0.25, 4 * GIB
#: Error texts by which the driver, cuBLAS and torch's CPU allocator report a lack of memory.
_LACKING = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
#: mallopt's parameters: above how many free bytes some go back to the system, and from how many on a block is mapped by
#: itself, and goes back once it is freed. 32 MiB is the most that glibc takes.
_TRIM_THRESHOLD, _KEPT, _MMAP_THRESHOLD, _LARGEST = -1, 512 << 20, -3, 32 << 20
#: The length of a typical sequence, in windows. Groups with and without a window share the memory so that such
#: sequences use up both. Longer sequences first run out of blocks without a window, shorter ones of blocks with one.
_TYPICAL_WINDOWS = 4


def kv_spaces(
    requested: int | None, groups: Sequence[KvGroup], sizes: Sequence[int], capacity: Capacity, free: int
) -> tuple[KvSpace, ...]:
    """The blocks of each group. Together they fill the `requested` bytes or, if that is None, the `free` bytes.

    `sizes`: the bytes of a block of each group. `capacity`: the engine's, whose spaces are not known yet. A group never
    gets more blocks than its sequences can fill. Raises EngineError if a group would lack the blocks that a single
    sequence needs to begin.
    """
    budget = free if requested is None else requested
    minima, shares, maxima = _bounds(groups, capacity)
    whole = budget // sum(size * share for size, share in zip(sizes, shares, strict=True))
    counts = [max(low, min(whole * share, high)) for low, share, high in zip(minima, shares, maxima, strict=True)]
    remaining = budget - sum(count * size for count, size in zip(counts, sizes, strict=True))
    if remaining < 0:
        source = f"kv_cache_bytes={requested}" if requested is not None else f"the free memory ({budget} bytes)"
        needed = " and ".join(f"{count} of {size} bytes" for count, size in zip(minima, sizes, strict=True))
        tokens = f"({capacity.block_size} tokens)"
        raise EngineError(f"{source} does not hold the KV blocks of a single sequence: {needed} {tokens}")
    # The rest goes first to groups that grow with every token, and what those cannot use to the groups with a window.
    for i in sorted(range(len(groups)), key=lambda i: groups[i].window is not None):
        more = min(maxima[i] - counts[i], remaining // sizes[i])
        counts[i] += more
        remaining -= more * sizes[i]
    return tuple(KvSpace(count, group.window) for count, group in zip(counts, groups, strict=True))


def _bounds(groups: Sequence[KvGroup], capacity: Capacity) -> tuple[list[int], list[int], list[int]]:
    """For each group, the fewest blocks, its share of the memory in blocks, and the most blocks."""
    size, length, sequences = capacity.block_size, capacity.max_model_len, capacity.max_num_seqs

    def of_one(group: KvGroup, tokens: int) -> int:
        """The blocks that a sequence of `tokens` tokens holds between two steps."""
        blocks = -(-tokens // size)
        return blocks if group.window is None else min(blocks, window_blocks(group.window, size))

    windows = [group.window for group in groups if group.window is not None]
    typical = min(length, _TYPICAL_WINDOWS * max(windows, default=length))
    least = [1 if group.window is None else of_one(group, length) for group in groups]
    # In a group with a window a step's tokens need extra blocks: whole ones, and one begun by each sequence.
    on_top = -(-capacity.max_num_batched_tokens // size) + sequences
    maxima = [min(sequences * -(-length // size), sequences * of_one(group, length) + on_top) for group in groups]
    return least, [of_one(group, typical) for group in groups], maxima


def block_bytes(group: KvGroup, block_size: int, element_bytes: int) -> int:
    """The bytes of one block of a group, over all of its layers."""
    return group.layers * 2 * block_size * group.kv_heads * group.head_dim * element_bytes


def check_weights(folder: Path, needed: int, device: torch.device) -> None:
    """Raise ModelError if `device` has less free memory than the `needed` bytes of a model's weights."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _available_on_host()
    if needed > free:
        raise ModelError(
            f"{folder}: its weights take {needed / GIB:.1f} GiB, and {device.type} has {free / GIB:.1f} GiB free: end "
            "other programs, or make the weights smaller (`penstock quantize`)"
        )


def free_bytes(device: torch.device, usable: float, step: int, share: float = 1.0) -> int:
    """The bytes that the KV cache may take on `device`, after the model was loaded.

    On a GPU, this is the `usable` part of its memory, less what the weights and other processes have taken, less the
    `step` bytes of a step; the rest is a reserve. On a CPU, this is a bounded part of the free memory. `share`: this
    engine's part of all that, where several share the device.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        unused = int(total * usable) - (total - free)
        if share < 1:  # others may not have taken theirs yet
            unused = min(unused, int(total * usable * share) - torch.cuda.memory_reserved(device))
        return max(0, unused - step)
    return int(min(_available_on_host() * _CPU_PART, _CPU_MOST) * share)


def keep_freed() -> None:
    """Let the C library keep what is freed for the next step, up to 512 MiB, in place of giving it back to the system.

    Otherwise a step gets fresh pages for each of its tensors, which took a sixth of the time of an encoder's. Of the
    whole process, by glibc's mallopt(3); other libraries are left as they are.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_TRIM_THRESHOLD, _KEPT)
            mallopt(_MMAP_THRESHOLD, _LARGEST)


def release(error: BaseException) -> bool:
    """Whether `error` reports a lack of memory, which some libraries show only in the text. If so, this also returns
    torch's cached GPU memory to the device."""
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _LACKING)
    ):
        return False
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return True


def _available_on_host() -> int:
    """Free bytes: Linux's estimate of the memory available without swapping, within the container's limit."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        # Not Linux: half of the installed memory.
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        # The kernel drops cached file pages, such as those of the checkpoint itself, when memory is needed.
        cached = int(stat["active_file"]) + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return available  # no cgroup v2, or "max"
    return min(available, max(0, limit - used + cached))
