"""Each rank holds its own part of the weights, and numbers of ranks that do not fit are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig
from engine.errors import EngineError, ModelError
from engine.kernels.native import load_library
from engine.models import load_model
from engine.pooling import PoolingEngine
from tests.engine.execution.ranks.in_threads import exchanges_of
from tests.engine.random_models import family, write_model

pytestmark = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")

#: SmolLM2's numbers of heads.
NINE_HEADS: dict[str, Any] = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 96,
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM"])
def test_a_rank_holds_its_part_of_the_weights(name: str, ranks: int, tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if name.startswith("Mixtral") else {}
    kv_heads = {"num_key_value_heads": 4, "tie_word_embeddings": False}
    folder = write_model(tmp_path / "m", tokenizer=False, **family(name, **kv_heads, **experts))
    cpu = torch.device("cpu")
    whole = load_model(folder, "float32", cpu, "native").kernels.weight_bytes
    shares = [load_model(folder, "float32", cpu, "native", exchange=end).kernels for end in exchanges_of(ranks)]
    assert all(share.weight_bytes <= whole * (1 / ranks + 0.05) for share in shares)


def test_numbers_that_do_not_divide_the_heads_are_refused_with_those_that_do(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", tokenizer=False, **NINE_HEADS)
    with pytest.raises(ModelError, match=r"tensor_parallel=2 .*9 heads and 3 KV heads; possible are 1, 3, 9"):
        Engine.load(folder, EngineConfig(tensor_parallel=2))


def test_what_is_not_divided_among_ranks_is_refused_by_name(tmp_path: Path) -> None:
    folder, config = write_model(tmp_path / "m"), EngineConfig(tensor_parallel=2)
    with pytest.raises(EngineError, match=r"tensor_parallel=2 and pipeline_parallel=1 are for models"):
        PoolingEngine.load(tmp_path, config)
    with pytest.raises(EngineError, match=r"pipeline_parallel need native kernels"):
        Engine.load(folder, EngineConfig(tensor_parallel=2, kernels="reference"))
