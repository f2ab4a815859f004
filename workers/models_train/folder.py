"""A trained network as a Hugging Face folder that transformers and Penstock load unchanged."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import Tokenizer

from workers.models_train.llama import Llama, Shape
from workers.models_train.tokenizer import CHAT_TEMPLATE, END_ID, END_OF_TEXT, END_OF_TEXT_ID, SPECIAL_TOKENS


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


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
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
