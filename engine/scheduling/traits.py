"""The traits of a model that its scheduler has to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.grammar.matcher import Grammars
from engine.text import Tokenizer
from engine.text.detokenizer import Detokenizer
from engine.text.words import Spellings


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
