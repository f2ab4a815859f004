"""Log probabilities in OpenAI's two shapes. Tokens are shown by their text, and ours are ids: hence the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.text import Tokenizer
from producers.events import Logprobs, Token


def chat_logprobs(tokens: Iterable[Token], tokenizer: Tokenizer) -> dict[str, Any]:
    """One entry a token, with its bytes: the text of half a character is U+FFFD."""
    content = []
    for token in tokens:
        if token.logprobs is not None:
            logprob, top = token.logprobs
            alternatives = [_entry(tokenizer, other, value) for other, value in top]
            content.append(_entry(tokenizer, token.token_id, logprob) | {"top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


class CompletionLogprobs:
    """The legacy endpoint's four lists. Offsets (characters) are into the choice's text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def of(self, rows: Sequence[tuple[int, str, Logprobs | None]]) -> dict[str, Any]:
        """Tokens as (id, the piece of text that came with it, its logprobs or None for the first of a prompt)."""
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, piece, logprobs in rows:
            lists["tokens"].append(self._name(token_id))
            lists["token_logprobs"].append(None if logprobs is None else logprobs[0])
            lists["top_logprobs"].append(None if logprobs is None else self._top(token_id, logprobs))
            lists["text_offset"].append(self._offset)
            self._offset += len(piece)
        return lists

    def _top(self, token_id: int, logprobs: Logprobs) -> dict[str, float]:
        """The likeliest and the token itself, which may be one more, by text; of two of one text, the likelier."""
        named: dict[str, float] = {}
        for other, value in (*logprobs[1], (token_id, logprobs[0])):
            named.setdefault(self._name(other), value)
        return named

    def _name(self, token_id: int) -> str:
        """A token's text; where that is no valid text, its bytes as OpenAI spells them, so that names differ."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
