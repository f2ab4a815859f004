"""The tokenizer in a GGUF file: as transformers makes it of the file, and as SentencePiece's algorithm has it."""

from __future__ import annotations

import importlib
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import normalizers

from engine.errors import ModelError
from engine.text import ChatTemplate, Tokenizer
from engine.text.files import has_tokenizer, read_files
from tests.engine.gguf_files import add_tokenizer
from tests.engine.random_models import write_tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = [
    "def encode(self, text: str) -> list[int]:\n    return 12345 + x['it''s']\n\n\n",
    "Hello  world, it's 2024; WE'LL see.\r\n\r\n\tnaïve café — 你好，世界 🙂 e\u0301",
    "camelCaseHTTPServer <|end|> Ünïcödé ١٢٣ ///\n//",
    " ",
    "",
]


def byte_level(tmp_path: Path, pre: str, **entries: Any) -> Path:
    write_tokenizer(tmp_path, 400)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    add_tokenizer(writer, tmp_path, pre)
    return finished(writer, tmp_path / "a.gguf", entries)


def finished(writer: gguf.GGUFWriter, path: Path, entries: dict[str, Any]) -> Path:
    """Add `entries` of the tokenizer, what a model must have, and write the file."""
    for name, value in entries.items():
        kind = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING}
        writer.kv_data[0][f"tokenizer.{name}"] = gguf.gguf_writer.GGUFValue(value, kind[type(value)])
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((400, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "gpt-4o", "tekken", "dbrx", "default"])
def test_byte_level_texts_are_split_as_transformers_splits_them(tmp_path: Path, pre: str) -> None:
    file = byte_level(tmp_path, pre)
    ours = Tokenizer(read_files(file))
    oracle = importlib.import_module("transformers.integrations.gguf")
    architecture, read, _ = oracle.get_gguf_tokenizer(str(file))
    theirs, _ = oracle.convert_gguf_tokenizer(architecture, read)
    if pre == "qwen2":  # as in the published tokenizer.json of Qwen 2, 2.5 and 3
        theirs.normalizer = normalizers.NFC()
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected
        assert ours.decode(expected) == theirs.decode(expected)


def test_smollms_digits_stand_alone(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 400)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    tokenizer = Tokenizer(read_files(byte_level(tmp_path, "smollm")))
    assert tokenizer.encode("4096") == [vocabulary[digit] for digit in "4096"]


#: Of a SentencePiece vocabulary: letters, and longer pieces, whose scores are not in the order of their length.
LETTERS = "▁abcdefghijklmnopqrstuvwxyz.,"
PIECES = ["▁t", "he", "▁the", "in", "er", "▁a", "on", "re", "▁▁", "ing", "and", "▁and", "th", "▁th", "ther", "▁▁▁▁"]


def sentencepiece(tmp_path: Path, *, architecture: str = "llama", name: str = "a model", **entries: Any) -> Path:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *LETTERS, *PIECES, "<|user|>", "<tool>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(LETTERS) + len(PIECES)), 3, 4]
    generator = random.Random(0)
    order = list(range(len(PIECES)))
    generator.shuffle(order)
    scores = [0.0] * 259 + [-1000.0] * len(LETTERS) + [-float(i) for i in order] + [0.0, 0.0]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", architecture)
    writer.add_name(name)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    defaults = {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0}
    return finished(writer, tmp_path / "a.gguf", defaults | entries)


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's own way: the two neighbours that together have the best score merge, the first of equals."""
    pieces = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not pairs:
            return pieces
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_sentencepieces_best_pair_merges_first(tmp_path: Path) -> None:
    file = sentencepiece(tmp_path)
    tokenizer = Tokenizer(read_files(file))
    reader = gguf.GGUFReader(file)
    tokens = [
        bytes(reader.fields["tokenizer.ggml.tokens"].parts[i]).decode()
        for i in reader.fields["tokenizer.ggml.tokens"].data
    ]
    scores = [
        float(reader.fields["tokenizer.ggml.scores"].parts[i][0]) for i in reader.fields["tokenizer.ggml.scores"].data
    ]
    of_piece = dict(zip(tokens, scores, strict=True))
    generator = random.Random(1)
    for _ in range(50):
        text = "".join(generator.choices(["the", "ther", "and", "in", "ing", " ", "a", "other", "ere"], k=12))
        expected = merged("▁" + text.replace(" ", "▁"), of_piece)
        assert [tokenizer.token(i) for i in tokenizer.encode(text, add_special_tokens=False)] == expected
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_texts_are_as_transformers_reads_the_file(tmp_path: Path) -> None:
    ours = Tokenizer(read_files(sentencepiece(tmp_path)))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    for text in ["the other and in", "ninging  the", "日本, ok.", "the<|user|>", "a<tool>"]:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, ["<s>", "▁a"]),
        ({"ggml.add_bos_token": False}, ["▁a"]),
        ({"ggml.add_eos_token": True}, ["<s>", "▁a", "</s>"]),
        ({"ggml.add_space_prefix": False}, ["<s>", "a"]),
    ],
)
def test_the_file_says_what_is_put_around_a_text(tmp_path: Path, entries: dict[str, Any], expected: list[str]) -> None:
    tokenizer = Tokenizer(read_files(sentencepiece(tmp_path, **entries)))
    assert [tokenizer.token(i) for i in tokenizer.encode("a")] == expected


