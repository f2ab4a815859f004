"""Labelled parts of a text, which token classifiers make: names, people, dates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

#: How tokens become entities, by the names of transformers' token-classification pipeline. "none": each token by
#: itself. "simple": neighbours with one label together. The others label words first, by their first token, by the
#: mean of their tokens' scores, or by the token with the highest score.
Aggregation = Literal["none", "simple", "first", "average", "max"]
#: The label of tokens that are part of nothing. Such tokens are left out.
OUTSIDE: Final = "O"
#: The most entities of a text. More are refused: a result is one message.
MAX_ENTITIES: Final = 32_768


@dataclass(frozen=True, slots=True)
class Entity:
    """A labelled part of a text."""

    label: str
    """The model's label; of tokens put together without its `B-` or `I-`."""
    score: float
    """A probability; the mean of those of tokens or words put together."""
    start: int
    """The number of its first character in the text (of Unicode code points, as Python counts them)."""
    end: int
    """The number of the character after it."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The characters of a text that a token stands for. `continues`: whether it goes on with the word of the token
    before it."""

    start: int
    end: int
    continues: bool
