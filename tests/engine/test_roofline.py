"""The limits that figures on a GPU are measured against are those that the project set itself."""

from __future__ import annotations

import pytest

from engine.roofline import Work, speed_of
from infra.gpu.shapes import SHAPES

H200 = speed_of("NVIDIA H200")
WORK = Work.of(SHAPES["llama-8b"])


@pytest.mark.parametrize(("batch", "ms"), [(1, 3.52), (16, 4.01), (64, 5.59), (256, 13.3)])
def test_a_step_takes_at_least(batch: int, ms: float) -> None:
    assert H200 is not None
    assert WORK.step_s(H200, batch, 1024) * 1e3 == pytest.approx(ms, rel=0.003)


@pytest.mark.parametrize(("length", "tokens_per_s"), [(1024, 54_800), (8192, 48_400), (32768, 34_600)])
def test_prompts_are_read_at_most(length: int, tokens_per_s: float) -> None:
    assert H200 is not None
    assert WORK.prefill_tokens_per_s(H200, length) == pytest.approx(tokens_per_s, rel=0.003)


def test_offline_tokens_are_made_at_most() -> None:
    assert H200 is not None
    assert WORK.offline_tokens_per_s(H200, 256, 1000, 1000) == pytest.approx(12_600, rel=0.005)


def test_the_shape_is_llamas() -> None:
    assert WORK.kv_bytes == 131_072
    config = SHAPES["llama-8b"]
    assert (WORK.layers + 2 * WORK.head + 65 * config["hidden_size"]) / 1e9 == pytest.approx(8.03, abs=0.005)


@pytest.mark.parametrize(("batch", "ms"), [(1, 5.04), (64, 8.00)])
def test_a_step_takes_longer_where_memory_is_slower(batch: int, ms: float) -> None:
    h100 = speed_of("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    assert WORK.step_s(h100, batch, 1024) * 1e3 == pytest.approx(ms, rel=0.003)


@pytest.mark.parametrize("name", ["NVIDIA RTX 4090", "NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"])
def test_nothing_is_claimed_of_other_machines(name: str) -> None:
    assert speed_of(name) is None
