"""Beam search: which continuations of a request's beams go on, which have ended, and when the search is over.

    each beam's likeliest next tokens, from one step or several ─▶ `BeamSearch.advance` ─▶ the beams that go on
                                                                                       ─▶ the n best outputs, at its end

The rules are those of transformers' `generate(num_beams=...)`, so the outputs are, too. A beam's score is the sum of
its tokens' log probabilities, after the request's penalties, biases and lists have changed these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.output import OutputState
from engine.params import FinishReason, SamplingParams
from engine.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Continuation:
    """A token that may continue a beam."""

    token_id: int
    score: float
    """Its log probability after the request's penalties, biases and lists."""
    logprobs: TokenLogprobs | None = None
    """If the request wants them."""


@dataclass(slots=True)
class Beam:
    """An output that is searched for, as far as it is known."""

    output: OutputState
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The piece of text of each token."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry for each token, if the request wants them."""
    score: float = 0.0
    """The sum of the tokens' scores."""
    continuations: tuple[Continuation, ...] | None = None
    """Its likeliest next tokens; None until they are computed."""
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None

    def extended(self, continuation: Continuation) -> Beam:
        """This beam with one more token."""
        output = self.output.fork()
        text, reason, match = output.push(continuation.token_id)
        logprobs = self.logprobs if continuation.logprobs is None else [*self.logprobs, continuation.logprobs]
        return Beam(
            output,
            [*self.token_ids, continuation.token_id],
            [*self.texts, text],
            logprobs,
            self.score + continuation.score,
            finish_reason=reason,
            stop_match=match,
        )


@dataclass(slots=True)
class Ended:
    """An output that has ended."""

    beam: Beam
    score: float
    """The beam's, divided by its length to the power of the length penalty."""


class BeamSearch:
    """The search of one request. Its beams all have the same number of tokens."""

    def __init__(self, params: SamplingParams, limit: int) -> None:
        """`limit`: the most tokens of an output."""
        assert params.beam_width is not None
        self.width = params.beam_width
        self._returned = params.n
        self._penalty = params.length_penalty
        self._early = params.early_stopping
        self._limit = limit
        #: The best outputs that have ended, at most as many as there are beams, best first.
        self._ended: list[Ended] = []
        #: The tokens that were computed for all beams together.
        self.tokens = 0

    def advance(self, beams: Sequence[Beam]) -> list[tuple[int, Beam]]:
        """The beams that go on, best first, each with the index of the one that it continues; none if the search is
        over. `beams`: those that went on before, all with their continuations."""
        self.tokens += len(beams)
        ranked = sorted(
            (
                (beam.score + continuation.score, index, continuation)
                for index, beam in enumerate(beams)
                for continuation in beam.continuations or ()
            ),
            key=lambda entry: -entry[0],
        )
        going: list[tuple[int, Beam]] = []
        ended: list[Ended] = []
        for rank, (_, index, continuation) in enumerate(ranked):
            if len(going) == self.width:
                break
            beam = beams[index].extended(continuation)
            if beam.finish_reason is None:
                going.append((index, beam))
            elif rank < self.width:  # those behind them only lend their places
                ended.append(Ended(beam, beam.score / len(beam.token_ids) ** self._penalty))
        self._ended = sorted([*self._ended, *ended], key=lambda entry: -entry.score)[: self.width]
        return going if going and self._may_improve(going[0][1]) else []

    def _may_improve(self, best: Beam) -> bool:
        """Whether the search goes on. `best`: the best of the beams that would."""
        if len(self._ended) < self.width:
            return True
        if self._early is True:
            return False
        length = self._limit if self._early == "never" and self._penalty > 0 else len(best.token_ids)
        hope: float = best.score / length**self._penalty
        return hope > self._ended[-1].score

    def outputs(self) -> list[Beam]:
        """The outputs to return, best first: n, or fewer if there were no more."""
        return [entry.beam for entry in self._ended[: self._returned]]
