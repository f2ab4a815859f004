"""A tokenizer.json that means harm: refused, or refused at the text that it fails on; the process goes on."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError, RequestError
from engine.text import Tokenizer
from engine.text.files import LONGEST, read_files

TINY = Path(__file__).parents[3] / "workers" / "models" / "tiny" / "tokenizer.json"
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


def made(**parts: Any) -> dict[str, bytes]:
    """The bundled model's, with other parts."""
    return {"tokenizer.json": json.dumps(json.loads(TINY.read_text()) | parts).encode()}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(kind: str, parts: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: parts}


def template(single: list[Any], ids: list[int]) -> dict[str, Any]:
    both = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    token = {"id": "x", "ids": ids, "tokens": ["x"] * len(ids)}
    return {"type": "TemplateProcessing", "single": single, "pair": both, "special_tokens": {"x": token}}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
PIECE = {"SpecialToken": {"id": "x", "type_id": 0}}
HARMFUL: dict[str, tuple[dict[str, Any], str]] = {
    "a long replacement": ({"normalizer": replace({"String": "a"}, "a" * 100_000)}, "normalizer that makes a text"),
    "replacements that multiply": (
        {"normalizer": sequence("normalizers", [replace({"String": "a"}, "a" * 16)] * 8)},
        "64 times longer",
    ),
    "a replacement at every place": ({"normalizer": replace({"Regex": ""}, "a" * 40)}, "64 times longer"),
    "a long beginning": ({"normalizer": {"type": "Prepend", "prepend": "a" * 1_000_000}}, "1000000 pieces around"),
    "nested deep": (
        {"normalizer": sequence("normalizers", [sequence("normalizers", [replace({"String": "a"}, "a" * 65)])])},
        "normalizer",
    ),
    "a decoder that multiplies": (
        {"decoder": sequence("decoders", [replace({"String": "a"}, "x" * 1_000_000)])},
        "decoder that makes a text",
    ),
    "beginnings that add up": (
        {"normalizer": sequence("normalizers", [{"type": "Prepend", "prepend": "a" * 40}] * 2000)},
        "80 pieces around",
    ),
    "special tokens that are many, many times": ({"post_processor": template([PIECE] * 60, [0] * 60)}, "3600 pieces"),
    "a text many times": ({"post_processor": template([TEXT] * 100, [0])}, "64 times longer"),
    "special tokens without end": ({"post_processor": template([PIECE] * 1000, [0])}, "1000 pieces around"),
    "one that is many": ({"post_processor": template([PIECE], [0] * 1000)}, "1000 pieces around"),
    "a table of four gigabytes": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}},
        "precompiled_charsmap",
    ),
    "an empty table": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "precompiled_charsmap"),
    "a table of nothing": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4)).decode()}},
        "tokenizer.json",
    ),
    "a table that is none": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": 5}}, "charsmap"),
    "a pattern nested too deep": (
        {"pre_tokenizer": SPLIT | {"pattern": {"Regex": "(" * 5000 + "a" + ")" * 5000}}},
        "tokenizer.json cannot be used",
    ),
    "a negative id": ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, "tokenizer.json cannot be used"),
    "a vocabulary of nothing": (
        {"model": {"type": "Unigram", "unk_id": None, "vocab": [], "byte_fallback": False}},
        "tokenizer.json cannot be used",
    ),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_what_would_do_harm_is_refused_when_it_is_read(name: str) -> None:
    parts, says = HARMFUL[name]
    with pytest.raises(ModelError, match=says):
        Tokenizer(made(**parts))


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$"])
def test_a_pattern_that_backtracks_for_ever_fails_on_its_text_alone(pattern: str) -> None:
    tokenizer = Tokenizer(made(pre_tokenizer=SPLIT | {"pattern": {"Regex": pattern}}))
    with pytest.raises(RequestError, match="tokenizer fails on this text") as caught:
        tokenizer.encode("a" * 4000 + "!")
    assert caught.value.param == "prompt"
    assert tokenizer.encode("b")


def test_chance_has_no_part_in_encoding() -> None:
    model = json.loads(TINY.read_text())["model"]
    plain, dropping = Tokenizer(made()), Tokenizer(made(model=model | {"dropout": 0.9}))
    text = "def function(arguments): return None"
    assert [dropping.encode(text) for _ in range(5)] == [plain.encode(text)] * 5


def test_ids_out_of_any_vocabulary_are_only_ids() -> None:
    tokenizer = Tokenizer(
        made(post_processor=template([PIECE, {"Sequence": {"id": "A", "type_id": 0}}], [(1 << 32) - 1]))
    )
    ids = tokenizer.encode("a")
    assert ids[0] == (1 << 32) - 1
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.token_bytes(ids[0]) == b""


def test_what_real_tokenizers_do_is_fine(byte_fallback: Any) -> None:
    Tokenizer({"tokenizer.json": byte_fallback.to_str().encode()})
    Tokenizer(made(normalizer=sequence("normalizers", [{"type": "NFKC"}, replace({"Regex": " {2,}"}, "▁")])))
    Tokenizer(made(post_processor=template([PIECE, {"Sequence": {"id": "A", "type_id": 0}}], [0])))


def test_a_file_of_enormous_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(LONGEST + 1)  # of holes
    with pytest.raises(ModelError, match=f"{LONGEST + 1} bytes"):
        read_files(tmp_path)
