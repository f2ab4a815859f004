"""A model's tokenizer, read from its Hugging Face files: turns text into token ids and back.

The files are untrusted, and native code reads them. The library itself finds many faults, with an error or a panic.
Valid but harmful settings are refused here: parts that make a short text long, and sizes that the library would
allocate unchecked.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tokenizers

from engine.errors import ModelError, RequestError
from engine.labels import TokenSpan
from engine.text.detokenizer import BYTE_ALPHABET, Detokenizer, byte_speller, detokenizer_factory
from engine.text.files import read_files, read_object

#: The most bytes of UTF-8 that NFC makes one byte of: of U+1FBE U+0308 U+0341, with 7 bytes, it makes U+0390, with 2.
_NFC_SHRINKS: Final = 4
#: The factor by which replacing may lengthen a text. Well-known models have 3 at most.
MOST_GROWTH: Final = 64
#: The most characters put before a text, and the most special tokens put around it.
MOST_AROUND: Final = 64
_PARTS: Final = ("normalizers", "pretokenizers", "decoders", "processors")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """`special`: it has no text in outputs."""

    id: int
    special: bool


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text, or a pair, as a model reads it. `second`: the index of a pair's second text. `whole`: the tokens that it
    had before it was cut."""

    ids: list[int]
    second: int | None
    whole: int
    spans: tuple[TokenSpan | None, ...] = ()
    """The characters of each token, None for special ones; () where they were not asked for."""


