"""Log probabilities: of one token, and of a prompt's tokens, which come in the chunks that compute it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own distribution: temperature 1, before any filter."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the likeliest tokens, likeliest first."""


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
