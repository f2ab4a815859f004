from __future__ import annotations

import pytest
import torch

from engine import memory
from engine.errors import EngineError
from engine.memory import GIB, free_bytes, kv_blocks

CPU = torch.device("cpu")


def test_asked_bytes_are_filled_with_whole_blocks() -> None:
    assert kv_blocks(10_000, 300, 16, 64, 4096, CPU) == 33


def test_never_more_than_all_sequences_could_fill() -> None:
    assert kv_blocks(1 << 40, 300, 16, 4, 100, CPU) == 4 * 7


def test_less_than_one_block_is_refused() -> None:
    with pytest.raises(EngineError, match="kv_cache_bytes=299 does not hold one KV block of 300 bytes"):
        kv_blocks(299, 300, 16, 4, 100, CPU)


def test_unasked_a_bounded_part_of_the_free_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_on_host", lambda: 8 * GIB)
    assert free_bytes(CPU) == 2 * GIB
    assert kv_blocks(None, GIB, 16, 64, 4096, CPU) == 2
    monkeypatch.setattr(memory, "_available_on_host", lambda: 1000 * GIB)
    assert free_bytes(CPU) == 4 * GIB
    monkeypatch.setattr(memory, "_available_on_host", lambda: 0)
    with pytest.raises(EngineError, match="the free memory"):
        kv_blocks(None, GIB, 16, 64, 4096, CPU)


def test_this_machine_has_memory_to_offer(device: torch.device) -> None:
    assert free_bytes(device) > 0
