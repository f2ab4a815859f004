"""The ways a tokenizer may write a word: as a text's beginning, a word's beginning, a continuation."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from engine.scheduling.limits import Spellings
from engine.text import Tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """`foo` is one token with a space before it, two without."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ġ", "f"), ("Ġf", "o"), ("Ġfo", "o"), ("f", "o")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return load(backend, tmp_path_factory.mktemp("byte-level"))


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Marks the beginning of a text like that of a word."""
    pieces = ["<unk>", "▁", "\n", "f", "o", "▁f", "oo", "▁foo", "foo", "b"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("o", "o"), ("f", "oo"), ("▁", "foo")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return load(backend, tmp_path_factory.mktemp("pieces"))


def load(backend: Backend, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def texts(tokenizer: Tokenizer, word: str) -> set[tuple[str, ...]]:
    return {tuple(str(tokenizer.token(i)) for i in ids) for ids in Spellings(tokenizer).of(word)}


def test_with_a_space_and_without(byte_level: Tokenizer) -> None:
    assert texts(byte_level, "foo") == {("Ġfoo",), ("fo", "o")}


def test_a_word_that_brings_its_space_has_no_other(byte_level: Tokenizer) -> None:
    assert texts(byte_level, " foo") == {("Ġfoo",)}


def test_a_continuation_is_found_where_texts_begin_with_a_mark(sentence_piece: Tokenizer) -> None:
    assert {("▁foo",), ("foo",)} <= texts(sentence_piece, "foo")


def test_every_way_spells_the_word(byte_level: Tokenizer) -> None:
    for word in ("foo", "x y", "é", "\n", "  "):
        ways = Spellings(byte_level).of(word)
        assert ways
        for ids in ways:
            assert byte_level.decode(ids).strip(" ") == word.strip(" ")
