"""A GGUF file is the model that it was made of: its logits, its tokens, its settings."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import ModelError
from engine.kernels.layer import PreparedLinear
from engine.kernels.packed import Int4Weight, Int8Weight
from engine.kernels.reference import Reference
from engine.models import Model, load_model, registry, shape_of
from engine.models.settings import RopeSettings
from engine.text import ModelCard
from engine.text import gguf as text_of_gguf
from engine.text.checkpoint import WHOLE_FILE, count_parameters, model_version
from engine.text.config import Config, read_config
from engine.text.files import read_files
from engine.text.gguf import GgufFile, header
from tests.engine.gguf_files import write_gguf
from tests.engine.quant.forward import in_chunks
from tests.engine.random_models import FAMILIES, VARIANTS, write_model

CPU = torch.device("cpu")
TOKENS = list(range(5, 75))
#: Gemma's scale of scores is that of a head's width in every file; windows of Qwen2 and layers without experts are not
#: told in one.
_CHANGED: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "qwen3-moe": {"mlp_only_layers": []},
}
_MODELS = {
    name: changes | _CHANGED.get(name, {})
    for name, changes in (VARIANTS | FAMILIES).items()
    if name not in ("qwen2-window", "qwen3-moe-steps")
}


def logits(model: Model) -> torch.Tensor:
    return model.logits(in_chunks(model, TOKENS, 32))


@pytest.mark.parametrize("name", _MODELS)
def test_a_file_of_each_family_computes_what_its_folder_computes(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "model", tokenizer=False, **_MODELS[name])
    file = write_gguf(folder, tmp_path / "model.gguf")
    ours, theirs = load_model(file, "float32", CPU), load_model(folder, "float32", CPU)
    assert torch.equal(logits(ours), logits(theirs))
    assert (ours.context_length, ours.rope_switch) == (theirs.context_length, theirs.rope_switch)
    assert count_parameters(file) == count_parameters(folder)


def rounded(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    raw = GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), raw), raw)).view(tensor.shape)


def dequantised(folder: Path, kind: str) -> Path:
    """The folder with its matrices rounded as the type rounds them, but for routers."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not name.endswith(".mlp.gate.weight"):
            tensors[name] = rounded(tensor, kind)
    save_file(tensors, folder / "model.safetensors")
    return folder


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


#: The distance of logits where weights are the same numbers (and products round rows to 16 bits).
SAME = 5e-4


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("name", ["mha", "qwen3-moe", "phi3", "gemma3"])
def test_weights_of_each_type_are_what_the_gguf_package_makes_of_them(tmp_path: Path, name: str, kind: str) -> None:
    folder = write_model(tmp_path / "model", tokenizer=False, **_MODELS[name])
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    ours, theirs = load_model(file, "float32", CPU), load_model(dequantised(folder, kind), "float32", CPU)
    assert distance(logits(ours), logits(theirs)) < SAME


def test_types_may_be_mixed_within_a_product(tmp_path: Path) -> None:
    """q and k in 4 bits are widened beside v in 8; one of the two of gate and up is not quantised at all."""
    folder = write_model(tmp_path / "model", tokenizer=False, **VARIANTS["mha"])
    kinds = {"attn_v": "Q8_0", "ffn_gate": "F32", "token_embd": "Q5_0"}
    file = write_gguf(folder, tmp_path / "model.gguf", "Q4_0", kinds)
    tensors = load_file(folder / "model.safetensors")
    theirs = {"v_proj": "Q8_0", "gate_proj": "F32", "embed_tokens": "Q5_0"}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            kind = next((kind for part, kind in theirs.items() if part in name), "Q4_0")
            tensors[name] = rounded(tensor, kind)
    save_file(tensors, folder / "model.safetensors")
    ours, reference = load_model(file, "float32", CPU), load_model(folder, "float32", CPU)
    assert distance(logits(ours), logits(reference)) < SAME


def test_with_other_kernels_the_weights_are_the_same(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tokenizer=False, **VARIANTS["mha"])
    file = write_gguf(folder, tmp_path / "model.gguf", "Q4_0")
    expected = logits(load_model(dequantised(folder, "Q4_0"), "float32", CPU))
    for kernels in ("sdpa", "ragged"):
        assert distance(logits(load_model(file, "float32", CPU, kernels)), expected) < SAME


def test_a_shape_has_the_products_of_the_model(tmp_path: Path) -> None:
    """As kernels are compiled ahead for a GPU: on the device "meta"."""
    folder = write_model(tmp_path / "model", tokenizer=False, **VARIANTS["mha"])
    file = write_gguf(folder, tmp_path / "model.gguf", "Q4_0", {"ffn_down": "Q8_0"})
    prepared: list[list[Any]] = []

    class Told(Reference):
        def prepare_quantised(self, weight: Int4Weight | Int8Weight, bias: torch.Tensor | None) -> PreparedLinear:
            prepared[-1].append((type(weight), weight.shape, weight.group))
            return super().prepare_quantised(weight, bias)

    for load in (shape_of, partial(load_model, device=CPU)):
        prepared.append([])
        load(file, "float32", kernels=Told)
    assert prepared[0] == prepared[1]
    assert {kind for kind, _, _ in prepared[0]} == {Int4Weight, Int8Weight}


