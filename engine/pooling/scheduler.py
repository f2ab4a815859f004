"""Plans steps of texts: by tier, then by tenants' shares, as many as fit a step's budget of tokens.

A text is computed in one step, whole. It is a Sequence that generates nothing and has no KV blocks; its `choice` is its
number in its request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from engine.declared import shown
from engine.errors import EngineError, ErrorText, RequestError, TextError
from engine.plan import Sampled, ScheduledSeq, StepPlan
from engine.request import Event, Request, TextRow
from engine.scheduling.policy import TIERS, WaitingQueue
from engine.scheduling.scheduler import Held, SchedulerStats
from engine.sequence import Sequence, Status

#: Steps that go well after which halved steps are doubled; twice as many after each time that they did not fit then.
REGROWS_AFTER: Final = 256
MAX_REGROWS_AFTER: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TextLimits:
    kinds: frozenset[str]
    """Kinds of results that the model can make."""
    max_length: int
    """The most tokens of a text."""
    vocab_size: int
    dimensions: int
    """The numbers of a vector."""

    def check(self, request: Request) -> None:
        """Raise RequestError naming the field at fault and its value."""
        pooling = request.pooling
        if pooling is None or pooling.kind not in self.kinds:
            requested = "generate" if pooling is None else pooling.kind
            raise RequestError(
                f"the model cannot {requested}; it can {' and '.join(sorted(self.kinds))}", param="model"
            )
        if not request.id:
            raise RequestError("id is empty", param="id")
        if request.tier not in range(TIERS):
            raise RequestError(f"tier={shown(request.tier)} must be from 0 to {TIERS - 1}", param="tier")
        empty = any((length == 0) is not (at in pooling.errors) for at, length in enumerate(pooling.lengths))
        if not pooling.lengths or empty or sum(pooling.lengths) != len(request.prompt_ids):
            raise RequestError("the texts' lengths must be above 0, and in all that of prompt_ids", param="input")
        if pooling.seconds and len(pooling.seconds) != len(pooling.lengths):
            raise RequestError("the pairs' second texts must have an index each", param="input")
        if pooling.spans and tuple(map(len, pooling.spans)) != pooling.lengths:
            raise RequestError("each token must have its span, or None", param="input")
        if (longest := max(pooling.lengths)) > self.max_length:
            raise RequestError(
                f"a text has {longest} tokens; the model takes {self.max_length}; shorten it, or ask for truncation",
                param="input",
                code="context_length_exceeded",
            )
        lowest, highest = min(request.prompt_ids, default=0), max(request.prompt_ids, default=0)
        for token_id in (lowest, highest):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    ErrorText.of("{input} has token id {}; ids are from 0 to {}", shown(token_id), self.vocab_size - 1),
                    param="input",
                )
        if pooling.dimensions is not None and not 1 <= pooling.dimensions <= self.dimensions:
            raise RequestError(
                f"dimensions={pooling.dimensions} must be from 1 to {self.dimensions}", param="dimensions"
            )


@dataclass(slots=True)
class _Group:
    """A request's texts."""

    request: Request
    texts: list[Sequence]
    rows: dict[int, TextRow | TextError] = field(default_factory=dict)


