"""A cache of 8 bits in the GPU's kernels: written as torch writes it, to the bit, and read for what is in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.errors import EngineError
from engine.kernels import select
from engine.kernels.fp8 import FP8
from engine.kernels.ragged import ragged_attention
from tests.engine.kernels import narrow as oracle
from tests.engine.kernels.ragged_cases import Lengths, Shape, ragged_case
from tests.engine.kernels.triton.conftest import noise

pytest.importorskip("triton")

from engine.kernels.gpu import Gpu
from engine.kernels.triton.attention.compressed_kv import KINDS
from engine.kernels.triton.attention.paged import PagedAttention

CPU = torch.device("cpu")


@pytest.mark.parametrize(("head_dim", "rotary_dim", "dtype"), [(16, 16, torch.bfloat16), (24, 8, torch.float32)])
@pytest.mark.parametrize("kind", oracle.KINDS)
def test_what_is_written_is_what_torch_writes_to_the_bit(
    where: torch.device, kind: str, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    tokens, heads, kv_heads = 24, 2, 3
    x = noise(tokens, heads + 2 * kv_heads, head_dim) * torch.logspace(-4, 4, tokens)[:, None, None]
    x[5], x[6] = 0.0, 0.001953125 * 2.5
    x = x.to(dtype)
    still = torch.ones(tokens, 1, rotary_dim, dtype=dtype)
    slots = torch.randperm(tokens + 8, generator=torch.Generator().manual_seed(2))[:tokens]
    width = oracle.width(kind, head_dim)
    expected = torch.zeros(2, 8, 4, kv_heads, width, dtype=torch.uint8)
    found = expected.to(where)
    oracle.write(x[:-1, heads:-kv_heads], x[:-1, -kv_heads:], expected, slots[:-1], kind)
    kernels = Gpu(dtype, multiprocessors=1, kv_cache_dtype=kind)
    assert (kernels.cache_width(head_dim), kernels.cache_dtype) == (width, torch.uint8)
    slots[-1] = -1
    batch = replace(ragged_case(Shape(heads, kv_heads, head_dim), [(tokens, tokens)]).batch, slots=slots.to(where))
    turned = kernels.rope_and_write(x.to(where), still.to(where), 0 * still.to(where), found, batch)
    assert torch.equal(turned.cpu(), x[:, :heads])
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_what_is_no_number_is_none_when_it_is_read(where: torch.device, kind: str) -> None:
    x = torch.ones(1, 3, 16)
    x[0, 2, 3] = float("nan")
    cache = torch.zeros(2, 1, 1, 1, oracle.width(kind, 16), dtype=torch.uint8, device=where)
    one = torch.ones(1, 1, 16, device=where)
    batch = ragged_case(Shape(1, 1, 16, block=1), [(1, 1)]).batch
    kernels = Gpu(torch.float32, multiprocessors=1, kv_cache_dtype=kind)
    kernels.rope_and_write(
        x.to(where), one, 0 * one, cache, replace(batch, slots=torch.zeros_like(batch.slots).to(where))
    )
    assert oracle.widen(cache.cpu(), kind)[1, 0, 0, 0, 3].isnan()
    assert torch.equal(oracle.widen(cache.cpu(), kind)[0, 0, 0, 0], torch.ones(16))


@pytest.mark.parametrize(
    ("shape", "lengths", "softcap", "multiprocessors"),
    [
        (Shape(4, 2, 64, dtype=torch.bfloat16), [(1, 64), (40, 90), (3, 33)], None, 1),
        (Shape(3, 1, 24, window=40), [(1, 60), (40, 90)], 0.8, 1),
        # Walks that are divided, and joined.
        (Shape(2, 1, 128, block=7), [(1, 400)], None, 132),
    ],
    ids=["bf16", "windowed", "divided"],
)
@pytest.mark.parametrize("kind", oracle.KINDS)
def test_attention_is_that_over_the_widened_cache(
    where: torch.device, kind: str, shape: Shape, lengths: Lengths, softcap: float | None, multiprocessors: int
) -> None:
    case = ragged_case(shape, lengths, padding=1, spare_rows=2)
    cache = oracle.narrow(case.cache, kind)
    expected = ragged_attention(case.query.float(), oracle.widen(cache, kind), case.batch, case.scale, softcap)
    there = case.on(where)
    found = PagedAttention(multiprocessors)(
        there.query, cache.to(where), there.batch, case.scale, softcap, KINDS[kind]
    ).cpu()
    assert found.dtype == shape.dtype
    near = 1e-5 if shape.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), expected, atol=near, rtol=near)


def test_every_float_of_eight_bits_is_read_exactly(where: torch.device) -> None:
    codes = torch.arange(256).to(torch.uint8)
    case = ragged_case(Shape(1, 1, 256, block=1), [(1, 1)])
    cache = torch.stack((torch.zeros_like(codes), codes)).view(2, 1, 1, 1, 256).to(where)
    batch = replace(case.on(where).batch, tables=torch.zeros(9, 1, dtype=torch.int32, device=where))
    found = PagedAttention(1)(torch.zeros(1, 1, 256, device=where), cache, batch, 1.0, None, KINDS["fp8"])
    torch.testing.assert_close(found[0, 0].cpu(), codes.view(FP8).float(), atol=0, rtol=0, equal_nan=True)


def test_heads_whose_scales_would_lie_askew_are_refused() -> None:
    kernels = Gpu(torch.float32, multiprocessors=1, kv_cache_dtype="int8")
    assert kernels.name == "triton-int8-kv"
    kernels.prepare_attention(2, 1, 12, None)
    with pytest.raises(EngineError, match=r"kv_cache_dtype='int8' on triton-int8-kv .* heads of 10; use 'fp8'"):
        kernels.prepare_attention(2, 1, 10, None)


def test_what_cannot_be_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert type(select(cuda, torch.bfloat16, kv_cache_dtype="int8")) is Gpu
    with pytest.raises(EngineError, match=r"kv_cache_dtype='fp8' needs a GPU of compute capability 8\.9"):
        select(cuda, torch.bfloat16, kv_cache_dtype="fp8")
    with pytest.raises(EngineError, match="kv_cache_dtype='int8' with deterministic is for CPUs"):
        select(cuda, torch.bfloat16, kv_cache_dtype="int8", deterministic=True)
    with pytest.raises(EngineError, match=r"kernels='triton' on a CUDA device, .*'sdpa'"):
        select(cuda, torch.bfloat16, "sdpa", kv_cache_dtype="int8")
    with pytest.raises(EngineError, match="quantization='fp8' needs a CUDA device"):
        select(CPU, torch.bfloat16, quantization="fp8", kv_cache_dtype="int8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    both = select(cuda, torch.bfloat16, quantization="fp8", kv_cache_dtype="fp8")
    assert both.name == "triton-fp8-fp8-kv"
    assert both.cache_dtype == torch.uint8
