"""Folders that are no adapter of the model: each is refused by the file, setting or tensor at fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.adapters import load_adapter
from engine.errors import ModelError
from engine.models import Model, load_model
from engine.text.adapter import read_adapter
from tests.engine.adapters.folders import tensors, write_adapter
from tests.engine.random_models import FAMILIES, write_model

CPU = torch.device("cpu")
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_model(tmp_path_factory.mktemp("base"), tokenizer=False), "float32", CPU)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=.* is not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=.* is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' changes the base's weights"),
        ({"lora_alpha": math.nan}, "lora_alpha=.* is not a number"),
        ({"lora_alpha": "16"}, "lora_alpha='16' is not a number"),
        ({"alpha_pattern": {"(a+)+$": 2}}, "only names of modules are supported"),
        ({"alpha_pattern": [1]}, "alpha_pattern is not an object"),
    ],
)
def test_settings_that_make_it_another_adapter_are_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_adapter(write_adapter(tmp_path, **config))


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    """`tensors()` with other A and B of one module, or without."""
    values = tensors()
    for end, tensor in changes.items():
        del values[f"{QUERY}.lora_{end}.weight"]
        if tensor is not None:
            values[f"{QUERY}.lora_{end}.weight"] = tensor
    return values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda: changed(A=None), "q_proj has no lora_A"),
        (lambda: changed(A=torch.zeros(3, 64)), "lora_B.weight has rank 2, and .*lora_A.weight has rank 3"),
        (lambda: changed(A=torch.zeros(257, 64), B=torch.zeros(64, 257)), "has rank 257; ranks are from 1 to 256"),
        (lambda: changed(A=torch.zeros(2, 48)), r"lora_A.weight has shape \[2, 48\]; the model asks for \[2, 64\]"),
        (lambda: changed(B=torch.zeros(48, 2)), r"lora_B.weight has shape \[48, 2\]; the model asks for \[64, 2\]"),
        (lambda: changed(A=torch.full((2, 64), math.nan)), "lora_A.weight has values that are not finite"),
        (
            lambda: changed(B=torch.full((64, 2), -1e38)),
            r"lora_B.weight has values up to 1e\+38, 4 times as large when applied; .*, float32, holds none so large",
        ),
        (lambda: changed(A=torch.zeros(2, 64, dtype=torch.int8)), "is stored as I8; one of F32, F16, BF16"),
        (lambda: changed(A=torch.zeros(2, 8, 8)), r"has shape \[2, 8, 8\]; a matrix is expected"),
        (lambda: {"model.layers.0.x.lora_A.weight": torch.zeros(2, 2)}, "does not begin with 'base_model.model.'"),
        (
            lambda: {name.replace("layers.1", "layers.7"): value for name, value in tensors().items()},
            "the model has no matrix model.layers.7",
        ),
        (
            lambda: tensors() | {"base_model.model.model.norm.weight": torch.zeros(8, 8)},
            "model.norm is saved whole; of whole matrices only the embedding and the output head",
        ),
        (
            lambda: tensors() | {"base_model.model.lm_head.weight": torch.zeros(321, 64)},
            r"lm_head.weight has shape \[321, 64\]; the model asks for \[320, 64\]",
        ),
        (lambda: tensors() | {f"{QUERY}.lora_magnitude_vector": torch.zeros(8, 8)}, "is not supported"),
        (dict, "has no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    model: Model, tmp_path: Path, values: Callable[[], dict[str, Tensor]], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_adapter(write_adapter(tmp_path, values()), model)


def test_files_that_are_no_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no adapter_config\.json: it is no folder of a PEFT adapter"):
        read_adapter(tmp_path)
    folder = write_adapter(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model.bin can run code: save the adapter with safe_serialization"):
        read_adapter(folder)
    (folder / "adapter_model.safetensors").write_bytes((folder / "adapter_model.bin").read_bytes()[:-1])
    with pytest.raises(ModelError, match="is truncated or not a safetensors file"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ModelError, match="is longer than 1048576 bytes"):
        read_adapter(folder)


def test_changes_of_all_experts_that_do_not_fit_are_refused(model: Model, tmp_path: Path) -> None:
    inner = FAMILIES["mixtral"].get("intermediate_size", 96)
    mixture = load_model(write_model(tmp_path / "base", tokenizer=False, **FAMILIES["mixtral"]), "float32", CPU)
    experts = "base_model.model.model.layers.0.mlp.experts"

    def load(ranks: int, inputs: int, outputs: int, of: Model = mixture, **others: Tensor) -> None:
        values = {f"{experts}.lora_A.weight": torch.zeros(ranks, inputs)}
        values |= {f"{experts}.lora_B.weight": torch.zeros(outputs, ranks)}
        load_adapter(write_adapter(tmp_path / "adapter", values | others), of)

    load(8, inner, 64)
    with pytest.raises(ModelError, match=r"lora_A.weight has 10 rows; 4 experts of a rank from 1 to 256 each"):
        load(10, inner, 64)
    with pytest.raises(
        ModelError, match=rf"has 64 inputs and .*lora_B.weight has 64 outputs; .*gate_up_proj \[{2 * inner}, 64\]"
    ):
        load(8, 64, 64)
    with pytest.raises(ModelError, match=r"the model has no experts model\.layers\.0\.mlp\.experts"):
        load(8, inner, 64, model)
    expert = experts.replace("mlp", "block_sparse_moe") + ".1.w2"
    once = {f"{expert}.lora_A.weight": torch.zeros(2, inner), f"{expert}.lora_B.weight": torch.zeros(64, 2)}
    with pytest.raises(ModelError, match="changes a product of experts more than once"):
        load(8, inner, 64, **once)


def test_one_that_takes_more_than_there_is_room_for_is_refused_before_it_is_read(model: Model, tmp_path: Path) -> None:
    values = changed(A=torch.full((2, 64), math.nan))  # reading it would tell
    size = 4 * sum(value.numel() for value in values.values())
    folder = write_adapter(tmp_path, values)
    with pytest.raises(ModelError, match=f"the adapter takes {size} bytes; there is room for {size - 1}"):
        load_adapter(folder, model, max_bytes=size - 1)


def test_the_version_is_of_the_weights_and_the_configuration(tmp_path: Path) -> None:
    versions = {
        read_adapter(write_adapter(tmp_path / "a")).version,
        read_adapter(write_adapter(tmp_path / "b", tensors(seed=1))).version,
        read_adapter(write_adapter(tmp_path / "c", lora_alpha=9)).version,
    }
    assert len(versions) == 3
    assert read_adapter(write_adapter(tmp_path / "elsewhere")).version in versions
