"""Cuts texts into windows of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from engine.text import Tokenizer

#: The most tokens of a window.
LONGEST = 1024
#: Shorter ends of texts are left out, because their tokens have too little context.
_SHORTEST = 16


def windows(tokenizer: Tokenizer, texts: Iterable[str], tokens: int, context: int) -> list[list[int]]:
    """Up to `tokens` tokens of `texts`, cut into windows of at most `context` tokens. Each window begins like a prompt,
    with the tokenizer's BOS token if it has one."""
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    length = min(LONGEST, context) - len(first)
    pieces: list[list[int]] = []
    remaining = tokens
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for start in range(0, len(ids), length):
            part = ids[start : start + min(length, remaining)]
            if len(part) >= min(_SHORTEST, length):
                pieces.append(first + part)
                remaining -= len(part)
            if remaining < _SHORTEST:
                return pieces
    return pieces