class PoolingScheduler:
    """Schedules requests with `pooling`, for StepLoop. Not thread-safe, except for `check`."""

    #: A Scheduler's, which StepLoop and Pipeline ask for: no output has a form, none is guessed ahead.
    grammars = None
    speculation = None
    generated_tokens = 0

    def __init__(
        self, limits: TextLimits, *, step_tokens: int, max_num_seqs: int, ageing_s: float, window_s: float = 0.0
    ) -> None:
        """`step_tokens`: the most tokens of a step, unless a single text has more. `max_num_seqs`: its most texts.
        `window_s`: the longest time from a text's arrival for which a step that is not full waits for more."""
        self._limits = limits
        self.step_tokens = self._usual_step_tokens = step_tokens
        self._since_shrink, self._regrows_after, self._regrown = 0, REGROWS_AFTER, False
        self._max_num_seqs = max_num_seqs
        self._window_s = window_s
        # Texts that found nothing to do wait for no others.
        self._found_idle = False
        self._waiting = WaitingQueue(ageing_s)
        self._groups: dict[str, _Group] = {}
        self._serials = count()
        self._running = self._steps = self._tokens = self._aborted = self._not_finite = 0
        self._out_of_memory = self._shrinks = 0

    def check(self, request: Request) -> None:
        """Raise RequestError if the request could never run. Any thread may call it."""
        self._limits.check(request)

    def add(self, request: Request) -> list[Event]:
        """Queue a request that `check` has passed, with an id that is not in use. Returns its end if it has no text to
        compute."""
        assert request.pooling is not None
        self._found_idle |= not self._groups
        group = self._groups[request.id] = _Group(request, [])
        start = 0
        for number, length in enumerate(request.pooling.lengths):
            if number in request.pooling.errors:
                continue
            tokens = request.prompt_ids[start : start + length]
            start += length
            text = Sequence(request, number, tokens, length, _NO_OUTPUT, 0, next(self._serials), request.arrival)
            group.texts.append(text)
            self._waiting.push(text)
        self._tokens += start
        return [] if group.texts else [self._done(group)]

    def abort(self, request_id: str) -> bool:
        """Drop a request. Returns False if the id is unknown. No event follows."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        self._drop(group)
        self._aborted += 1
        return True

    def fail(self, target: Sequence | str, message: str, *, refused: bool = False) -> list[Event]:
        """End the request of a text, or the one with an id, with finish_reason "error". `refused`: see Event."""
        group = self._groups.get(target if isinstance(target, str) else target.request.id)
        if group is None:
            return []
        self._drop(group)
        prompt_tokens = len(group.request.prompt_ids)
        end = Event(group.request.id, finish_reason="error", done=True, error=message, prompt_tokens=prompt_tokens)
        end.refused, end.param = refused, "input" if refused else None
        return [end]

    def _drop(self, group: _Group) -> None:
        del self._groups[group.request.id]
        for text in group.texts:
            if text.status is Status.WAITING:
                self._waiting.remove(text)
            self._end(text)
        group.request.course.running = 0

    def _end(self, text: Sequence) -> None:
        text.status = Status.FINISHED
        if text.account is not None:
            self._waiting.shares.close(text.account)
            text.account = None

    # ---- steps

    def batching_wait(self, now: float) -> float:
        """The seconds that the next step may wait for more texts; 0 if it is to begin now."""
        if not self._window_s or self._found_idle:
            return 0.0
        count, tokens, arrival = 0, 0, now
        for group in self._groups.values():
            for text in group.texts:
                if text.status is Status.WAITING:
                    count, tokens, arrival = count + 1, tokens + len(text.tokens), min(arrival, text.request.arrival)
                    if count >= self._max_num_seqs or tokens >= self.step_tokens:
                        return 0.0
        return max(0.0, arrival + self._window_s - now) if count else 0.0

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step: texts in order as long as the budget lasts, at least one. None if there is nothing."""
        plan = StepPlan()
        self._found_idle = False
        self._running = 0
        while len(plan.rows) < self._max_num_seqs and (head := self._waiting.first(now)) is not None:
            tier, text = head
            if plan.rows and plan.num_tokens + len(text.tokens) > self.step_tokens:
                break
            self._admit(text, tier, now)
            plan.rows.append(ScheduledSeq(text, 0, len(text.tokens), samples=True))
            plan.num_tokens += len(text.tokens)
        plan.prompts, plan.prompt_tokens = len(plan.rows), plan.num_tokens
        self._running = len(plan.rows)
        return plan if plan.rows else None

    def _admit(self, text: Sequence, tier: int, now: float) -> None:
        self._waiting.remove(text)
        text.status, text.effective_tier = Status.RUNNING, tier
        shares, request = self._waiting.shares, text.request
        if text.account is None or text.account.tier != tier:
            if text.account is not None:
                shares.close(text.account)
            text.account = shares.open(tier, request.tenant)
        shares.admitted(text.account)
        text.account.served += len(text.tokens) / request.weight
        request.course.admit(now, 0)

    def update(self, plan: StepPlan, sampled: list[Sampled], now: float) -> list[Event]:
        """Apply a step's results; returns the events of requests whose last text it was, or of which one failed."""
        self._steps += 1
        self._running = 0
        self._regrow()
        events = []
        for row, result in zip(plan.rows, sampled, strict=True):
            text = row.seq
            group = self._groups.get(text.request.id)
            if group is None or text.status is not Status.RUNNING:  # aborted, or failed, meanwhile
                continue
            made, pooling = result.row, text.request.pooling
            if made is None:
                self._not_finite += not result.refused
                message = result.error or "the model made nothing of this text"
                if result.refused or pooling is None or not pooling.item_errors:
                    events += self.fail(text, message, refused=result.refused)
                    continue
                made = TextError("engine_error", message)
            group.rows[text.choice] = made
            self._end(text)
            group.request.course.running -= 1
            group.request.course.computed += len(text.tokens)
            if len(group.rows) == len(group.texts):
                events.append(self._done(group))
        return events

    def _done(self, group: _Group) -> Event:
        request = group.request
        assert request.pooling is not None
        del self._groups[request.id]
        results = {**group.rows, **request.pooling.errors}
        rows = [results[number] for number in range(len(request.pooling.lengths))]
        return Event(request.id, finish_reason="stop", done=True, prompt_tokens=len(request.prompt_ids), rows=rows)

    def foresee(self, plan: StepPlan, needs_token: Callable[[Sequence], bool]) -> None:
        """Never called: steps do not overlap."""
        raise EngineError("steps of texts do not overlap")

    def take_back(self, plans: Iterable[StepPlan], now: float) -> None:
        """Never called: steps do not overlap."""
        raise EngineError("steps of texts do not overlap")

    def shrink(self, now: float, *, tried: bool) -> bool:
        """Halve the steps after one for which the device had no memory; its texts wait again. False if a step of one
        text failed twice."""
        self._out_of_memory += 1
        if self._regrown:
            self._regrows_after = min(2 * self._regrows_after, MAX_REGROWS_AFTER)
        self._since_shrink, self._regrown = 0, False
        texts = [text for group in self._groups.values() for text in group.texts if text.status is Status.RUNNING]
        if len(texts) < 2 and tried:
            return False
        self.step_tokens = max(1, min(self.step_tokens, sum(len(text.tokens) for text in texts)) // 2)
        self._shrinks += 1
        for text in texts:
            text.request.course.running -= 1
            self._end(text)
            text.status = Status.WAITING
            self._waiting.push(text)
        return True

    def _regrow(self) -> None:
        """Double steps that were halved, up to their usual size, after some that went well."""
        self._since_shrink += 1
        if self.step_tokens < self._usual_step_tokens and self._since_shrink % self._regrows_after == 0:
            self.step_tokens = min(2 * self.step_tokens, self._usual_step_tokens)
            self._regrown = True

    # ---- its state

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=self._running,
            waiting=len(self._waiting),
            kv_blocks_total=0,
            kv_blocks_used=0,
            kv_blocks_cached=0,
            kv_blocks_most=0,
            steps=self._steps,
            prompt_tokens=self._tokens,
            cached_tokens=0,
            generated_tokens=0,
            preemptions=0,
            put_off_s=0.0,
            recompute_s=0.0,
            aborted=self._aborted,
            out_of_memory=self._out_of_memory,
            shrinks=self._shrinks,
            not_finite=self._not_finite,
            drafted=0,
            draft_accepted=0,
        )

    def largest(self, count: int) -> list[Held]:
        """Empty: texts hold no blocks."""
        return []

    def preempted(self, now: float) -> list[tuple[str, float]]:
        """Empty: no text is preempted."""
        return []

    def check_idle(self) -> None:
        """Raise EngineError if texts wait although there is no request."""
        if not self._groups and len(self._waiting):
            raise EngineError(f"{len(self._waiting)} texts wait of no request")


#: Stands for the output of a text, which has none.
_NO_OUTPUT: Any = None
