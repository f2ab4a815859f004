"""An engine on the deterministic kernels of a GPU says the same to the bit, together and alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engine import Engine, EngineConfig, SamplingParams
from tests.engine.random_models import FAMILIES, write_model
from tests.exhaustive import few

PROMPTS = [[(7 * i + k) % 310 + 3 for i in range(length)] for k, length in enumerate((4, 12))]
PARAMS = SamplingParams(max_tokens=2, temperature=0.0, logprobs=20, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if torch.cuda.is_available() else ["bfloat16"])
@pytest.mark.parametrize("name", few(["gemma2", "mixtral"], "gemma2"))
def test_together_in_chunks_as_alone(where: torch.device, tmp_path: Path, dtype: str, name: str) -> None:
    folder = write_model(tmp_path, seed=3, **FAMILIES[name] | {"num_hidden_layers": 2, "sliding_window": 9})
    found = []
    for batched, cached in ((64, False), (9, True)):
        config = EngineConfig(
            device=where.type,
            dtype=dtype,  # type: ignore[arg-type]  # one of them
            kernels="triton",
            deterministic=True,
            max_num_seqs=8,
            max_num_batched_tokens=batched,
            enable_prefix_caching=cached,
            kv_cache_bytes=1 << 20,
        )
        with Engine.load(folder, config) as engine:
            assert engine.stats().kernels == "triton-deterministic"
            if cached:
                found.append(engine.generate(PROMPTS, PARAMS))
            else:
                found.append([engine.generate([prompt], PARAMS)[0] for prompt in PROMPTS])
    for alone, together in zip(*found, strict=True):
        assert alone.finish_reason == "length"
        assert (alone.token_ids, alone.logprobs) == (together.token_ids, together.logprobs)
