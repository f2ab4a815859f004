"""Turns tokens into text as they arrive, without splitting characters.

The joined pieces equal the `tokenizers` library's decode of all tokens at once, with special tokens skipped; but for a
decoder with ByteFallback that no usual model has, which gives whole characters before a broken one as U+FFFD, too. The
library's own DecodeStream decodes a window again for each token. That costs more and, on a run of invalid bytes, grows
with the square of the run. So the two common families of tokenizers are decoded from bytes here.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Detokenizer(Protocol):
    """Detokenizes one output. The joined pieces of `push`, with that of `flush`, are the full decode of its tokens."""

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Return the text still held back. Incomplete characters become U+FFFD."""
        ...

    def fork(self) -> Detokenizer:
        """Another output's, after the same tokens."""
        ...


def detokenizer_factory(
    tokenizer: Tokenizer, decoder: dict[str, Any] | None, decode: Callable[[Sequence[int]], str]
) -> Callable[[], Detokenizer]:
    """A function that makes detokenizers for `tokenizer`, whose tokenizer.json has this `decoder` section.

    `decode` gives the text of all tokens at once, without special ones.
    """
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def token_of(token_id: int) -> str | None:
        return None if token_id in special else tokenizer.id_to_token(token_id)

    if decoder is not None and decoder.get("type") == "ByteLevel":
        table = _ByteTable(token_of)
        return lambda: ByteLevelDetokenizer(table)
    fallback = _fallback_steps(decoder)
    if fallback is not None:
        pieces = _PieceTable(token_of, fallback[0])
        return lambda: ByteFallbackDetokenizer(pieces, *fallback[1])
    return lambda: WindowDetokenizer(decode, token_of)


