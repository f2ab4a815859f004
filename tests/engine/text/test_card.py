from __future__ import annotations

import json
import math
import struct
from hashlib import sha256
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.text.card import ModelCard
from engine.text.checkpoint import WHOLE_FILE, model_version
from engine.text.tensors import INDEX

TENSORS = {"a": [3, 4], "b": [5], "c": []}


def write_safetensors(path: Path, tensors: dict[str, list[int]], padding: int = 0) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    data = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(file.tell() + end + padding)


@pytest.fixture
def folder(byte_level, tmp_path) -> Path:
    root = tmp_path / "tiny"
    root.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 512,
        "vocab_size": 640,
        "eos_token_id": 1,
    }
    (root / "config.json").write_text(json.dumps(config))
    (root / "tokenizer.json").write_text(byte_level.to_str())
    (root / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (root / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 5, "top_k": 20, "x": 1}))
    write_safetensors(root / "model-1.safetensors", TENSORS)
    write_safetensors(root / "model-2.safetensors", {"d": [2, 2, 2]})
    shard_of = dict.fromkeys(TENSORS, "model-1.safetensors") | {"d": "model-2.safetensors"}
    (root / INDEX).write_text(json.dumps({"weight_map": shard_of}))
    return root


def test_a_card_says_what_the_folder_holds(folder):
    card = ModelCard.from_folder(folder)
    assert (card.name, card.architecture, card.context_length) == ("tiny", "LlamaForCausalLM", 512)
    assert (card.vocab_size, card.parameters) == (640, 12 + 5 + 1 + 8)
    assert card.capabilities == ("generate", "chat")
    assert (card.eos_token_ids, card.bos_token_id) == ((1,), None)
    # top_p=5 is nothing that a request could ask for.
    assert card.defaults == {"temperature": 0.6, "top_k": 20}
    assert card.version == model_version(folder)
    files = ModelCard.tokenizer_files(folder)
    assert card.files == {name: sha256(data).hexdigest() for name, data in files.items()}
    assert sorted(files) == ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert ModelCard.from_folder(folder, name="other").name == "other"


def test_without_a_template_there_is_no_chat(folder):
    (folder / "tokenizer_config.json").unlink()
    assert ModelCard.from_folder(folder).capabilities == ("generate",)


KNOWN = (
    '{"v":1,"name":"tiny","version":"0123456789ab","architecture":"LlamaForCausalLM","context_length":512,'
    '"vocab_size":640,"parameters":26,"capabilities":["generate","chat"],"eos_token_ids":[1,2],"bos_token_id":null,'
    '"defaults":{"temperature":0.6},"files":{"tokenizer.json":"ab"},"created":1700000000}'
)


def test_the_format_is_fixed():
    card = ModelCard(
        name="tiny",
        version="0123456789ab",
        architecture="LlamaForCausalLM",
        context_length=512,
        vocab_size=640,
        parameters=26,
        capabilities=("generate", "chat"),
        eos_token_ids=(1, 2),
        bos_token_id=None,
        defaults={"temperature": 0.6},
        files={"tokenizer.json": "ab"},
        created=1700000000,
    )
    assert card.to_json() == KNOWN
    assert ModelCard.from_json(KNOWN) == card
    assert ModelCard.from_json(KNOWN.encode()) == card


def test_keys_of_later_versions_are_passed_over():
    later = json.dumps(json.loads(KNOWN) | {"licence": "MIT", "context": {"rope": 1}})
    assert ModelCard.from_json(later) == ModelCard.from_json(KNOWN)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "v=1"),
        ('{"v": 2}', "v=1"),
        ('{"v": 1, "name": "x"}', "lacks 'version'"),
        (KNOWN.replace("[1,2]", "1"), "eos_token_ids=1"),
    ],
)
def test_a_text_that_is_no_card_is_refused(text, message):
    with pytest.raises(ModelError, match=message):
        ModelCard.from_json(text)


def test_a_version_is_that_of_the_manifest_where_there_is_one(folder):
    before = model_version(folder)
    (folder / "manifest.json").write_bytes(b"{}")
    assert model_version(folder) == sha256(b"{}").hexdigest()[:12] != before


def test_a_version_follows_names_sizes_and_contents_as_written_down(tmp_path):
    (tmp_path / "b.json").write_bytes(b"two")
    (tmp_path / "a.json").write_bytes(b"one")
    (tmp_path / ".hidden.json").write_bytes(b"x")
    (tmp_path / "README.md").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    lines = "".join(
        f"{name}\t3\t{sha256(data).hexdigest()}\n" for name, data in [("a.json", b"one"), ("b.json", b"two")]
    )
    assert model_version(tmp_path) == sha256(lines.encode()).hexdigest()[:12]
    seen = {model_version(tmp_path)}
    (tmp_path / "a.json").write_bytes(b"One")
    seen.add(model_version(tmp_path))
    (tmp_path / "a.json").rename(tmp_path / "c.json")
    seen.add(model_version(tmp_path))
    assert len(seen) == 3


@pytest.mark.parametrize(
    "readme",
    [
        b"---\npipeline_tag: feature-extraction\nmodel-index:\n" + b"  - metric: 0.5\n" * 100_000 + b"---\n# A model\n",
        b"---\n" + b"pipeline_tag: text-ranking\n" * 10_000 + b"---\n" * 100_000 + b"# Another\n",
    ],
    ids=["longer than a mebibyte", "of many lines that a reranker's has one of"],
)
def test_a_readme_neither_changes_a_version_nor_is_refused(folder, readme):
    before = model_version(folder), ModelCard.from_folder(folder).capabilities
    path = folder / "README.md"
    path.write_bytes(readme)
    assert (model_version(folder), ModelCard.from_folder(folder).capabilities) == before
    path.rename(folder.parent / "elsewhere.md")
    path.symlink_to(folder.parent / "elsewhere.md")
    assert (model_version(folder), ModelCard.from_folder(folder).capabilities) == before


def test_the_version_of_a_large_file_takes_its_header_and_its_pages(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, TENSORS, padding=WHOLE_FILE + 1000)
    size = path.stat().st_size
    data = path.read_bytes()
    header = data[8 : 8 + struct.unpack("<Q", data[:8])[0]]
    pages = b"".join(data[start : start + 65536] for start in ((size - 65536) * page // 63 for page in range(64)))
    line = f"model.safetensors\t{size}\t{sha256(header + pages).hexdigest()}\n"
    assert model_version(tmp_path) == sha256(line.encode()).hexdigest()[:12]
    first = model_version(tmp_path)
    with path.open("r+b") as file:
        file.seek(size - 1)
        file.write(b"\x01")
    assert model_version(tmp_path) != first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": None}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"max_position_embeddings": "512"}, "max_position_embeddings='512'"),
        ({"vocab_size": True}, "vocab_size=True"),
    ],
)
def test_a_broken_config_is_refused_by_setting(folder, change, message):
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        ModelCard.from_folder(folder)


def test_a_folder_without_weights_has_no_card(folder):
    (folder / INDEX).unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        ModelCard.from_folder(folder)
