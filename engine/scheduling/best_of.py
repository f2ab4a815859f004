"""best_of: makes more choices than it returns. Once all have ended, it returns the best ones, best first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.request import Event


@dataclass(slots=True)
class _Candidate:
    pieces: list[Event] = field(default_factory=list)
    total: float = 0.0
    """The sum of its tokens' log probabilities."""

    @property
    def tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces)

    @property
    def score(self) -> float:
        """The mean log probability of a token. With the sum, the shortest candidate would always win."""
        return self.total / max(1, self.tokens)


class Candidates:
    """The candidate choices of one request, of which the best `given` are returned.

    Their events carry logprobs even if the caller did not ask for them (`shown`).
    """

    def __init__(self, candidates: int, returned: int, shown: bool) -> None:
        self._returned = returned
        self._shown = shown
        self._candidates = [_Candidate() for _ in range(candidates)]

    def take(self, event: Event) -> list[Event]:
        """Collect a candidate's event. After the last one, returns the events to deliver: one for each choice
        returned."""
        candidate = self._candidates[event.choice]
        candidate.pieces.append(event)
        candidate.total += sum(token.logprob for token in event.logprobs or ())
        return self._choose() if event.done else []

    def failed(self, event: Event) -> list[Event]:
        """A candidate failed, so the request fails. Returns its event once for every choice that was to be returned."""
        ends = [replace(event, choice=choice, index=0, done=False) for choice in range(self._returned)]
        ends[-1].done = True
        return ends

    def _choose(self) -> list[Event]:
        # Sorting is stable: of equal candidates the first made comes first.
        ranked = sorted(self._candidates, key=lambda candidate: -candidate.score)
        discarded = sum(candidate.tokens for candidate in ranked[self._returned :])
        events = []
        for choice, candidate in enumerate(ranked[: self._returned]):
            pieces = candidate.pieces
            events.append(
                replace(
                    pieces[-1],
                    choice=choice,
                    index=0,
                    token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
                    texts=[text for piece in pieces for text in piece.texts],
                    logprobs=[token for piece in pieces for token in piece.logprobs or ()] if self._shown else None,
                    done=choice == self._returned - 1,
                    discarded=discarded,
                )
            )
        return events
