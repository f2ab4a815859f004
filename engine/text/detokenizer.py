"""Tokens back to text as they come, never half a character at a time."""

from __future__ import annotations

from typing import Protocol


class Detokenizer(Protocol):
    """The pieces of `push` and the last one of `flush`, joined, are the full decode of the tokens pushed."""

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What was still held back; incomplete characters come out as U+FFFD."""
        ...
