"""Writes and reads a trained network as a Hugging Face folder, which transformers and Penstock load unchanged."""

import json
import os
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer

from infra.models.llama import Llama, Shape
from infra.models.tokenizer import CHAT_TEMPLATE, END_ID, END_OF_TEXT, END_OF_TEXT_ID, SPECIAL_TOKENS

#: The sizes of `Shape` that have other names in config.json.
_CONFIG_NAMES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}


def write_folder(folder: Path, model: Llama, tokenizer: Tokenizer, card: str) -> None:
    """Write every file of the folder, weights in bf16. Each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    _write(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))
    _write(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(model.shape))
    _write_json(folder / "config.json", _config(model.shape))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": [END_OF_TEXT_ID, END_ID],
            "pad_token_id": END_OF_TEXT_ID,
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.95,
        },
    )
    _write(folder / "README.md", card.encode())


def read_folder(folder: Path) -> Llama:
    """Read the network, in fp32, from a folder that `write_folder` wrote."""
    config = json.loads((folder / "config.json").read_text())
    names = [field.name for field in fields(Shape)]
    model = Llama(Shape(**{name: config[_CONFIG_NAMES.get(name, name)] for name in names}))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    return model


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{_CONFIG_NAMES.get(name, name): value for name, value in asdict(shape).items()},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


def _tokenizer_config(shape: Shape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token != END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    _write(path, (json.dumps(content, indent=2) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
