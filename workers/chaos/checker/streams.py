"""Reads outputs and token counts from a stream's entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Output:
    """One choice: its token ids and its text."""

    tokens: tuple[int, ...]
    text: str


#: The output of a choice that ended before its first token.
NOTHING = Output((), "")
Outputs = Mapping[int, Output]


def outputs_of(entries: Sequence[Any]) -> dict[int, Output]:
    """Choice -> output. Other entries than tokens are skipped."""
    tokens: dict[int, list[int]] = {}
    texts: dict[int, list[str]] = {}
    for entry in entries:
        if isinstance(entry, list):
            tokens.setdefault(entry[0], []).append(entry[2])
            texts.setdefault(entry[0], []).append(entry[3])
    return {choice: Output(tuple(made), "".join(texts[choice])) for choice, made in tokens.items()}


def tokens_of(entries: Sequence[Any]) -> Counter[int]:
    """Choice -> number of tokens."""
    return Counter(entry[0] for entry in entries if isinstance(entry, list))