@pytest.mark.parametrize(
    ("name", "device", "quantization", "kept"),
    [
        ("mha", "cpu", "none", True),
        ("mha", "cuda", "none", True),
        ("mha", "cuda", "fp8", False),
        ("qwen3-moe", "cpu", "none", True),
        ("qwen3-moe", "cuda", "none", False),
    ],
)
def test_weights_are_dequantised_where_there_are_no_products_for_them(
    tmp_path: Path, name: str, device: str, quantization: str, kept: bool
) -> None:
    folder = write_model(tmp_path / "model", tokenizer=False, **_MODELS[name])
    config = Config.of_model(read_config(write_gguf(folder, tmp_path / "a.gguf", "Q8_0")))
    assert (registry._scheme(folder, config, quantization, torch.device(device)) is not None) == kept


def test_the_log_says_what_becomes_of_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_gguf(write_model(tmp_path / "model", tokenizer=False), tmp_path / "a.gguf", "Q4_0")
    with caplog.at_level("INFO", "engine.models.registry"):
        load_model(file, "auto", CPU)
    assert "a.gguf: weights are Q4_0 (100%) as it is: 0.0 MB in memory, 0.99 times the file's" in caplog.text


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    file = write_gguf(write_model(tmp_path / "model", tokenizer=False), tmp_path / "a.gguf", "Q8_0")
    entry = GgufFile(file).tensors["blk.1.ffn_up.weight"]
    with file.open("r+b") as content:
        content.seek(entry.offset)
        content.write(np.array([np.inf], np.float16).tobytes())
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has scales that are no finite"):
        load_model(file, "auto", CPU)