def test_gemmas_spaces_are_the_longest_tokens_that_there_are(tmp_path: Path) -> None:
    """As in its own tokenizer.json. Its files spell them as spaces, and their scores do not say so."""
    tokens = ["<unk>", "<s>", *LETTERS, *(" " * i for i in range(2, 8)), *PIECES[:3]]
    kinds = [2, 3, *[1] * len(LETTERS), *[4] * 6, *[1] * 3]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_token_types(kinds)
    told = {"ggml.bos_token_id": 1, "ggml.unknown_token_id": 0, "ggml.add_space_prefix": False}
    tokenizer = Tokenizer(read_files(finished(writer, tmp_path / "a.gguf", told)))
    ids = tokenizer.encode("a" + " " * 10 + "the", add_special_tokens=False)
    assert [tokenizer.token(i) for i in ids] == ["a", "▁" * 7, "▁" * 3, "t", "he"]
    assert tokenizer.decode(ids) == "a" + " " * 10 + "the"


def test_phi_3s_markers_take_the_space_behind_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer(read_files(sentencepiece(tmp_path, name="Phi-3-mini")))
    assert [tokenizer.token(i) for i in tokenizer.encode("<|user|>\n a")] == ["<s>", "<|user|>", "▁a"]


def test_ends_of_turns_end_outputs_too(tmp_path: Path) -> None:
    assert Tokenizer(read_files(byte_level(tmp_path, "gpt-2"))).eos_token_ids == (0,)
    # Of END's own kind, by its spelling; and the turn's end that the file names.
    file = byte_level(tmp_path, "gpt-2", **{"ggml.eos_token_id": 5, "ggml.eot_token_id": 7})
    assert Tokenizer(read_files(file)).eos_token_ids == (5, 7, 0)
    file = byte_level(tmp_path, "gpt-2", **{"ggml.eos_token_id": 1 << 20})
    assert Tokenizer(read_files(file)).eos_token_ids == (0,)


def test_the_template_sees_the_files_special_tokens(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    file = byte_level(tmp_path, "gpt-2", chat_template=template)
    chat = ChatTemplate.from_folder(file)
    assert chat is not None
    assert chat.render([{"role": "user", "content": "hi"}]) == "<|end|>hi<|end|>"
    assert ChatTemplate.from_folder(byte_level(tmp_path, "gpt-2")) is None


def test_a_template_for_tools_is_taken_for_tools(tmp_path: Path) -> None:
    told = {"chat_template": "plain", "chat_template.tool_use": "{{ tools | length }} tools"}
    chat = ChatTemplate.from_folder(byte_level(tmp_path, "gpt-2", **told))
    assert chat is not None
    assert chat.render([], tools=[{}]) == "1 tools"
    assert chat.render([]) == "plain"


def test_a_file_without_a_tokenizer_is_said_to_have_none(tmp_path: Path) -> None:
    file = finished(gguf.GGUFWriter(tmp_path / "a.gguf", "llama"), tmp_path / "a.gguf", {})
    assert not has_tokenizer(file)
    with pytest.raises(ModelError, match=r"has no tokenizer: tokenizer\.ggml\.tokens is missing"):
        read_files(file)
