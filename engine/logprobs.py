"""Log probabilities of one token, and of a prompt's tokens, which arrive in prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's natural log probability in the model's own distribution, before any parameter changes it."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the most likely tokens, most likely first."""


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """The log probabilities of prompt tokens that one step computed."""

    first: int
    """The position in the prompt of the first token scored."""
    logprobs: list[TokenLogprobs]
    error: str | None = None
    """Set if the logits were not finite. `logprobs` is then empty."""


@dataclass(slots=True)
class PromptScores:
    """The log probabilities of one request's prompt, shared by all its choices. The choice that prefills fills them."""

    tokens: list[int]
    """The prompt's token ids."""
    top: int
    """The number of most likely tokens to report for each position."""
    entries: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """The log probabilities of the leading tokens so far. The first token has None, because nothing precedes it."""
    reported: bool = False
    """Whether the event with these log probabilities was made."""

    @property
    def done(self) -> bool:
        return len(self.entries) == len(self.tokens)

    def span_in(self, start: int, end: int) -> range:
        """The positions of [start, end) whose logits are wanted: each scores the token after it."""
        return range(max(start, len(self.entries) - 1), min(end, len(self.tokens) - 1))

    def take(self, part: ScoredPart) -> None:
        """Append a part. Positions that were known before keep their values."""
        self.entries += part.logprobs[len(self.entries) - part.first :]
