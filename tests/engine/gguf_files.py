"""GGUF files of random models, written by the `gguf` package as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from engine.text.config import Config

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
}


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    kinds: dict[str, str] | None = None,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **how: Any,
) -> Path:
    """Write the model of a folder as a GGUF file. `kind`: the type of its matrices; `kinds`: of some, by a part of
    their GGUF names. `more` is called at the end, to change the metadata. `how`: of the writer."""
    settings = json.loads((folder / "config.json").read_text())
    config = Config.of_model(settings)
    architecture = ARCHITECTURES[settings["architectures"][0]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], **how)
    _add_settings(writer, config, settings)
    if (folder / "tokenizer.json").exists():
        add_tokenizer(writer, folder)
    names = gguf.get_tensor_name_map(architecture, settings["num_hidden_layers"])
    for name, tensor in _in_layout(settings, load_file(folder / "model.safetensors"), architecture).items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        chosen = next((each for part, each in (kinds or {}).items() if part in ours), kind)
        _add_tensor(writer, ours, tensor.float(), "F32" if tensor.dim() == 1 or "ffn_gate_inp" in ours else chosen)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> None:
    if kind in ("F32", "F16"):
        writer.add_tensor(name, tensor.numpy().astype(np.float32 if kind == "F32" else np.float16))
        return
    raw = GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), raw), raw_dtype=raw)


def _add_settings(writer: gguf.GGUFWriter, config: Config, settings: dict[str, Any]) -> None:
    head_dim = settings["head_dim"]
    rope = config.rope()
    writer.add_name("a random model")
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope.number("rope_theta"))
    writer.add_rope_dimension_count(int(head_dim * rope.number("partial_rotary_factor", 1.0)))
    writer.add_vocab_size(settings["vocab_size"])
    if settings.get("sliding_window") and settings.get("use_sliding_window", True):
        writer.add_sliding_window(settings["sliding_window"])
    experts = settings.get("num_experts") or settings.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(settings["num_experts_per_tok"])
    if "moe_intermediate_size" in settings:
        writer.add_expert_feed_forward_length(settings["moe_intermediate_size"])
    if settings.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(settings["attn_logit_softcapping"])
    if settings.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(settings["final_logit_softcapping"])
    if "rope_local_base_freq" in settings:
        writer.add_rope_freq_base_swa(settings["rope_local_base_freq"])
    if "sliding_window_pattern" in settings:
        writer.add_uint32("gemma3.attention.sliding_window_pattern", settings["sliding_window_pattern"])
    match rope.text("rope_type"):
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope.number("factor"))
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope.number("factor"))
            writer.add_rope_scaling_orig_ctx_len(rope.integer("original_max_position_embeddings"))
        case "longrope":
            writer.add_rope_scaling_orig_ctx_len(rope.integer("original_max_position_embeddings"))
            for which in ("long", "short"):
                listed = np.array(settings["rope_scaling"][f"{which}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{which}.weight", listed)
        case "llama3":
            from engine.layers.attention import plain
            from engine.models.settings import RopeSettings

            read = RopeSettings.read(rope, head_dim)
            factors = plain(read.theta, head_dim) / read.scaling.frequencies(read.theta, head_dim)
            writer.add_tensor("rope_freqs.weight", factors.numpy())


def _in_layout(
    settings: dict[str, Any], tensors: dict[str, torch.Tensor], architecture: gguf.MODEL_ARCH
) -> dict[str, torch.Tensor]:
    """The tensors as llama.cpp lays them out, by transformers' names but for experts, which are stacked."""
    laid: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if architecture == gguf.MODEL_ARCH.LLAMA and (".q_proj." in name or ".k_proj." in name):
            heads = settings["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if architecture in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3) and name.endswith("norm.weight"):
            tensor = tensor + 1
        if ".experts." in name:
            block, _, rest = name.partition(".experts.")
            i, _, matrix = rest.partition(".")
            experts.setdefault(f"{block}.experts.{matrix}", {})[int(i)] = tensor
        else:
            laid[name] = tensor
    for name, each in experts.items():
        laid[name] = torch.stack([each[i] for i in sorted(each)])
    return laid


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str = "gpt-2") -> None:
    """Add the byte-level tokenizer of a folder."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if config.get("bos_token"):
        writer.add_bos_token_id(vocabulary[config["bos_token"]])
    if config.get("eos_token"):
        writer.add_eos_token_id(vocabulary[config["eos_token"]])
    writer.add_add_bos_token(False)
    if "chat_template" in config:
        writer.add_chat_template(config["chat_template"])