def test_the_file_says_how_ropes_of_llama_3_are_scaled(tmp_path: Path) -> None:
    told = VARIANTS["llama3-rope"] | {"head_dim": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    told["rope_scaling"] = told["rope_scaling"] | {"original_max_position_embeddings": 8192}
    folder = write_model(tmp_path / "model", tokenizer=False, **told)
    file = write_gguf(folder, tmp_path / "model.gguf")
    assert read_config(file)["rope_scaling"] == told["rope_scaling"]
    # Other factors are taken one by one.
    folder = write_model(tmp_path / "other", tokenizer=False, **VARIANTS["llama3-rope"])
    of_file, of_folder = (
        RopeSettings.read(Config.of_model(read_config(path)).rope(), 16)
        for path in (write_gguf(folder, tmp_path / "other.gguf"), folder)
    )
    assert read_config(tmp_path / "other.gguf")["rope_scaling"]["rope_type"] == "divisors"
    torch.testing.assert_close(
        of_file.scaling.frequencies(of_file.theta, 16), of_folder.scaling.frequencies(of_folder.theta, 16)
    )


def test_an_engine_takes_texts_and_knows_the_ends(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **VARIANTS["gqa"])
    file = write_gguf(folder, tmp_path / "small-Q8_0.gguf", "Q8_0")
    config = EngineConfig(dtype="float32", kv_cache_bytes=1 << 20)
    with Engine.load(file, config) as ours, Engine.load(folder, config) as theirs:
        assert ours.card is not None
        assert theirs.card is not None
        assert ours.tokenizer is not None
        assert theirs.tokenizer is not None
        assert ours.card.name == "small-Q8_0"
        assert ours.card.context_length == theirs.card.context_length
        assert ours.tokenizer.eos_token_ids == theirs.tokenizer.eos_token_ids
        text = "def encode(self, text: str) -> list[int]:  # 1234 öé"
        assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
        assert ours.generate([text], SamplingParams(max_tokens=4))[0].token_ids


def test_a_version_is_of_the_content_and_not_of_the_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    file = write_gguf(folder, tmp_path / "a.gguf")
    version = model_version(file)
    assert model_version(file.rename(tmp_path / "b.gguf")) == version
    content = bytearray((tmp_path / "b.gguf").read_bytes())
    content[-1] ^= 1
    (tmp_path / "b.gguf").write_bytes(content)
    assert model_version(tmp_path / "b.gguf") != version


def test_a_template_changes_the_version_of_a_large_file_of_any_name(tmp_path: Path) -> None:
    """As Ollama names files. The sampled pages of a large file need not meet the template."""
    folder = write_model(tmp_path / "model", vocab_size=40_000, hidden_size=128)
    versions = set()
    for template in ("a" * 64, "b" * 64):

        def more(writer: gguf.GGUFWriter, text: str = template) -> None:
            writer.add_description("x" * 200_000)
            writer.add_chat_template(text)

        file = write_gguf(folder, tmp_path / "sha256-0123", more=more)
        assert file.stat().st_size > WHOLE_FILE
        versions.add(model_version(file))
    assert len(versions) == 2


class TestParts:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        folder = write_model(tmp_path / "model", **VARIANTS["mha"])
        write_gguf(folder, tmp_path / "split.gguf", split_max_tensors=8)
        return sorted(tmp_path.glob("split-*.gguf"))

    def test_are_one_model_whichever_is_named(self, parts: list[Path], tmp_path: Path) -> None:
        assert len(parts) == 3
        whole = write_gguf(tmp_path / "model", tmp_path / "whole.gguf")
        expected = logits(load_model(whole, "float32", CPU))
        for part in parts:
            assert torch.equal(logits(load_model(part, "float32", CPU)), expected)
        assert len({model_version(part) for part in parts}) == 1

    def test_are_refused_if_one_is_missing(self, parts: list[Path]) -> None:
        parts[1].unlink()
        with pytest.raises(ModelError, match=r"one of 3 parts; split-00002-of-00003\.gguf is missing"):
            load_model(parts[0], "auto", CPU)

    def test_are_refused_if_one_is_another(self, parts: list[Path]) -> None:
        parts[2].write_bytes(parts[1].read_bytes())
        with pytest.raises(ModelError, match="says that it is part 1 of 3"):
            load_model(parts[0], "auto", CPU)

    def test_may_be_links_of_a_cache(self, parts: list[Path], tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        cache.mkdir()
        for i, part in enumerate(parts):
            (cache / part.name).symlink_to(part.rename(tmp_path / f"blob{i}"))
        with Engine.load(cache / parts[0].name, EngineConfig(dtype="float32", kv_cache_bytes=1 << 20)) as engine:
            assert engine.card is not None
            assert engine.card.name == "split"


def test_a_folder_with_one_file_is_its_model_and_with_several_none(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    alone = tmp_path / "alone"
    alone.mkdir()
    write_gguf(folder, alone / "a.gguf")
    assert load_model(alone, "auto", CPU).vocab_size == 320
    write_gguf(folder, alone / "b.gguf")
    with pytest.raises(ModelError, match="several models: a, b; give one of their files"):
        load_model(alone, "auto", CPU)


def test_what_the_file_recommends_are_the_models_defaults(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    file = write_gguf(folder, tmp_path / "a.gguf", more=lambda writer: writer.add_float32("general.sampling.temp", 0.5))
    with Engine.load(file, EngineConfig(kv_cache_bytes=1 << 20)) as engine:
        assert engine.card is not None
        assert engine.card.defaults == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("general.architecture", "mamba", "general.architecture='mamba', which is not served; llama, qwen2"),
        ("llama.rope.scaling.type", "su", "rope.scaling.type='su' is not served"),
        ("llama.attention.value_length", 8, "values of another width"),
        ("llama.attention.head_count", 0, "attention.head_count=0"),
        ("llama.block_count", 1 << 31, "block_count=2147483648 must be from 1"),
        ("llama.context_length", 0, "max_position_embeddings=0 must be"),
        ("tokenizer.ggml.model", "t5", "tokenizer.ggml.model='t5', which is not served"),
        ("tokenizer.ggml.pre", "martian", "tokenizer.ggml.pre='martian', which is not served"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, key: str, value: str | int, named: str) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        kind = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
        writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, kind)

    file = write_gguf(write_model(tmp_path / "model"), tmp_path / "a.gguf", more=change)
    with pytest.raises(ModelError) as caught:
        Engine.load(file, EngineConfig(kv_cache_bytes=1 << 20))
    assert named in str(caught.value)


def test_config_is_a_json_object_that_config_json_could_hold(tmp_path: Path) -> None:
    file = write_gguf(write_model(tmp_path / "model"), tmp_path / "a.gguf")
    assert json.loads(json.dumps(read_config(file))) == read_config(file)


def test_a_header_and_a_tokenizer_are_read_once_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(write_model(tmp_path / "model"), tmp_path / "a.gguf", split_max_tensors=8)
    file, *_, last = sorted(tmp_path.glob("a-*.gguf"))
    parsed: list[Path] = []
    tokenizers: list[Path] = []
    init, made = header.GgufFile.__init__, text_of_gguf.tokenizer_files

    def counted(self: GgufFile, path: Path) -> None:
        parsed.append(path)
        init(self, path)

    def counted_tokenizer(gguf_file: GgufFile) -> dict[str, bytes]:
        tokenizers.append(gguf_file.path)
        return made(gguf_file)

    monkeypatch.setattr(header.GgufFile, "__init__", counted)
    monkeypatch.setattr(text_of_gguf, "tokenizer_files", counted_tokenizer)
    for _ in range(2):
        read_config(file)
        version = model_version(file)
        card = ModelCard.from_folder(file)
        count_parameters(file)
        files = read_files(file)
        files.clear()  # a caller's own
    assert (len(parsed), len(tokenizers)) == (1, 1)
    last.write_bytes(last.read_bytes() + b"\0" * 32)
    assert model_version(file) != version
    assert ModelCard.from_folder(file).version != card.version
    assert (len(parsed), len(tokenizers)) == (2, 2)
