"""A request's choices: how they start, share the prompt's KV blocks and report events.

best_of makes more choices than it returns (`Candidates`). Once all have ended, it returns the best ones, best first.
The sequences of a beam search are its beams, in place of choices (`engine/beams.py`).
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from engine.beams import BeamSearch
from engine.errors import NONE_LEFT, ErrorText
from engine.params import FinishReason
from engine.plan import Sampled, ScheduledSeq
from engine.request import Event, PromptScores, Request
from engine.sequence import Sequence, Status


@dataclass(slots=True)
class Group:
    """The choices of one request. The first unfinished choice leads: the others wait until it has computed the prompt,
    and then share its blocks."""

    request: Request
    seqs: list[Sequence] = field(default_factory=list)
    followers: list[Sequence] = field(default_factory=list)
    unfinished: int = field(kw_only=True)
    """The number of choices whose end was not reported yet."""
    cached_tokens: int | None = None
    """The prompt tokens found in the prefix cache. None until a choice is first admitted."""
    scores: PromptScores | None = None
    """The log probabilities of the prompt, if the request wants them."""
    candidates: Candidates | None = None
    """The candidates of best_of, if more choices are made than returned."""
    search: BeamSearch | None = None
    """The beam search, if the request asks for one. `seqs` are then its beams, `unfinished` is their number."""

    @property
    def selects(self) -> bool:
        """Whether its events wait until the best outputs are known, so that one failure fails all."""
        return self.candidates is not None or self.search is not None

    def enter(self, seq: Sequence) -> tuple[FinishReason | None, str | int | None]:
        """Add a new choice with the tokens that were published before. Returns its finish reason and stop match if
        those tokens already ended it, else (None, None).

        Tokens past the end are dropped. A choice that generates nothing ends at once, except the first choice if the
        prompt's log probabilities are wanted.
        """
        self.seqs.append(seq)
        if seq.output.limit == 0 and (self.scores is None or seq.choice > 0):
            seq.status = Status.FINISHED
            return "length", None
        published = self.request.resume[seq.choice] if seq.choice < len(self.request.resume) else []
        for token_id in published:
            seq.tokens.append(token_id)
            _, reason, match = seq.output.push(token_id)
            if reason is not None:
                seq.status = Status.FINISHED
                return reason, match
        self.followers.append(seq)
        return None, None

    def donor(self, root: bytes, admitted: Container[int]) -> Sequence | None:
        """A running choice with the same root hash whose prompt is computed. Choices with a serial in `admitted` have
        yet to compute theirs."""
        for seq in self.seqs:
            computed = seq.status is Status.RUNNING and seq.computed >= seq.prompt_len
            if computed and seq.root == root and seq.serial not in admitted:
                return seq
        return None

    def score(self, row: ScheduledSeq) -> list[Event]:
        """Record the prompt's log probabilities from a step. Returns one event with all of them once they are
        complete."""
        scores = self.scores
        if scores is None:
            return []
        if row.scored is not None:
            scores.take(row.scored)
        if scores.reported or not scores.done:
            return []
        scores.reported = True
        event = self.event(row.seq, None)
        event.index = 0
        event.prompt_logprobs = scores.entries
        return [event]

    def events_for_caller(self, event: Event) -> list[Event]:
        """The events to report of a choice's event: those of best_of's candidates wait for each other."""
        return [event] if self.candidates is None else self.candidates.take(event)

    def failed(self, event: Event) -> list[Event]:
        """A sequence failed of those among which the best are chosen, so the request fails. Returns its event once for
        every choice that was to be returned."""
        ends = [replace(event, choice=choice, index=0, done=False) for choice in range(self.request.params.n)]
        ends[-1].done = True
        return ends

    def found(self, search: BeamSearch) -> list[Event]:
        """The events of the outputs of a beam search that is over, one for each choice."""
        outputs = search.outputs()
        count, shown = self.request.params.n, self.request.params.logprobs is not None
        discarded = max(0, search.tokens - sum(len(beam.token_ids) for beam in outputs))
        if len(outputs) < count:
            why = (
                ErrorText.of("no more than {} outputs are possible, and {n} is {}", len(outputs), count)
                if outputs
                else NONE_LEFT
            )
            return self.failed(replace(self.event(self.seqs[0], "error", error=why), refused=True))
        return [
            replace(
                self.event(self.seqs[0], beam.finish_reason, beam.stop_match),
                choice=choice,
                index=0,
                token_ids=beam.token_ids,
                texts=beam.texts,
                logprobs=beam.logprobs if shown else None,
                done=choice == count - 1,
                discarded=discarded,
            )
            for choice, beam in enumerate(outputs)
        ]

    def event(
        self,
        seq: Sequence,
        reason: FinishReason | None,
        match: str | int | None = None,
        sampled: Seq[Sampled] = (),
        texts: Seq[str] = (),
        error: str | None = None,
    ) -> Event:
        """Make the event of a choice. If the choice has ended, mark it finished before this call.

        `sampled`: its new tokens; `texts`: the piece of text that each adds.
        """
        token_ids = [token.token_id for token in sampled]
        logprobs = [token.logprobs for token in sampled if token.logprobs is not None]
        return Event(
            request_id=self.request.id,
            choice=seq.choice,
            index=len(seq.tokens) - seq.prompt_len - len(token_ids),
            token_ids=token_ids,
            texts=list(texts),
            logprobs=logprobs or None,
            finish_reason=reason,
            stop_match=match,
            done=self.unfinished == 0,
            error=error,
            prompt_tokens=seq.prompt_len,
            cached_tokens=self.cached_tokens or 0,
        )


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
