"""Mixtures of experts as transformers has them: in every way of writing them, and where experts are equally likely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models import load_model
from tests.engine.random_models import FAMILIES, write_model
from tests.parity.conftest import Truth
from tests.parity.driver import Driver
from tests.parity.test_families import run_all

CPU = torch.device("cpu")
NAMES = ["mixtral", "qwen3-moe"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("separate", [True, False])
def test_what_transformers_writes_is_read(tmp_path: Path, name: str, separate: bool) -> None:
    """With the experts of a layer in one tensor, as it holds them, and apart, as it writes them unasked."""
    folder = write_model(tmp_path / "model", tokenizer=False, **FAMILIES[name])
    truth = Truth(folder)
    truth._model.save_pretrained(tmp_path / "saved", save_original_format=separate)
    held = load_file(tmp_path / "saved" / "model.safetensors")
    assert any(tensor.ndim == 3 for tensor in held.values()) == (not separate)
    run_all(Driver(load_model(tmp_path / "saved", "float32", CPU)), truth, 320)


@pytest.mark.parametrize("name", NAMES)
def test_of_experts_that_are_equally_likely_the_same_are_chosen(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path, tokenizer=False, **FAMILIES[name])
    held = load_file(folder / "model.safetensors")
    for one in held:
        if one.endswith(".gate.weight"):
            held[one][1:3] = held[one][0]
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    run_all(Driver(load_model(folder, "float32", CPU)), Truth(folder), 320)


def test_the_number_of_experts_goes_by_two_names(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tokenizer=False, **FAMILIES["qwen3-moe"])
    settings = json.loads((folder / "config.json").read_text())
    settings["num_local_experts"] = settings.pop("num_experts")
    (folder / "config.json").write_text(json.dumps(settings))
    load_model(folder, "float32", CPU)
