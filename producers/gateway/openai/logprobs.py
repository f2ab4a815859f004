"""Log probabilities in OpenAI's two forms. They show tokens as text, so the tokenizer decodes our token ids.

`Arrays` keeps growing JSON arrays as bytes: Python lists of the same values would be many times as large.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from engine.text import Tokenizer
from producers.contract.stream import Logprobs, Prompt, Token

#: Names of a choice's lists of log probabilities, in a chat and in the legacy endpoint.
CHAT: Final = ("content",)
COMPLETION: Final = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
#: The character that stands for bytes that are none.
REPLACEMENT: Final = "\ufffd"
#: List's name -> a value for each of a choice's next tokens.
Lists = dict[str, list[Any]]


class Arrays:
    """JSON arrays by name. `size`: bytes of all."""

    __slots__ = ("_arrays", "size")

    def __init__(self, names: Sequence[str]) -> None:
        self._arrays = {name: bytearray() for name in names}
        self.size = 0

    def add(self, lists: Mapping[str, Sequence[Any]]) -> None:
        """Append each list's values to its array."""
        for name, values in lists.items():
            if values:
                array = self._arrays[name]
                before = len(array)
                array += b"," if array else b""
                array += dumps(values)[1:-1]
                self.size += len(array) - before

    def __getitem__(self, name: str) -> bytearray:
        return self._arrays[name]


def joined(names: Sequence[str], *parts: Arrays) -> Iterator[bytes | bytearray]:
    """The members of a JSON object in which each array joins those of all parts."""
    for at, name in enumerate(names):
        yield b'%b"%b":[' % (b"," if at else b"", name.encode())
        filled = [part[name] for part in parts if part[name]]
        for index, array in enumerate(filled):
            yield b"," if index else b""
            yield array
        yield b"]"


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class ChatLogprobs:
    """A chat's form: one entry a token, with its bytes. A part of a character has the text U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, tokens: Sequence[Token]) -> Lists:
        content = []
        for token in tokens:
            if token.logprobs is not None:
                logprob, top = token.logprobs
                alternatives = [self._entry(other, value) for other, value in top]
                content.append(self._entry(token.token_id, logprob) | {"top_logprobs": alternatives})
        return {"content": content}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


class CompletionLogprobs:
    """The legacy endpoint's form: four lists for one text from its beginning.

    An offset (characters) is the start of a token's own text. Text that may begin a stop string is held back and sent
    with a later token, so the tokens are detokenised again here. A token of a removed stop string begins at or behind
    the text's end.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        """`offset`: number of characters before the first token."""
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.new_detokenizer()
        self.offset = offset

    def of(self, tokens: Sequence[Token]) -> Lists:
        return self.rows((token.token_id, token.logprobs) for token in tokens)

    def rows(self, rows: Iterable[tuple[int, Logprobs | None]]) -> Lists:
        """The lists for `rows`: (token id, log probabilities, or None for a prompt's first token)."""
        lists: Lists = {name: [] for name in COMPLETION}
        for token_id, logprobs in rows:
            data = self._tokenizer.token_bytes(token_id)
            name, piece = _name(data), self._detokenizer.push(token_id)
            lists["tokens"].append(name)
            lists["token_logprobs"].append(None if logprobs is None else logprobs[0])
            lists["top_logprobs"].append(None if logprobs is None else self._top(token_id, logprobs))
            lists["text_offset"].append(self.offset + _left_over(data, piece))
            self.offset += self._length(name, piece)
        return lists

    def _length(self, name: str, piece: str) -> int:
        """The number of characters that a token adds to the text. `piece`: the detokenizer's output for it."""
        return len(piece)

    def _top(self, token_id: int, logprobs: Logprobs) -> dict[str, float]:
        """Text -> log probability of the likeliest tokens and the token itself; of two with one text, the likelier."""
        named: dict[str, float] = {}
        for other, value in (*logprobs[1], (token_id, logprobs[0])):
            named.setdefault(_name(self._tokenizer.token_bytes(other)), value)
        return named


def _name(data: bytes) -> str:
    """A token's text, or for invalid UTF-8 its bytes in OpenAI's spelling, so that names differ."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _left_over(data: bytes, piece: str) -> int:
    """The number of U+FFFD before a token's own text, for bytes of earlier tokens whose character it did not end.

    `data`: the token's bytes. `piece`: the detokenizer's output for it."""
    if data[:1] and data[0] & 0xC0 == 0x80:  # it goes on with that character
        return 0
    decoded = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    before = piece[: max(0, len(piece) - len(decoded))]
    return len(before) if before.count(REPLACEMENT) == len(before) else 0


class PromptLogprobs(CompletionLogprobs):
    """The legacy form for a prompt, whose text is known. Special tokens take characters only if the text has them."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__(tokenizer)
        self._text = text

    def _length(self, name: str, piece: str) -> int:
        special = not piece and self._text.startswith(name, self.offset)
        return min(len(name if special else piece), len(self._text) - self.offset)


class ScoredPrompt:
    """`prompt_logprobs` in vLLM's form: for each token the likeliest and itself by id; null for the first."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._json = Arrays(("prompt_logprobs",))

    @property
    def size(self) -> int:
        return self._json.size

    def take(self, part: Prompt) -> None:
        rows = zip(part.token_ids, part.logprobs, strict=True)
        self._json.add({"prompt_logprobs": [None if row is None else self._entry(token, row) for token, row in rows]})

    def members(self) -> Iterator[bytes | bytearray]:
        yield b","
        yield from joined(("prompt_logprobs",), self._json)

    def _entry(self, token_id: int, logprobs: Logprobs) -> dict[str, Any]:
        """A token's entry. Its rank is null if it is not among the requested likeliest tokens."""
        logprob, top = logprobs
        ranked: list[tuple[int, float, int | None]] = [
            (other, value, rank) for rank, (other, value) in enumerate(top, 1)
        ]
        if token_id not in dict(top):
            ranked.insert(0, (token_id, logprob, None))
        return {str(other): self._shown(other, value, rank) for other, value, rank in ranked}

    def _shown(self, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = self._tokenizer.token_bytes(token_id).decode(errors="replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": text}
