"""How a tokenizer may write a word within a text: as the beginning of a word, and as a continuation."""

from __future__ import annotations

from functools import lru_cache

from engine.text.tokenizer import Tokenizer

#: Something before the word, so that a tokenizer that marks the beginning of a text does not mark the word.
_BEFORE = "\n"
_KNOWN = 4096


class Spellings:
    """Thread-safe. Words asked for before are remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode(_BEFORE, add_special_tokens=False)
        self.of = lru_cache(_KNOWN)(self._of)

    def _of(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Token ids of each way to write it, all different; none where the tokenizer drops it altogether.

        With a space before it and without, unless it begins with one; at the beginning of a text too.
        """
        forms = [word] if word[0].isspace() else [word, f" {word}"]
        found = [self._encode(form) for form in forms] + [self._within(form) for form in forms]
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def _within(self, text: str) -> tuple[int, ...]:
        ids = self._encode(_BEFORE + text)
        own = len(self._before)
        # Where the two grew together the word cannot be told apart there.
        return ids[own:] if list(ids[:own]) == self._before else ()

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
