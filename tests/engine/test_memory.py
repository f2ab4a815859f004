from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import memory
from engine.errors import EngineError, ModelError
from engine.kv import Capacity, KvGroup, KvSpace
from engine.memory import GIB, block_bytes, check_weights, free_bytes, keep_freed, kv_spaces

CPU = torch.device("cpu")
#: A block of 16 tokens takes 16 KiB.
FULL = KvGroup(layers=1, kv_heads=4, head_dim=32)
BLOCK = 16 * 1024


def spaces(asked: int | None, *groups: KvGroup, **changes: Any) -> tuple[KvSpace, ...]:
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 4096} | changes
    free = 0 if asked is not None else free_bytes(CPU, 0.85, 0)
    return kv_spaces(asked, groups, [block_bytes(one, 16, 4) for one in groups], Capacity((), 16, **settings), free)


def windowed(layers: int, window: int) -> KvGroup:
    return KvGroup(layers, FULL.kv_heads, FULL.head_dim, window)


def test_asked_bytes_are_filled_with_whole_blocks() -> None:
    assert block_bytes(FULL, 16, 4) == BLOCK
    assert spaces(33 * BLOCK + 500, FULL) == (KvSpace(33),)


def test_never_more_than_all_sequences_could_fill() -> None:
    assert spaces(1 << 40, FULL, max_num_seqs=4, max_model_len=100) == (KvSpace(4 * 7),)
    # Beyond the windows of all, a step's tokens in blocks, and one block that each sequence begins.
    full, local = spaces(1 << 40, FULL, windowed(5, 100), max_num_seqs=4)
    assert (full, local) == (KvSpace(4 * 256), KvSpace(4 * 8 + 512 // 16 + 4, 100))


def test_less_than_one_block_is_refused() -> None:
    with pytest.raises(EngineError, match=f"kv_cache_bytes=16383 does not hold .*: 1 of {BLOCK} bytes"):
        spaces(BLOCK - 1, FULL)


def test_less_than_a_window_is_refused() -> None:
    needed = 1 + 8 * 2
    assert spaces(needed * BLOCK, FULL, windowed(2, 100)) == (KvSpace(1), KvSpace(8, 100))
    with pytest.raises(EngineError, match=f"1 of {BLOCK} bytes and 8 of {2 * BLOCK} bytes"):
        spaces(needed * BLOCK - 1, FULL, windowed(2, 100))


def test_groups_share_so_that_typical_sequences_use_up_both() -> None:
    budget = 4000 * BLOCK
    full, local = spaces(budget, FULL, windowed(5, 256), max_model_len=1 << 17)
    # A sequence of four windows takes 64 blocks of the one group and 17 of the other.
    assert full.num_blocks / 64 == pytest.approx(local.num_blocks / 17, rel=0.1)
    used = full.num_blocks * BLOCK + local.num_blocks * 5 * BLOCK
    assert budget - 5 * BLOCK < used <= budget


def test_what_one_group_cannot_use_the_other_gets() -> None:
    full, local = spaces(4000 * BLOCK, FULL, windowed(5, 256), max_num_seqs=2, max_model_len=1 << 17)
    assert local == KvSpace(2 * 17 + 512 // 16 + 2, 256)
    assert full.num_blocks == 4000 - 5 * local.num_blocks


def test_windows_alone_take_it_all() -> None:
    assert spaces(300 * BLOCK, windowed(1, 256)) == (KvSpace(300, 256),)


def test_unasked_a_bounded_part_of_the_free_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_on_host", lambda: 8 * GIB)
    assert free_bytes(CPU, 0.85, 0) == 2 * GIB
    assert spaces(None, FULL, max_model_len=1 << 20) == (KvSpace(2 * GIB // BLOCK),)
    monkeypatch.setattr(memory, "_available_on_host", lambda: 1000 * GIB)
    assert free_bytes(CPU, 0.85, 0) == 4 * GIB
    monkeypatch.setattr(memory, "_available_on_host", lambda: 0)
    with pytest.raises(EngineError, match="the free memory"):
        spaces(None, FULL)


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_on_host", lambda: 3 * GIB)
    check_weights(Path("model"), 3 * GIB, CPU)
    with pytest.raises(ModelError, match=r"model: its weights take 3\.5 GiB, and cpu has 3\.0 GiB free"):
        check_weights(Path("model"), 7 * GIB // 2, CPU)


def test_within_a_container_its_limit_counts_and_cached_files_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 4000 kB\n")
    assert memory._available_on_host() == 4000 << 10
    (tmp_path / "memory.max").write_text(f"{1 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{900 << 10}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\nactive_file {100 << 10}\ninactive_file {300 << 10}\n")
    assert memory._available_on_host() == (1024 - 900 + 400) << 10
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._available_on_host() == 4000 << 10


def test_this_machine_has_memory_to_offer(device: torch.device) -> None:
    assert free_bytes(device, 0.85, 0) > 0


def test_a_gpu_gives_its_share_less_what_is_taken_and_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 100 * GIB))
    assert free_bytes(torch.device("cuda"), 0.85, 5 * GIB) == 40 * GIB
    assert free_bytes(torch.device("cuda"), 0.85, 50 * GIB) == 0


def test_of_a_shared_device_an_engine_takes_its_share_whatever_the_others_have_taken_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_available_on_host", lambda: 8 * GIB)
    assert free_bytes(CPU, 0.85, 0, share=0.25) == GIB // 2
    cuda, taken = torch.device("cuda"), [30 * GIB]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GIB - taken[0], 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GIB)  # its own weights
    assert free_bytes(cuda, 0.8, 5 * GIB, share=0.5) == (40 - 10 - 5) * GIB
    taken[0] = 70 * GIB  # others took more than their share, as with --kv-cache-bytes
    assert free_bytes(cuda, 0.8, 5 * GIB, share=0.5) == (80 - 70 - 5) * GIB


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_what_a_step_frees_is_kept_for_the_next() -> None:
    library, size = ctypes.CDLL(None), 12 << 20
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]

    def faults() -> int:
        """Pages that a few steps' tensors get anew."""
        before = 0
        for step in range(4):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt if step == 1 else before
            blocks = [library.malloc(size) for _ in range(3)]
            for block in blocks:
                ctypes.memset(block, 1, size)
            for block in blocks:
                library.free(block)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for parameter in (-1, -3):  # as every process begins
        library.mallopt(parameter, 128 << 10)
    assert faults() > 3 * 3 * size // 4096 // 2
    keep_freed()
    assert faults() < 3 * size // 4096