def byte_speller(tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> Callable[[int], bytes]:
    """A function from a token id to its bytes, special tokens included; b"" for an unknown id.

    The bytes do not depend on the token's position: a decoder's changes at the start of a text (dropping a space) or
    between words are left out.
    """
    added = tokenizer.get_added_tokens_decoder()

    def token_of(token_id: int) -> str | None:
        token: str | None = tokenizer.id_to_token(token_id)
        return token

    fallback = _fallback_steps(decoder)
    byte_level = _ByteTable(token_of) if decoder is not None and decoder.get("type") == "ByteLevel" else None
    pieces = _PieceTable(token_of, fallback[0]) if fallback is not None else None

    def spell(token_id: int) -> bytes:
        if token_id in added:
            content: str = added[token_id].content
            return content.encode()
        if byte_level is not None:
            return byte_level[token_id]
        piece = pieces[token_id] if pieces is not None else token_of(token_id)
        if isinstance(piece, int):
            return bytes((piece,))
        return (piece or "").encode()

    return spell


class ByteLevelDetokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen): a token is a run of bytes, and only joined tokens are valid UTF-8."""

    __slots__ = ("_decoder", "_incomplete", "_table", "_texts")

    def __init__(self, table: _ByteTable) -> None:
        self._table = table
        self._texts = table.texts
        # One U+FFFD for each maximal invalid part, like Rust's from_utf8_lossy (Unicode 3.9, table 3-8).
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        #: Whether the decoder holds the beginning of a character.
        self._incomplete = False

    def push(self, token_id: int) -> str:
        if not self._incomplete and (text := self._texts[token_id]) is not None:  # nearly all: a dict knows them
            return text
        text = self._decoder.decode(self._table[token_id])
        self._incomplete = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._incomplete = False
        return self._decoder.decode(b"", True)

    def fork(self) -> ByteLevelDetokenizer:
        other = ByteLevelDetokenizer(self._table)
        other._decoder.setstate(self._decoder.getstate())
        other._incomplete = self._incomplete
        return other


class ByteFallbackDetokenizer:
    """SentencePiece style (Llama 2, Mistral, Gemma): tokens are text, except <0xNN> tokens, which are bytes.

    The library decodes a run of byte tokens as a whole or, if any byte is invalid, not at all. So a run is held until
    it ends.
    """

    __slots__ = ("_run", "_strip", "_strip_left", "_table")

    def __init__(self, table: _PieceTable, strip: str, strip_count: int) -> None:
        self._table = table
        self._run = bytearray()
        self._strip = strip
        self._strip_left = strip_count

    def push(self, token_id: int) -> str:
        piece = self._table[token_id]
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if not self._run and not self._strip_left:
            return piece
        return self._stripped(self._end_run() + piece)

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def fork(self) -> ByteFallbackDetokenizer:
        other = ByteFallbackDetokenizer(self._table, self._strip, self._strip_left)
        other._run += self._run
        return other

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip:
                self._strip_left = 0
            else:
                text = text[1:]
                self._strip_left -= 1
        return text


class WindowDetokenizer:
    """Any other decoder: decodes the last tokens with and without the new ones, and returns the difference."""

    #: After this many tokens, text that ends in U+FFFD is returned all the same. A character takes four bytes at most,
    #: so only output that really contains U+FFFD gets here. It must not make the window grow without end.
    LONGEST_HOLD = 16

    __slots__ = ("_decode", "_ids", "_returned", "_token_of")

    def __init__(self, decode: Callable[[Sequence[int]], str], token_of: Callable[[int], str | None]) -> None:
        self._decode = decode
        self._token_of = token_of
        self._ids: list[int] = []
        # The number of leading ids that were already returned and only serve as context.
        self._returned = 0

    def push(self, token_id: int) -> str:
        if self._token_of(token_id) is None:
            return ""
        self._ids.append(token_id)
        return self._new_text(hold=len(self._ids) - self._returned < self.LONGEST_HOLD)

    def flush(self) -> str:
        return self._new_text(hold=False)

    def fork(self) -> WindowDetokenizer:
        other = WindowDetokenizer(self._decode, self._token_of)
        other._ids, other._returned = list(self._ids), self._returned
        return other

    def _new_text(self, hold: bool) -> str:
        before, text = self._decode(self._ids[: self._returned]), self._decode(self._ids)
        if len(text) <= len(before) or (hold and text.endswith("\ufffd")):
            return ""
        del self._ids[: self._returned]
        self._returned = len(self._ids)
        return text[len(before) :]


class _ByteTable(dict[int, bytes]):
    """Maps token ids to bytes, filled on demand. Skipped and unknown ids have no bytes."""

    def __init__(self, token_of: Callable[[int], str | None]) -> None:
        super().__init__()
        self._token_of = token_of
        #: The text of each token whose bytes are whole characters, else None.
        self.texts = _TextTable(self)

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id) or ""
        try:
            data = bytes(BYTE_ALPHABET[char] for char in token)
        except KeyError:
            # An added token with characters outside the byte alphabet is literal text.
            data = token.encode("utf-8")
        self[token_id] = data
        return data


class _TextTable(dict[int, "str | None"]):
    """Maps token ids to text, or to None for bytes that are not whole characters. Filled on demand."""

    def __init__(self, table: _ByteTable) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> str | None:
        try:
            text: str | None = self._table[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class _PieceTable(dict[int, "str | int | None"]):
    """Maps token ids to text, to a byte, or to None for a skipped token. Filled on demand."""

    def __init__(self, token_of: Callable[[int], str | None], replacements: list[tuple[str, str]]) -> None:
        super().__init__()
        self._token_of = token_of
        self._replacements = replacements

    def __missing__(self, token_id: int) -> str | int | None:
        piece: str | int | None = self._token_of(token_id)
        if isinstance(piece, str):
            for old, new in self._replacements:
                piece = piece.replace(old, new)
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                with suppress(ValueError):
                    piece = int(piece[3:5], 16)
        self[token_id] = piece
        return piece


def _fallback_steps(decoder: dict[str, Any] | None) -> tuple[list[tuple[str, str]], tuple[str, int]] | None:
    """The replacements, and the (character, count) to strip, of a decoder [Replace*, ByteFallback, Fuse, Strip?]."""
    if decoder is None or decoder.get("type") != "Sequence":
        return None
    steps = list(decoder["decoders"])
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    if [step["type"] for step in steps[:2]] != ["ByteFallback", "Fuse"]:
        return None
    remaining = steps[2:]
    if not remaining:
        return replacements, ("", 0)
    if len(remaining) == 1 and remaining[0]["type"] == "Strip" and remaining[0]["stop"] == 0:
        return replacements, (remaining[0]["content"], remaining[0]["start"])
    return None


def _byte_alphabet() -> dict[str, int]:
    """The inverse of GPT-2's `bytes_to_unicode`: printable bytes map to themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


#: The character that stands for a byte in a byte-level vocabulary -> the byte.
BYTE_ALPHABET: Final = _byte_alphabet()
