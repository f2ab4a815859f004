"""config.json: what is served, and what is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ModelError
from engine.layers import Llama3Scaling, RopeScaling
from engine.models import load_model
from engine.models.families import FAMILIES as FAMILIES_SERVED
from engine.models.settings import DecoderSettings, RopeSettings
from engine.text import ModelCard
from engine.text.config import Config
from tests.engine.random_models import BASE, FAMILIES, LLAMA3_SCALING, VARIANTS, tensors, write_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": None}, r"architectures \[\]; supported are .*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 2.0}}, "'axial' is not supported; .*'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "lacks rope's factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "lacks rope's factor"),
        ({"rope_scaling": LLAMA3_SCALING | {"factor": None}}, "lacks rope's factor"),
        ({"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 1.0}}, "must be above"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"head_dim": None, "hidden_size": 66}, "hidden_size=66 must be a multiple"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_model(tmp_path, tokenizer=False)
    rewritten = BASE | changes
    (tmp_path / "config.json").write_text(json.dumps(rewritten))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, "auto", CPU)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json"):
        load_model(tmp_path, "auto", CPU)


def test_both_spellings_of_rope_settings_mean_the_same() -> None:
    old = DecoderSettings.read(Config(BASE | {"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING}))
    theta_inside = {key: value for key, value in BASE.items() if key != "rope_theta"}
    new = DecoderSettings.read(Config(theta_inside | {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 5e5}}))
    assert old == new
    assert isinstance(old.ropes[0].scaling, Llama3Scaling)


def test_defaults_are_those_of_transformers() -> None:
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    given = {name: BASE[name] for name in ("architectures", *needed)}
    read = FAMILIES_SERVED["LlamaForCausalLM"].read(Config.of_model(given))
    assert (read.kv_heads, read.head_dim, read.context_length) == (4, 16, 2048)
    assert (read.norm_eps, read.ropes) == (1e-6, (RopeSettings(16, 10000.0, RopeScaling()),))
    assert (read.tied, read.qkv_bias, read.output_bias, read.mlp_bias) == (False, False, False, False)


@pytest.mark.parametrize(
    ("settings", "asked", "expected"),
    [
        ({"dtype": "bfloat16"}, "auto", torch.bfloat16),
        ({"dtype": None, "torch_dtype": "float16"}, "auto", torch.float16),
        ({"dtype": None, "torch_dtype": "torch.float32"}, "auto", torch.float32),
        ({"dtype": None}, "auto", torch.float32),
        ({"dtype": "bfloat16"}, "float32", torch.float32),
    ],
)
def test_auto_is_the_dtype_that_config_names(
    tmp_path: Path, settings: dict[str, Any], asked: str, expected: torch.dtype
) -> None:
    write_model(tmp_path, tokenizer=False)
    (tmp_path / "config.json").write_text(json.dumps(BASE | settings))
    assert load_model(tmp_path, asked, CPU).dtype == expected


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer=False)
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"dtype": "float64"}))
    with pytest.raises(ModelError, match="'float64' is not supported"):
        load_model(tmp_path, "auto", CPU)


CARDS: dict[str, dict[str, Any]] = VARIANTS | FAMILIES
CARDS["yarn"] = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
}
CARDS["dynamic"] = {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}


@pytest.mark.parametrize("name", list(CARDS))
def test_a_card_says_of_a_model_what_loading_it_says(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, **CARDS[name])
    card, model = ModelCard.from_folder(tmp_path), load_model(tmp_path, "auto", CPU)
    assert (card.context_length, card.vocab_size) == (model.context_length, model.vocab_size)
    assert card.parameters == sum(tensor.numel() for tensor in tensors(BASE | CARDS[name]).values())


def test_a_card_knows_the_defaults_of_a_decoder_inside_of_a_larger_model(tmp_path: Path) -> None:
    write_model(tmp_path)
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"num_hidden_layers": 2}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    card = ModelCard.from_folder(tmp_path)
    assert (card.architecture, card.context_length, card.vocab_size) == (nested["architectures"][0], 131072, 262208)


def test_every_family_is_documented_and_nothing_else() -> None:
    text = (Path(__file__).parents[3] / "docs" / "run" / "models.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+For\w+)` \|", text, re.MULTILINE)) == FAMILIES_SERVED.keys()
