"""The traits of a model that its scheduler has to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from engine.declared import shown
from engine.errors import ErrorText, FieldName, RequestError
from engine.grammar.matcher import Grammars
from engine.grammar.source import check_installed
from engine.params import SamplingParams
from engine.request import LoadedAdapter
from engine.scheduling.adapters import AdapterTable
from engine.text import Tokenizer
from engine.text.detokenizer import Detokenizer

#: Text put before the word, so that a tokenizer that marks the beginning of a text does not mark the word.
_BEFORE = "\n"
_CACHED_WORDS = 4096


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Without a tokenizer, there is no text: only token ids go in and out."""

    version: str = ""
    """The model's version, which separates the cached blocks of different models."""
    vocab_size: int | None = None
    """None: not known."""
    eos_token_ids: Sequence[int] = ()
    rope_switch: int | None = None
    """A sequence of more tokens has other keys than a shorter one, so it is computed anew when it grows past that."""
    new_detokenizer: Callable[[], Detokenizer | None] = lambda: None
    spellings: Callable[[str], tuple[tuple[int, ...], ...]] | None = None
    """A word's ways to be written in tokens."""
    grammars: Grammars | None = None
    """Makes the matchers of outputs that are to have a form."""
    adapters: AdapterTable[Any] | None = None
    """The adapters that requests may name. None: there are none."""

    def spelled(self, bad_words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All token sequences that write these words and that the model can write: a tokenizer may have more tokens.
        Raises RequestError for a word that the tokenizer drops."""
        if bad_words and self.spellings is None:
            raise RequestError(
                ErrorText.of("the model has no tokenizer.json: bad_words must be {banned_token_ids}"), param="bad_words"
            )
        spellings: dict[tuple[int, ...], None] = {}
        size = self.vocab_size or 1 << 31
        for word in bad_words:
            ways = self.spellings(word) if self.spellings else ()
            if not ways:
                raise RequestError(f"bad_words has {word!r}, of which the tokenizer drops all", param="bad_words")
            spellings |= dict.fromkeys(spelling for spelling in ways if max(spelling) < size)
        return tuple(spellings)

    def check_form(self, params: SamplingParams) -> None:
        """Raise RequestError for a form that no output of this model could follow, as far as that is told at once."""
        if not params.forms:
            return
        (name,) = params.forms
        if self.grammars is None:
            raise RequestError(
                ErrorText.of("the model has no tokenizer.json: it cannot follow {}", FieldName(name)), param=name
            )
        check_installed(name)

    def adapter(self, name: str) -> LoadedAdapter | None:
        """The loaded adapter of this name; None for "". Raises RequestError if it is not loaded."""
        if not name:
            return None
        if self.adapters is None:
            text = ErrorText.of("{adapter}={}: the model is served without adapters", shown(name))
            raise RequestError(text, param="adapter")
        adapter: LoadedAdapter = self.adapters.find(name)
        return adapter

    def with_text(self, tokenizer: Tokenizer) -> ModelTraits:
        """The same with a tokenizer, which knows better than config.json which tokens end an output."""
        size = tokenizer.vocab_size if self.vocab_size is None else self.vocab_size
        return replace(
            self,
            eos_token_ids=tokenizer.eos_token_ids,
            new_detokenizer=tokenizer.new_detokenizer,
            spellings=Spellings(tokenizer).of,
            grammars=Grammars(tokenizer.to_json, size, tokenizer.eos_token_ids),
        )


class Spellings:
    """Finds all token sequences that write a word: at the beginning of a word, and as a continuation. With a cache;
    thread-safe.
    """

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
