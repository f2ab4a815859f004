"""Folders that lie, are broken, or are out to do harm: refused by name, in little memory and time."""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig
from engine.errors import ModelError
from engine.models import load_model
from engine.text.checkpoint import count_parameters
from engine.text.config import Config
from engine.text.tensors import INDEX, SINGLE
from tests.engine.random_models import BASE, FAMILIES, write_model

CPU = torch.device("cpu")
HUGE = 10**400
#: More than reading the largest header that is read takes, and far less than what any of these folders ask for.
_MOST_GROWTH = 400 << 20

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _in_little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < _MOST_GROWTH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", tokenizer=False)


def refused(folder: Path, *named: str) -> None:
    """Refused with a message for people: it names what is wrong, and is no flood."""
    with pytest.raises(ModelError) as caught:
        load_model(folder, "auto", CPU)
    message = str(caught.value)
    assert all(part in message for part in named), message
    assert len(message) < 1000


SIZES = [0, -1, -(10**18), 2**31, 2**62, 2**64, HUGE, 64.0, "64", [64], {"a": 64}, True, float("nan"), float("inf")]
NUMBERS = [0, -1.0, float("nan"), float("inf"), float("-inf"), HUGE, -HUGE, "1e-5", [1], {}, True]


@pytest.mark.parametrize("value", SIZES)
@pytest.mark.parametrize(
    "name",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_sizes(folder: Path, name: str, value: object) -> None:
    (folder / "config.json").write_text(json.dumps(BASE | {name: value}))
    refused(folder, name)


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_numbers(folder: Path, name: str, value: object) -> None:
    (folder / "config.json").write_text(json.dumps(BASE | {name: value}))
    refused(folder, name)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 1 << 22, "hidden_size": 1 << 20},
        {"intermediate_size": 1 << 22},
        {"hidden_size": 65, "head_dim": 16},
        {"num_attention_heads": 1 << 18, "num_key_value_heads": 1 << 18},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"tie_word_embeddings": False},
    ],
)
def test_what_does_not_go_with_the_checkpoint_is_found_before_memory_is_taken(
    folder: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []
    empty = torch.empty

    def counting(*shape: Any, **how: Any) -> torch.Tensor:
        made.append(empty(*shape, **how))
        return made[-1]

    monkeypatch.setattr(torch, "empty", counting)
    (folder / "config.json").write_text(json.dumps(BASE | changes))
    refused(folder, str(folder))
    assert sum(tensor.nbytes for tensor in made if tensor.device.type != "meta") < 1000


ROPES: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": "yarn"}, "rope_scaling"),
    ({"rope_parameters": [1]}, "rope_parameters"),
    ({"rope_parameters": {"full_attention": 3}}, "full_attention"),
    ({"rope_scaling": {"rope_type": ["linear"], "factor": 2}}, "rope_type"),
    ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": HUGE}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "factor"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e9}}, "factor"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "factor"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}}, "beta_fast"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0}}, "original_max"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": HUGE}}, "original_max"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": "no"}}, "truncate"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": "a", "mscale_all_dim": 1}}, "mscale"),
    ({"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_theta"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}, "short_factor"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 100_000}}, "long_factor"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 7 + [0], "long_factor": [1] * 8}}, "short_"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 7 + [HUGE], "long_factor": [1] * 8}}, "short_"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 7 + ["1"], "long_factor": [1] * 8}}, "short_"),
    ({"partial_rotary_factor": 0}, "partial_rotary_factor"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ({"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
]


@pytest.mark.parametrize(("changes", "named"), ROPES)
def test_rope_settings(folder: Path, changes: dict[str, Any], named: str) -> None:
    (folder / "config.json").write_text(json.dumps(BASE | changes))
    refused(folder, named)


OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("gqa", {"architectures": "LlamaForCausalLM"}, "architectures"),
    ("gqa", {"architectures": [["LlamaForCausalLM"]]}, "architectures"),
    ("gqa", {"architectures": {"LlamaForCausalLM": 1}}, "architectures"),
    ("gqa", {"architectures": ["x" * 100_000]}, "architectures"),
    ("gqa", {"dtype": {"a": 1}}, "dtype"),
    ("gqa", {"dtype": "f" * 100_000}, "dtype"),
    ("gqa", {"hidden_act": ["silu"]}, "hidden_act"),
    ("gqa", {"attention_bias": 1}, "attention_bias"),
    ("gqa", {"quantization_config": {}}, "quantization_config"),
    ("mistral-window", {"sliding_window": 0}, "sliding_window"),
    ("mistral-window", {"sliding_window": -5}, "sliding_window"),
    ("mistral-window", {"sliding_window": HUGE}, "sliding_window"),
    ("mistral-window", {"sliding_window": 2.5}, "sliding_window"),
    ("mistral-window", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ("qwen2-window", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ("qwen2-window", {"layer_types": [["sliding_attention"]] * 4}, "layer_types"),
    ("qwen2-window", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("qwen2-window", {"layer_types": "sliding_attention"}, "layer_types"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window"),
    ("qwen2", {"max_window_layers": -1}, "max_window_layers"),
    ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping"),
    ("gemma2", {"final_logit_softcapping": float("nan")}, "final_logit_softcapping"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation"),
    ("gemma2", {"sliding_window": None}, "sliding_window"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config"),
    ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": [1]}, "text_config"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
    ("mixtral", {"num_local_experts": HUGE}, "num_local_experts"),
    ("mixtral", {"num_local_experts": 80}, "80 experts (num_local_experts); the checkpoint has 79 tensors"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("mixtral", {"num_experts": 5}, "num_experts"),
    ("qwen3-moe", {"num_experts": 5}, "experts.5"),
    ("qwen3-moe", {"num_experts": 7}, "experts.6"),
    ("qwen3-moe", {"moe_intermediate_size": 31}, "experts.0"),
    ("qwen3-moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
    ("qwen3-moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
    ("qwen3-moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
    ("qwen3-moe", {"mlp_only_layers": [0, 1]}, "layers.0.mlp"),
    ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("phi3", {"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "rope_type"),
]


@pytest.mark.parametrize(("variant", "changes", "named"), OTHERS)
def test_settings_of_families(tmp_path: Path, variant: str, changes: dict[str, Any], named: str) -> None:
    known = FAMILIES.get(variant, {})
    write_model(tmp_path, tokenizer=False, **known)
    (tmp_path / "config.json").write_text(json.dumps(BASE | known | changes))
    refused(tmp_path, named)


def outside(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")


def fifo(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


def loop(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name)


def directory(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()


def device(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")


@pytest.mark.parametrize("trick", [outside, fifo, loop, directory, device])
@pytest.mark.parametrize("name", ["config.json", SINGLE, INDEX, "model-00002-of-00003.safetensors"])
def test_files_that_are_none_or_lead_out(tmp_path: Path, name: str, trick: Callable[[Path, str], None]) -> None:
    folder = write_model(tmp_path / "model", tokenizer=False, shards=1 if name == SINGLE else 3)
    trick(folder, name)
    refused(folder, name)


def test_links_within_the_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    write_model(snapshot, tokenizer=False)
    blobs.mkdir()
    for i, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(i))
        path.symlink_to(Path("..") / ".." / "blobs" / str(i))
    load_model(snapshot, "auto", CPU)
    assert count_parameters(snapshot) > 0


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 100_000,
        '{"hidden_size": 1' + "0" * 5000 + "}",
        "\xff\xfe{}",
        "{} " + " " * (5 << 20),
        '"' + "a" * 1000,
        "nan",
        "",
        "\x00",
        "[]",
        "{}",
        '{"weight_map": []}',
    ],
)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_that_is_none(tmp_path: Path, name: str, text: str) -> None:
    write_model(tmp_path, tokenizer=False, shards=2)
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    refused(tmp_path, name)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes


HEADERS: dict[str, Any] = {
    "a shape larger than the file": {"a": entry(shape=[10**6, 10**6])},
    "a shape that overflows": {"a": entry(shape=[2**40, 2**40])},
    "a dimension of 400 digits": {"a": entry(shape=[HUGE])},
    "a negative dimension": {"a": entry(shape=[-2, -2])},
    "a dimension that is no integer": {"a": entry(shape=[2.0, 2])},
    "a dimension that is a truth": {"a": entry(shape=[True, 4])},
    "a million dimensions": {"a": entry(shape=[1] * 1_000_000)},
    "no shape": {"a": entry(shape=None)},
    "a dtype of its own": {"a": entry(dtype="F1000")},
    "a dtype that is no text": {"a": entry(dtype=["F32"])},
    "a place behind the end": {"a": entry(data_offsets=[16, 32])},
    "a place from the end to the beginning": {"a": entry(data_offsets=[16, 0])},
    "a negative place": {"a": entry(data_offsets=[-16, 0])},
    "three places": {"a": entry(data_offsets=[0, 8, 16])},
    "an entry that is none": {"a": 7},
    "a tensor smaller than the file": {"a": entry(shape=[2], data_offsets=[0, 8])},
    "no object": [1, 2],
    "nesting": None,
}


@pytest.mark.parametrize("lie", list(HEADERS))
def test_headers_that_lie(folder: Path, lie: str) -> None:
    text = b'{"a":' * 50_000 if HEADERS[lie] is None else json.dumps(HEADERS[lie]).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    refused(folder, SINGLE)
    with pytest.raises(ModelError, match=SINGLE):
        count_parameters(folder)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 1 << 40, 17 << 20])
def test_headers_that_are_too_long(folder: Path, length: int) -> None:
    with (folder / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", length))
        # With holes, so that the file is as long as it says.
        file.truncate(min(length + 100, 1 << 32))
    refused(folder, SINGLE)


def test_tensors_that_lie_over_one_another(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    twin, other = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    header[other]["data_offsets"] = header[twin]["data_offsets"]
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    refused(folder, SINGLE)


def test_a_context_of_millions_takes_no_memory_by_itself(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(BASE | {"max_position_embeddings": 1 << 27}))
    with Engine.load(folder, EngineConfig(kv_cache_bytes=1 << 20, max_num_seqs=256, threads=1)) as engine:
        assert engine.max_model_len == 1 << 27
        assert engine.generate([[1, 2, 3]])[0].token_ids


def test_a_value_is_shown_as_far_as_a_message_can_bear() -> None:
    with pytest.raises(ModelError, match=r"x='a+\.\.\. \(1000002 characters\) must be"):
        Config({"x": "a" * 1_000_000}).integer("x")
