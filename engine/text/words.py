"""Finds all token sequences that write a word: at the beginning of a word, and as a continuation."""

from __future__ import annotations

from functools import lru_cache

from engine.text.tokenizer import Tokenizer

#: Text put before the word, so that a tokenizer that marks the beginning of a text does not mark the word.
_BEFORE = "\n"
_CACHED_WORDS = 4096


class Spellings:
    """The spellings of words, with a cache. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode(_BEFORE, add_special_tokens=False)
        self.of = lru_cache(_CACHED_WORDS)(self._of)

    def _of(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The different token sequences that write a word. Empty if the tokenizer drops the word altogether.

        The word is written with and without a space before it (unless it begins with one), within a text and at its
        beginning.
        """
        forms = [word] if word[0].isspace() else [word, f" {word}"]
        encodings = [self._encode(form) for form in forms] + [self._within(form) for form in forms]
        return tuple(dict.fromkeys(ids for ids in encodings if ids))

    def _within(self, text: str) -> tuple[int, ...]:
        ids = self._encode(_BEFORE + text)
        prefix = len(self._before)
        # If the tokenizer merged the two, the word has no tokens of its own there.
        return ids[prefix:] if list(ids[:prefix]) == self._before else ()

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
