"""The log probabilities of a prompt's tokens, put together from the chunks in which the prompt is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """What one step found out about a prompt."""

    first: int
    """Place in the prompt of the first token scored."""
    logprobs: list[TokenLogprobs]
    error: str | None = None
    """Set where the logits were not finite; there are no logprobs then."""


@dataclass(slots=True)
class PromptScores:
    """One for all choices of a request: whichever computes the prompt first brings them on."""

    tokens: list[int]
    """The prompt."""
    top: int
    """Likeliest tokens wanted beside each."""
    found: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """Of the leading tokens; the first has none, for nothing precedes it."""
    told: bool = False
    """The request's caller has been told."""

    @property
    def done(self) -> bool:
        return len(self.found) == len(self.tokens)

    def wanted(self, start: int, end: int) -> range:
        """The positions of [start, end) whose logits are wanted: each scores the token after it."""
        return range(max(start, len(self.found) - 1), min(end, len(self.tokens) - 1))

    def take(self, part: ScoredPart) -> None:
        """Enter a part; what was known before stays."""
        self.found += part.logprobs[len(self.found) - part.first :]
