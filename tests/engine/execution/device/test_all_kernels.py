"""An engine on the kernels that a GPU has, every one of them, says what it says in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engine import Engine, EngineConfig, SamplingParams
from engine.execution.device import inputs, sampler
from engine.execution.device.inputs import make_inputs_by_kernel
from engine.kernels.triton.sampling.sampler import TritonChoose
from tests.engine.random_models import FAMILIES, write_model
from tests.exhaustive import few

PARAMS = [
    SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=3, seed=4, top_p=0.9, repetition_penalty=1.2, logprobs=2, ignore_eos=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["gemma2", "mixtral"], "gemma2"))
def test_a_step_ahead_the_tokens_are_the_same(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With windows, capped scores, tables of two groups, and experts; in the interpreter where there is no GPU."""
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled here, not interpreted")
    folder = write_model(tmp_path, tokenizer=False, **FAMILIES[name] | {"num_hidden_layers": 2, "sliding_window": 9})
    found = []
    for kernels in ("reference", "triton"):
        config = EngineConfig(
            device=device.type,
            dtype="float32",
            kernels=kernels,
            overlap=1,
            max_num_seqs=2,
            kv_cache_bytes=1 << 20,
            block_size=4,
        )
        with Engine.load(folder, config) as engine:
            found.append([one.token_ids for one in engine.generate([[5, 9, 200], list(range(13))], PARAMS)])
        # From here on also where it is not the device's own choice.
        monkeypatch.setattr(inputs, "maker", lambda device: make_inputs_by_kernel)
        monkeypatch.setattr(sampler, "chooser", TritonChoose)
    assert found[0] == found[1]
