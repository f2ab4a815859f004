"""A request's choices: how they start, whom they share a prompt with, how their news is told."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.logprobs import PromptScores
from engine.params import FinishReason
from engine.plan import Sampled, ScheduledSeq
from engine.request import Event, Request
from engine.scheduling.best_of import Candidates
from engine.sequence import Sequence, Status


@dataclass(slots=True)
class Group:
    """The first unfinished choice leads: the others wait until its prompt is computed, then share its blocks."""

    request: Request
    seqs: list[Sequence] = field(default_factory=list)
    led: list[Sequence] = field(default_factory=list)
    unfinished: int = field(kw_only=True)
    """Choices of which the end has not been told."""
    cached_tokens: int | None = None
    """None until a choice was first admitted."""
    scores: PromptScores | None = None
    """Where the log probabilities of the prompt are wanted."""
    candidates: Candidates | None = None
    """Where more choices are made than given."""

    def enter(self, seq: Sequence) -> tuple[FinishReason | None, str | int | None]:
        """Take in a new choice with the tokens that were published before; the answer says whether they ended it.

        Tokens past the end, if there are any, are dropped. A choice that is to generate nothing ends at once, but for
        the first where the prompt has to be computed for its own sake.
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
        self.led.append(seq)
        return None, None

    def donor(self, root: bytes, entered: Container[int]) -> Sequence | None:
        """A running choice whose prompt is computed, under the same root; those with a serial in `entered` have yet to
        compute theirs."""
        for seq in self.seqs:
            computed = seq.status is Status.RUNNING and seq.computed >= seq.prompt_len
            if computed and seq.root == root and seq.serial not in entered:
                return seq
        return None

    def score(self, row: ScheduledSeq) -> list[Event]:
        """Enter what a step found out about the prompt; tell it, once, when all is known."""
        scores = self.scores
        if scores is None:
            return []
        if row.scored is not None:
            scores.take(row.scored)
        if scores.told or not scores.done:
            return []
        scores.told = True
        event = self.event(row.seq, None)
        event.index = 0
        event.prompt_logprobs = scores.found
        return [event]

    def event(
        self,
        seq: Sequence,
        reason: FinishReason | None,
        match: str | int | None = None,
        sampled: Seq[Sampled] = (),
        texts: Seq[str] = (),
        error: str | None = None,
    ) -> Event:
        """The news of a choice, to be told after it was entered that it has ended. `sampled`: its last tokens, with the
        piece of text that each adds."""
        token_ids = [one.token_id for one in sampled]
        logprobs = [one.logprobs for one in sampled if one.logprobs is not None]
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