class Tokenizer:
    """A tokenizer. It is immutable and so thread-safe.

    `bos_token_id` and `eos_token_ids` are the model's, from generation_config.json, else config.json, else
    tokenizer_config.json. `vocab_size` includes added tokens.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files`: contents by name, as in FILES. Raises ModelError naming a file that is missing, broken or
        hostile."""
        parsed = read_object(files, "tokenizer.json")
        _refuse_harmful(parsed)
        decoder = parsed.get("decoder")
        self._backend = _load(files)
        try:
            self._new_detokenizer = detokenizer_factory(self._backend, decoder, self.decode)
            self._spell = byte_speller(self._backend, decoder)
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"tokenizer.json has a decoder that cannot be used: {error!r}") from error
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        try:
            #: The most bytes of a text (UTF-8) that one token stands for; None where that is not known.
            self.bytes_per_token = _bytes_per_token(parsed)
        except (KeyError, TypeError, AttributeError):  # parts that the library reads in another way
            self.bytes_per_token = None
        self.bos_token_id, self.eos_token_ids = self._special_ids(files)
        self.unk_token_id = self._unknown_id(files)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        return cls(read_files(folder))

    def encode(self, text: str, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Encode a text as token ids. `add_special_tokens`: let the model's post-processor add BOS or EOS. `limit`: the
        most tokens that are of use.

        A rendered chat template already has its special tokens, so encode it without. Raises RequestError if the
        tokenizer fails on the text, or, before it is encoded, if its size says that it has more than `limit` tokens.
        """
        if limit is not None and (fewest := self.fewest_tokens(text)) > limit:
            raise RequestError(
                f"the prompt has at least {fewest} tokens, by its size; the model's context has {limit}; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        # A lone surrogate, which JSON can carry, cannot be encoded as UTF-8.
        valid = text.encode("utf-8", "replace").decode("utf-8")
        with _panics("the model's tokenizer fails on this text"):
            # This method of the library releases the GIL and computes no offsets.
            ids: list[int] = self._backend.encode_batch_fast([valid], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_pair(self, text: str, second: str | None = None, limit: int | None = None) -> EncodedText:
        """Encode a text, or a pair, for a model that reads it as a whole, with the model's special tokens. `limit`: the
        most tokens; what is beyond is cut from the text's end, of a pair from the longer text's.

        Raises RequestError as `encode` does.
        """
        backend = self._backend
        with _panics("the model's tokenizer fails on this text"):
            valid = [part.encode("utf-8", "replace").decode("utf-8") for part in (text, second) if part is not None]
            parts = backend.encode_batch_fast(valid, add_special_tokens=False)
            tokens = sum(len(part.ids) for part in parts)
            special = backend.num_special_tokens_to_add(second is not None)
            if limit is not None and tokens + special > limit:
                _cut(parts, max(0, limit - special))
            whole = backend.post_process(parts[0], None if second is None else parts[1])
        sequences = whole.sequence_ids
        start = len(whole.ids) if second is None or 1 not in sequences else sequences.index(1)
        types = whole.type_ids
        # Token types say where the second text begins, its special tokens included; not all models have them.
        second_at = None if second is None else types.index(1) if 1 in types else start
        return EncodedText(list(whole.ids), second_at, tokens + special)

    def encode_spans(self, text: str, limit: int | None = None) -> EncodedText:
        """As `encode_pair` of one text, with the characters of each token.

        A token goes on with a word, as transformers' token-classification pipeline has it, if the vocabulary's spelling
        says so (`##ing`); with other vocabularies, if no white space is before it. Raises RequestError.
        """
        backend = self._backend
        valid = text.encode("utf-8", "replace").decode("utf-8")
        with _panics("the model's tokenizer fails on this text"):
            (part,) = backend.encode_batch([valid], add_special_tokens=False)
            tokens, special = len(part.ids), backend.num_special_tokens_to_add(False)
            if limit is not None and tokens + special > limit:
                _cut([part], max(0, limit - special))
            # Post-processed twice, offsets would lose their leading spaces twice: those of the first time are right.
            offsets = iter(part.offsets)
            whole = backend.post_process(part)
        marked = bool(getattr(backend.model, "continuing_subword_prefix", None))
        spans: list[TokenSpan | None] = []
        for token_id, token, special_mask in zip(whole.ids, whole.tokens, whole.special_tokens_mask, strict=True):
            if special_mask:
                spans.append(None)
                continue
            start, end = next(offsets)
            continues = len(token) != end - start if marked else start > 0 and " " not in valid[start - 1 : start + 1]
            spans.append(TokenSpan(start, end, continues and token_id != self.unk_token_id))
        return EncodedText(list(whole.ids), None, tokens + special, tuple(spans))

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the tokens of a text, told from its size alone."""
        return 0 if self.bytes_per_token is None else -(-len(text.encode("utf-8", "replace")) // self.bytes_per_token)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Decode tokens as one text, without special tokens. Raises RequestError as `encode` does."""
        with _panics("the model's tokenizer fails on these tokens"):
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def same_tokens(self, other: Tokenizer) -> bool:
        """Whether each token id stands for the same token in both."""
        return self._backend.get_vocab(with_added_tokens=True) == other._backend.get_vocab(with_added_tokens=True)

    def added_tokens(self) -> dict[str, AddedToken]:
        """The tokens that were added to the vocabulary, such as those that mark turns, by their text."""
        by_id = self._backend.get_added_tokens_decoder()
        return {token.content: AddedToken(token_id, token.special) for token_id, token in by_id.items()}

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json that neither truncates nor pads."""
        text: str = self._backend.to_str()
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token. None for an unknown id."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_id(self, token: str) -> int | None:
        """The id of a token by the vocabulary's spelling. None for an unknown one."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, also of special ones; b"" for an unknown id. They may be part of a character."""
        return self._spell(token_id)

    @property
    def new_detokenizer(self) -> Callable[[], Detokenizer]:
        """A function that makes an incremental detokenizer for one output."""
        return self._new_detokenizer

    def _unknown_id(self, files: Mapping[str, bytes]) -> int | None:
        """The token of what the vocabulary lacks. None if there is none."""
        named = read_object(files, "tokenizer_config.json").get("unk_token")
        content = named.get("content") if isinstance(named, dict) else named
        content = content if isinstance(content, str) else getattr(self._backend.model, "unk_token", None)
        return self._backend.token_to_id(content) if isinstance(content, str) else None

    def _special_ids(self, files: Mapping[str, bytes]) -> tuple[int | None, tuple[int, ...]]:
        sources = [(name, read_object(files, name)) for name in ("generation_config.json", "config.json")]
        named = read_object(files, "tokenizer_config.json")

        def find(kind: str) -> tuple[int, ...]:
            for name, source in sources:
                value = source.get(f"{kind}_token_id")
                if value is not None:
                    return _token_ids(name, f"{kind}_token_id", value)
            token = named.get(f"{kind}_token")
            content = token.get("content") if isinstance(token, dict) else token
            token_id = self._backend.token_to_id(content) if isinstance(content, str) else None
            return () if token_id is None else (token_id,)

        return next(iter(find("bos")), None), find("eos")


def _cut(parts: list[Any], limit: int) -> None:
    """Cut encoded texts to `limit` tokens in all, the longer of two first, as tokenizers' `longest_first` does."""
    if len(parts) == 1:
        parts[0].truncate(limit)
        return
    short, long = sorted(parts, key=lambda part: len(part.ids))
    kept = min(len(short.ids), limit // 2)
    long.truncate(max(limit - len(short.ids), limit - limit // 2))
    short.truncate(kept)


def _token_ids(file: str, key: str, value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and 0 <= token_id < 1 << 31 for token_id in ids):
        raise ModelError(f"{file} has {key}={value!r}, which is not a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _bytes_per_token(parsed: Mapping[str, Any]) -> int | None:
    """The most bytes of a text that a token of this tokenizer.json stands for.

    That is known of byte-level BPE, in which each character of a token is a byte of the text, if no part drops or
    rewrites text: no normalizer but NFC, which shortens a text by no more than _NFC_SHRINKS, and no added token that
    takes the spaces around it. Else None: a text of any size may be few tokens.
    """
    model, added = parsed["model"], parsed.get("added_tokens") or []
    normalizers = [part["type"] for part in _flat(parsed.get("normalizer")) if part["type"] != "Sequence"]
    splits = [part for part in _flat(parsed.get("pre_tokenizer")) if part["type"] != "Sequence"]
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict) or not {*normalizers} <= {"NFC"}:
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if not all(map(_keeps_text, splits)) or all(part["type"] != "ByteLevel" for part in splits):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    if not vocabulary.keys() >= BYTE_ALPHABET.keys():  # BPE drops a byte that it has no token for
        return None
    longest = max(map(len, (*vocabulary, *(token["content"].encode("utf-8", "replace") for token in added))))
    return longest * (_NFC_SHRINKS if normalizers else 1)


def _keeps_text(split: Mapping[str, Any]) -> bool:
    """Whether a step of the pre_tokenizer keeps all of a text."""
    return split["type"] in ("ByteLevel", "Digits") or (split["type"] == "Split" and split["behavior"] != "Removed")


def _load(files: Mapping[str, bytes]) -> tokenizers.Tokenizer:
    if "tokenizer.json" not in files:
        raise ModelError("tokenizer.json is missing")
    try:
        with _panics("a panic"):
            backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
            # Whatever the file says, prompts are never truncated or padded silently, nor encoded at random.
            backend.no_truncation()
            backend.no_padding()
            if getattr(backend.model, "dropout", None):
                backend.model.dropout = None
            # A file may load and still panic at its first use.
            backend.encode("a b")
    except Exception as error:
        raise ModelError(f"tokenizer.json cannot be used: {error}") from error
    return backend


@contextmanager
def _panics(action: str) -> Iterator[None]:
    """Turn Rust panics, which arrive as a BaseException that cannot be imported, into RequestError."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RequestError(f"{action}: {error}", param="prompt") from error


def _refuse_harmful(tokenizer: Mapping[str, Any]) -> None:
    """Check the parsed file. Raises ModelError naming the harmful part. Malformed parts are left to the library."""
    for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        growth, around = 1.0, 0
        for part in _flat(tokenizer.get(name)):
            match part.get("type"):
                case "Replace":
                    growth *= _growth(part)
                case "Prepend":
                    around += _length(part.get("prepend"))
                case "Precompiled":
                    _charsmap(part.get("precompiled_charsmap"))
                case "TemplateProcessing":
                    special, texts = _around(part)
                    around += special
                    growth *= max(1, texts)
            if around > MOST_AROUND:
                raise ModelError(
                    f"tokenizer.json has a {name} that puts {around} pieces around a text; at most {MOST_AROUND}"
                )
            if growth > MOST_GROWTH:
                raise ModelError(f"tokenizer.json has a {name} that makes a text over {MOST_GROWTH} times longer")


def _flat(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a part and all parts inside it, in order."""
    waiting = [part]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            for name in _PARTS:
                inner = part.get(name)
                if isinstance(inner, list):
                    waiting += reversed(inner)


def _growth(part: Mapping[str, Any]) -> float:
    content, pattern = part.get("content"), part.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    # A regular expression may match at every character and between any two.
    shortest = len(text) if isinstance(text, str) and text else 0.5
    return max(1.0, len(content) / shortest) if isinstance(content, str) else 1.0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list)) else 0


def _around(template: Mapping[str, Any]) -> tuple[int, int]:
    """The most token ids that a template adds, and the most copies of its texts, for one text or a pair.

    A special token may be many ids, and may occur many times.
    """
    tokens = template.get("special_tokens")
    listed = tokens if isinstance(tokens, dict) else {}
    special = texts = 0
    for pieces in (template.get("single"), template.get("pair")):
        named = [_special(piece) for piece in pieces] if isinstance(pieces, list) else []
        special = max(special, sum(_ids(listed.get(name)) for name in named if name is not None))
        texts = max(texts, named.count(None))
    return special, texts


def _special(piece: Any) -> str | None:
    """The special token of a template's piece. None for a piece of text."""
    token = piece.get("SpecialToken") if isinstance(piece, dict) else None
    return str(token.get("id")) if isinstance(token, dict) else None


def _ids(token: Any) -> int:
    return _length(token.get("ids")) if isinstance(token, dict) else 0


def _charsmap(text: Any) -> None:
    """Check SentencePiece's table: the trie's size (4 bytes, little-endian), the trie in units of 4 bytes, strings.

    The library allocates as much as the size says.
    """
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        data = b""
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size > len(data) - 4 or size % 4:
        raise ModelError("tokenizer.json has a precompiled_charsmap that is truncated or none at all")
