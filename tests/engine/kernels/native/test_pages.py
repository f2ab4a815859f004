import gc
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.kernels.native import pages
from engine.kernels.native.pages import Pages
from tests.engine.kernels.native.conftest import Make


def test_memory_is_zero_aligned_and_not_shared() -> None:
    memory = Pages()
    tensors = [memory.zeros(rows, 3, dtype=torch.bfloat16) for rows in range(1, 40)]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))


def test_what_is_larger_than_a_chunk_gets_one_of_its_own() -> None:
    memory = Pages(chunk=1 << 12)
    small, large = memory.zeros(8, dtype=torch.float32), memory.zeros(1 << 20, dtype=torch.float32)
    large.fill_(1)
    assert not small.any()
    assert large.shape == (1 << 20,)


def test_nothing_takes_no_memory() -> None:
    assert Pages().zeros(0, 3, dtype=torch.float32).shape == (0, 3)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone has them")
def test_a_chunk_begins_at_a_large_page_and_lives_as_long_as_a_tensor_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Watched(mmap.mmap):
        def __new__(cls, *args: object, **more: object) -> "Watched":
            one = super().__new__(cls, *args, **more)
            made.append(weakref.ref(one))
            return one

    monkeypatch.setattr(mmap, "mmap", Watched)
    memory = Pages()
    first, second = memory.zeros(5, dtype=torch.float32), memory.zeros(5, dtype=torch.float32)
    assert first.data_ptr() % (2 << 20) == 0
    del memory, first
    gc.collect()
    assert made[0]() is not None
    del second
    gc.collect()
    assert made[0]() is None


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone has them")
def test_the_cache_of_an_engine_begins_at_a_large_page(make: Make) -> None:
    cache = make(torch.bfloat16, 1).zero_cache(2, 2, 5, 16, 2, 8, device=torch.device("cpu"))
    assert cache.data_ptr() % (2 << 20) == 0
    assert (cache.shape, cache.dtype) == ((2, 2, 5, 16, 2, 8), torch.bfloat16)
    assert not cache.any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone has them")
def test_the_cache_has_large_pages_once_a_token_is_there(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[int] = []
    monkeypatch.setattr(pages, "_advise", lambda memory, advice: advised.append(advice))
    with Engine.load(model_folder, EngineConfig(device="cpu", kernels="native")) as engine:
        del advised[: advised.index(mmap.MADV_NOHUGEPAGE)]
        assert set(advised) == {mmap.MADV_NOHUGEPAGE}, "nothing has run"
        engine.generate([[5, 9, 200]], SamplingParams(max_tokens=1))
        assert set(advised) == {mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE}
