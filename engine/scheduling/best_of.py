"""best_of: more choices are made than given. Nothing is said of any until all have ended; then the best, best first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.request import Event


@dataclass(slots=True)
class _Candidate:
    pieces: list[Event] = field(default_factory=list)
    total: float = 0.0
    """Log probability of all its tokens together."""

    @property
    def tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces)

    @property
    def score(self) -> float:
        """Mean log probability of a token; the mean, or the shortest would always win."""
        return self.total / max(1, self.tokens)


class Candidates:
    """The choices of one request, of which the best `given` are chosen. Their events carry logprobs, whether the caller
    asked for them (`shown`) or not."""

    def __init__(self, made: int, given: int, shown: bool) -> None:
        self._given = given
        self._shown = shown
        self._made = [_Candidate() for _ in range(made)]

    def take(self, event: Event) -> list[Event]:
        """Note the news of a candidate. With the last of them all, the events to be told: one for each choice given."""
        candidate = self._made[event.choice]
        candidate.pieces.append(event)
        candidate.total += sum(one.logprob for one in event.logprobs or ())
        return self._choose() if event.done else []

    def failed(self, event: Event) -> list[Event]:
        """A candidate failed, and the request with it: its event, as the end of every choice that was to be given."""
        ends = [replace(event, choice=choice, index=0, done=False) for choice in range(self._given)]
        ends[-1].done = True
        return ends

    def _choose(self) -> list[Event]:
        # Sorting is stable: of equals the first made comes first.
        ranked = sorted(self._made, key=lambda candidate: -candidate.score)
        discarded = sum(candidate.tokens for candidate in ranked[self._given :])
        told = []
        for choice, candidate in enumerate(ranked[: self._given]):
            pieces = candidate.pieces
            told.append(
                replace(
                    pieces[-1],
                    choice=choice,
                    index=0,
                    token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
                    texts=[text for piece in pieces for text in piece.texts],
                    logprobs=[one for piece in pieces for one in piece.logprobs or ()] if self._shown else None,
                    done=choice == self._given - 1,
                    discarded=discarded,
                )
            )
        return told
