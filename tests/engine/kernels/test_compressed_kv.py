"""Keys and values of 8 bits in a model: near, as small as they say, and as repeatable as any."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from engine import Engine, EngineConfig, EngineError, SamplingParams
from engine.execution.placement import plan_capacity
from engine.kernels import select
from engine.models import load_model
from engine.models.registry import Model
from tests.engine.deterministic.logits import NATIVE
from tests.engine.quant.forward import in_chunks
from tests.engine.random_models import FAMILIES, write_model

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 320, (90,), generator=torch.Generator().manual_seed(2)).tolist()
Kind = Literal["int8", "fp8"]


def loaded(folder: Path, kind: str) -> Model:
    return load_model(folder, "float32", CPU, "native", kv_cache_dtype=kind)


@NATIVE
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), ("fp8", 0.12)])
def test_a_model_computes_nearly_the_same(tmp_path: Path, name: str, kind: Kind, most: float) -> None:
    folder = write_model(tmp_path, tokenizer=False, **FAMILIES[name])
    wanted = in_chunks(loaded(folder, "auto"), TOKENS, 31)
    got = in_chunks(loaded(folder, kind), TOKENS, 31)
    assert 0 < (got - wanted).norm() / wanted.norm() < most


@NATIVE
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_engine_generates_over_it(tmp_path: Path, kind: Kind, deterministic: bool) -> None:
    """Chunked prompts, blocks that are shared and copied, two of one request."""
    folder = write_model(tmp_path, tokenizer=False)
    config = EngineConfig(
        kv_cache_dtype=kind,
        deterministic=deterministic,
        threads=1,
        max_num_seqs=8,
        max_num_batched_tokens=32,
    )
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, n=2)
    with Engine.load(folder, config) as engine:
        first, second = engine.generate([TOKENS, TOKENS[:50]], params), engine.generate([TOKENS], params)
    assert all(len(choice.token_ids) == 8 for one in first for choice in one.choices)
    assert first[0].choices[0].token_ids == first[0].choices[1].token_ids == second[0].choices[0].token_ids


@NATIVE
def test_the_same_memory_holds_more_of_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tokenizer=False, head_dim=32, num_attention_heads=2, num_key_value_heads=2)
    held = {}
    for kind in ("auto", "int8", "fp8"):
        config = EngineConfig(kv_cache_bytes=1 << 20, kv_cache_dtype=kind, max_num_seqs=64)
        (space,) = plan_capacity(loaded(folder, kind), config).spaces
        held[kind] = space.num_blocks
    assert held["fp8"] == 4 * held["auto"]
    assert held["int8"] == held["auto"] * 4 * 32 // 36


@pytest.mark.parametrize("kernels", ["reference", "sdpa", "cpu"])
def test_sets_that_have_none_refuse(kernels: str) -> None:
    with pytest.raises(EngineError, match=f"kv_cache_dtype='int8' needs native kernels on a CPU, .*'{kernels}'"):
        select(CPU, torch.float32, kernels, kv_cache_dtype="int8")


def test_another_width_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="kv_cache_dtype='int4' must be one of auto, int8, fp8"):
        EngineConfig(kv_cache_dtype="int4")
