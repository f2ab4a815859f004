"""Echoed prompts, with which choices begin. Each is built once for all choices of its prompt.

parts of the prompt's log probabilities -> lists -> in a stream, sent at once to each choice
                                                 -> in one piece, kept as JSON that the choices share
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from json.encoder import encode_basestring as quote
from typing import Any

from engine.text import Tokenizer
from producers.contract.stream import Prompt
from producers.gateway.openai.arrays import Arrays
from producers.gateway.openai.logprobs import COMPLETION, PromptLogprobs


class Echo:
    """One echoed prompt. `tokens`: its length. `tokenizer`: given if it has log probabilities, too."""

    def __init__(self, text: str, tokens: int, tokenizer: Tokenizer | None) -> None:
        self.text = text
        self.scored = tokenizer is not None
        self._tokens = tokens
        self._logprobs = None if tokenizer is None else PromptLogprobs(tokenizer, text)
        self._given = 0
        self.arrays = Arrays(COMPLETION)

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return len(self.text) + self.arrays.size

    @cached_property
    def quoted(self) -> bytes:
        """The text as JSON, without quotes."""
        return quote(self.text)[1:-1].encode()

    def take(self, part: Prompt) -> None:
        """Add a part of the prompt's log probabilities."""
        self.arrays.add(self._lists(part))

    def members(self) -> Iterator[bytes]:
        """No members: the prompt is in the choices."""
        return iter(())

    def choice(self, part: Prompt) -> str:
        """A part's JSON in a stream's chunk, after the choice's index.

        A part has the text of its tokens. The last part also has the text that no token covers.
        """
        lists = self._lists(part)
        last = part.first + len(part.token_ids) >= self._tokens
        end = len(self.text) if last or self._logprobs is None else self._logprobs.offset
        text, self._given = self.text[self._given : end], end
        return echoed(text, lists)

    def _lists(self, part: Prompt) -> dict[str, list[Any]]:
        return {} if self._logprobs is None else self._logprobs.rows(zip(part.token_ids, part.logprobs, strict=True))


def echoed(text: str, logprobs: dict[str, list[Any]] | None) -> str:
    """A choice's JSON in a chunk, after its index."""
    return json.dumps({"text": text, "logprobs": logprobs, "finish_reason": None})[1:]
