"""Pieces, joined, against the library's decode of all tokens at once."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    WindowDetokenizer,
    detokenizer_factory,
)
from tests.histories import examples

MAKES = {
    "byte_level": ByteLevelDetokenizer,
    "byte_fallback": ByteFallbackDetokenizer,
    "metaspace": WindowDetokenizer,
    "word_piece": WindowDetokenizer,
}
TEXTS = [
    "def f(x):\n    return x + 1\n",
    "naïve café — 東京タワー 🗼",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, 👍🏽 tone",
    "e\u0301 a\u0308\u0323 combining, \u200bzero width, \ufffd itself",
    "   leading and trailing   ",
    "<tool> <think> ｜é",
]


def pieces(tokenizer: tokenizers.Tokenizer, ids: list[int]) -> list[str]:
    decoder = json.loads(tokenizer.to_str())["decoder"]
    detokenizer = detokenizer_factory(tokenizer, decoder, tokenizer.decode)()
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.fixture(params=MAKES)
def make(request) -> str:
    return request.param


@pytest.fixture
def tokenizer(make, request) -> tokenizers.Tokenizer:
    return request.getfixturevalue(make)


def test_the_usual_makes_are_decoded_by_bytes(make, tokenizer):
    decoder = json.loads(tokenizer.to_str())["decoder"]
    assert type(detokenizer_factory(tokenizer, decoder, tokenizer.decode)()) is MAKES[make]


@pytest.mark.parametrize("text", TEXTS)
def test_encoded_text_comes_back_as_the_library_gives_it(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=examples(30, 100), deadline=None)
@given(data=st.data())
def test_any_tokens_whatever_decode_as_in_the_library(byte_level, byte_fallback, data):
    for tokenizer in (byte_level, byte_fallback):
        # Beyond the vocabulary too: padded rows of an embedding have no token.
        ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 5), max_size=30))
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=examples(30, 100), deadline=None)
@given(data=st.data())
def test_any_bytes_decode_as_in_the_library(byte_level, byte_fallback, data):
    """One token a byte, mostly of broken UTF-8."""
    raw = data.draw(
        st.lists(
            st.one_of(
                st.binary(max_size=4),
                st.sampled_from("é€🗼\ufffda ").map(str.encode),
                st.sampled_from([b"\xe2\x82", b"\xf0\x9f", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf"]),
            ),
            max_size=8,
        ).map(b"".join)
    )
    level = [byte_level.token_to_id(byte_token(byte)) for byte in raw]
    fallback = [byte_fallback.token_to_id(f"<0x{byte:02X}>") for byte in raw]
    word = byte_fallback.encode("x").ids
    assert "".join(pieces(byte_level, level)) == byte_level.decode(level) == raw.decode("utf-8", "replace")
    assert "".join(pieces(byte_fallback, fallback + word)) == byte_fallback.decode(fallback + word)


def byte_token(byte: int) -> str:
    alphabet = [c for c in range(256) if 0x21 <= c <= 0x7E or 0xA1 <= c <= 0xAC or c >= 0xAE]
    return chr(byte) if byte in alphabet else chr(256 + [b for b in range(256) if b not in alphabet].index(byte))


@settings(max_examples=examples(30, 100))
@given(data=st.data())
def test_any_words_decode_as_in_the_library(metaspace, word_piece, data):
    for tokenizer in (metaspace, word_piece):
        ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=20))
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_no_piece_has_half_a_character(byte_level):
    text = "🗼é👩‍👩‍👧‍👦東"
    ids = [byte_level.token_to_id(byte_token(byte)) for byte in text.encode()]
    out = pieces(byte_level, ids)
    assert "".join(out) == text
    assert [piece for piece in out if piece] == list(text)


def test_an_unfinished_character_comes_out_replaced_at_the_end(byte_level, byte_fallback):
    assert pieces(byte_level, [byte_level.token_to_id(byte_token(b)) for b in b"a\xf0\x9f"]) == ["a", "", "", "\ufffd"]
    ids = [byte_fallback.token_to_id(t) for t in ("a", "<0xF0>", "<0x9F>")]
    assert pieces(byte_fallback, ids) == ["a", "", "", "\ufffd\ufffd"]


def test_special_tokens_have_no_text_and_other_added_ones_have(byte_level):
    begin, tool, think = (byte_level.token_to_id(t) for t in ("<|begin|>", "<tool>", "<think> ｜é"))
    assert pieces(byte_level, [begin, tool, begin, think]) == ["", "<tool>", "", "<think> ｜é", ""]


def test_a_long_run_of_replacement_characters_does_not_grow_the_window(metaspace):
    tokenizer = tokenizers.Tokenizer.from_str(metaspace.to_str())
    tokenizer.add_tokens(["\ufffd"])
    detokenizer = WindowDetokenizer(tokenizer.decode, tokenizer.id_to_token)
    token_id = tokenizer.token_to_id("\ufffd")
    out = ""
    for _ in range(200):
        out += detokenizer.push(token_id)
        assert len(detokenizer._ids) <= 2 * WindowDetokenizer.LONGEST_HOLD
    assert out + detokenizer.flush() == tokenizer.decode([token_id] * 200)
