"""The set for CUDA: who gets it, and that a model computes with it what it does in plain torch."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels import RaggedBatch, select
from engine.kernels.reference import Ragged
from engine.models import load_model
from tests.engine.random_models import FAMILIES, VARIANTS, write_model
from tests.exhaustive import few

pytest.importorskip("triton")

from engine.kernels.fp8 import fp8_linear
from engine.kernels.gpu import Fp8Gpu, Gpu
from engine.kernels.packed import Int4Weight, Int8Weight

pytestmark = pytest.mark.usefixtures("where")

WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCK = 16
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def small(dtype: torch.dtype) -> Gpu:
    """Attention is cut for one multiprocessor: interpreted programs take their time."""
    return Gpu(dtype, multiprocessors=1)


def hidden(folder: Path, kernels: Any, dtype: torch.dtype) -> list[Tensor]:
    """Of two steps: two prompts, one of them behind padding, then a token more of each beside a third."""
    name = str(dtype).removeprefix("torch.")
    model = load_model(folder, name, WHERE, kernels)
    generator = torch.Generator().manual_seed(4)
    caches = [
        torch.zeros(group.layers, 2, 8, BLOCK, group.kv_heads, group.head_dim, dtype=dtype, device=WHERE)
        for group in model.kv_groups
    ]
    tables = torch.tensor([[3, 1], [6, 2], [4, 0]], dtype=torch.int32)
    found = []
    for counts, lens in (((5, 0, 9), (5, 0, 9)), ((1, 3, 1), (6, 3, 10))):
        slots, positions = [], []
        for row, count, kv_len in zip(range(3), counts, lens, strict=True):
            places = range(kv_len - count, kv_len)
            positions += places
            slots += [int(tables[row, place // BLOCK]) * BLOCK + place % BLOCK for place in places]
        tokens = torch.randint(0, model.vocab_size, (len(slots),), generator=generator)
        starts = torch.tensor([0, counts[0], sum(counts[:2]), sum(counts)], dtype=torch.int32)
        batches = [
            RaggedBatch(
                torch.tensor(slots, device=WHERE),
                starts.to(WHERE),
                torch.tensor(lens, dtype=torch.int32, device=WHERE),
                tables.to(WHERE),
                torch.arange(3, dtype=torch.int32, device=WHERE),
                max(counts),
                max(lens),
                group.window,
            )
            for group in model.kv_groups
        ]
        at, every = torch.tensor(positions, device=WHERE), torch.arange(len(slots), device=WHERE)
        long = None if model.rope_switch is None else at > model.rope_switch
        found.append(model.forward(tokens.to(WHERE), at, long, batches, caches, every).cpu().float())
        found += [cache.clone().cpu().float() for cache in caches]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    few(["gqa", "qwen3", "mixtral", "qwen3-moe", "phi3-longrope", "gemma2"], "mixtral", "phi3-longrope", "gemma2"),
)
@torch.inference_mode()
def test_a_model_computes_what_it_does_in_plain_torch(tmp_path: Path, name: str) -> None:
    changes = (VARIANTS | FAMILIES)[name] | {"num_hidden_layers": 1}
    folder = write_model(tmp_path / name, **changes)
    for found, expected in zip(
        hidden(folder, small, torch.float32), hidden(folder, Ragged, torch.float32), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_experts_with_quantised_weights_are_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tokenizer=False, **FAMILIES["mixtral"])
    with pytest.raises(EngineError, match=r"experts with quantised weights .* not served by triton-fp8.*'sdpa'"):
        load_model(folder, "bfloat16", WHERE, Fp8Gpu)


@torch.inference_mode()
def test_half_precision_is_as_near_as_it_can_be(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "gqa", num_hidden_layers=1)
    exact = hidden(folder, Ragged, torch.float32)
    errors = [
        [
            (one - right).norm() / right.norm()
            for one, right in zip(hidden(folder, each, torch.bfloat16), exact, strict=True)
        ]
        for each in (small, Ragged)
    ]
    assert max(errors[0]) < 2e-2
    assert sum(errors[0]) < 1.2 * sum(errors[1])


@torch.inference_mode()
def test_8_bit_floats_are_near_and_not_the_same(tmp_path: Path) -> None:
    if WHERE.type == "cpu" and TORCH < (2, 13):
        pytest.skip("torch has one scale for a whole matrix here")
    if WHERE.type == "cuda" and torch.cuda.get_device_capability(WHERE) < (8, 9):
        pytest.skip("no tensor cores for 8-bit floats")
    folder = write_model(tmp_path / "gqa", num_hidden_layers=1)
    eighth = hidden(folder, lambda dtype: Fp8Gpu(dtype, multiprocessors=1), torch.bfloat16)
    for found, right in zip(eighth, hidden(folder, Ragged, torch.float32), strict=True):
        assert 1e-2 < (found - right).norm() / right.norm() < 1e-1


def test_packed_weights_are_multiplied_by_their_bits() -> None:
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(1))
    x = torch.ones(2, 128, dtype=torch.bfloat16, device=WHERE)
    for packed in (Int4Weight.quantise(weight, 64), Int8Weight.quantise(weight)):
        held = {field.name: getattr(packed, field.name) for field in fields(packed)}
        here = replace(packed, **{name: part.to(WHERE) for name, part in held.items() if isinstance(part, Tensor)})
        linear = small(torch.bfloat16).prepare_quantised(here, None)
        expected = packed.dequantise().sum(1).expand(2, -1)
        torch.testing.assert_close(linear(x).cpu().float(), expected, rtol=2**-7, atol=1e-4)


def test_who_asks_by_name_gets_it_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(select(CUDA, torch.bfloat16)) is Gpu
    monkeypatch.setattr("engine.kernels.gpu.interpreted", lambda: False)
    with pytest.raises(EngineError, match="kernels='triton' are for CUDA devices, and the device is cpu"):
        select(CPU, torch.float32, "triton")
    monkeypatch.setattr("engine.kernels.choice.find_spec", lambda name: None)
    assert select(CUDA, torch.bfloat16).name == "sdpa"
    with pytest.raises(EngineError, match=r"need triton, which is not installed: pip install 'penstock\[gpu\]'"):
        select(CUDA, torch.bfloat16, "triton")


def test_sums_of_products_are_not_rounded_to_half_precision_on_the_way() -> None:
    select(CUDA, torch.bfloat16)
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "name", "says"),
    [
        (CPU, (9, 0), torch.bfloat16, "auto", "quantization='fp8' needs a CUDA device, and the device is cpu"),
        (CUDA, (8, 6), torch.bfloat16, "auto", "compute capability 8.9 or more .* this one has 8.6"),
        (CUDA, (9, 0), torch.float16, "auto", "computes in bfloat16, and dtype is float16"),
        (CUDA, (9, 0), torch.bfloat16, "sdpa", "goes with kernels='triton', not with 'sdpa'"),
    ],
)
def test_8_bit_floats_are_refused_where_they_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    capability: tuple[int, int],
    dtype: torch.dtype,
    name: str,
    says: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(EngineError, match=says):
        select(device, dtype, name, "fp8")


def test_all_products_but_the_last_are_of_8_bit_floats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert type(select(CUDA, torch.bfloat16, "auto", "fp8")) is Fp8Gpu
    prepared: list[tuple[int, ...]] = []

    def noting(weight: Tensor, *rest: Any) -> Any:
        prepared.append(tuple(weight.shape))
        return fp8_linear(weight, *rest)

    monkeypatch.setattr("engine.kernels.gpu.fp8_linear", noting)
    for tied in (True, False):
        folder = write_model(tmp_path / str(tied), tie_word_embeddings=tied)
        model = load_model(folder, "bfloat16", CPU, Fp8Gpu)
        # q, k and v; output; gate and up; down; of both layers.
        assert prepared == [(128, 64), (64, 64), (192, 64), (64, 96)] * 2
        logits = model.logits(torch.ones(1, 64, dtype=torch.bfloat16))
        assert logits.shape == (1, model.vocab_size)
        prepared.clear()
