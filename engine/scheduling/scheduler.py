"""The scheduler: takes requests, makes step plans (planner.py) and turns sampled tokens into events.

It decides and never computes. This file handles requests before, between and after their steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import chain, count
from typing import NamedTuple

from engine.beams import Beam, BeamSearch
from engine.errors import EngineError, ErrorText, FieldName, RequestError
from engine.grammar.matcher import Grammars
from engine.kv import BlockTables, Capacity
from engine.output import OutputState
from engine.params import FinishReason
from engine.plan import Sampled, ScheduledSeq, StepPlan
from engine.prefix import adapter_mark, long_root, root_hash
from engine.request import Event, PromptScores, Request
from engine.scheduling.group import Candidates, Group
from engine.scheduling.limits import ModelTraits, RequestLimits
from engine.scheduling.planner import Planner
from engine.scheduling.policy import Policy
from engine.sequence import UNKNOWN, Sequence, Status
from engine.speculate import Speculation


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges at this moment and counters since the start."""

    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    """The blocks that sequences hold. Cached blocks that no sequence holds count as free."""
    kv_blocks_cached: int
    """The blocks that no sequence holds, and whose contents sequences may share."""
    kv_blocks_most: int
    """The most blocks held in any step."""
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    put_off_s: float
    """Seconds in which preempted requests waited, until they went on."""
    aborted: int
    out_of_memory: int
    """The number of steps for which the device had no memory."""
    shrinks: int
    """The number of times that steps were made smaller for lack of memory."""
    not_finite: int
    """The number of sequences that ended because the model's logits were NaN or infinite."""
    drafted: int
    """The number of draft tokens that the target model computed."""
    draft_accepted: int
    """The number of those draft tokens that were accepted."""
    recompute_s: float
    """The part of all steps' time (s) for tokens that had been computed before; `engine.execution` measures it."""


class Held(NamedTuple):
    """A running sequence and the KV blocks in its tables. Sequences may share blocks."""

    request_id: str
    choice: int
    tier: int
    prompt_tokens: int
    tokens: int
    """Of prompt and output."""
    blocks: int


#: Looked up once: a step asks for each of its rows.
_RUNNING = Status.RUNNING


def _by_row(plan: StepPlan, sampled: list[Sampled]) -> list[Sampled | None] | list[Sampled]:
    """The result of each row, None for one that does not sample. Raises EngineError if their number is wrong."""
    expected = len([row for row in plan.rows if row.samples])
    if len(sampled) != expected:
        raise EngineError(f"{len(sampled)} tokens were sampled for a plan with {expected} sampling rows")
    if expected == len(plan.rows):
        return sampled
    results = iter(sampled)
    return [next(results) if row.samples else None for row in plan.rows]


class Scheduler:
    """Schedules requests. Not thread-safe, except for `check`: one thread calls schedule and update in turn."""

    def __init__(
        self,
        capacity: Capacity,
        traits: ModelTraits = ModelTraits(),  # noqa: B008 - frozen
        policy: Policy = Policy(),  # noqa: B008 - frozen
        speculation: Speculation | None = None,
    ) -> None:
        self._traits = traits
        self._rope_switch = traits.rope_switch
        self._tables = BlockTables(capacity.spaces, capacity.block_size, policy.enable_prefix_caching)
        self._limits = RequestLimits(
            capacity.max_model_len,
            capacity.tokens_of_one,
            traits.vocab_size,
            max_num_seqs=capacity.max_num_seqs,
            block_size=capacity.block_size,
        )
        self._groups: dict[str, Group] = {}
        self._planner = Planner(self._tables, self._groups, capacity, policy, speculation)
        #: The source of draft tokens.
        self.speculation = speculation
        self._seeds = random.Random(policy.seed)  # noqa: S311 - for sampling, not secrets
        self._serials = count()
        self._steps = self._prompt_tokens = self._generated_tokens = self._aborted = self._not_finite = 0
        # Plans in flight that are counted as computed.
        self._foreseen: list[StepPlan] = []

    # ---- requests come and go

    def check(self, request: Request) -> None:
        """Raise RequestError if the request could never run. It changes the request alone, so any thread may call
        it."""
        self._limits.check(request)
        self._traits.spelled(request.params.bad_words)
        self._traits.check_form(request.params)
        if self._traits.watermark(request.params.watermark) is not None and request.params.beam_width is not None:
            raise RequestError(
                ErrorText.of("{beam_width} and {watermark} exclude each other: beams bear no watermark; leave one out"),
                param="beam_width",
            )
        request.loaded = self._traits.adapter(request.adapter)

    @property
    def grammars(self) -> Grammars | None:
        """Makes the matchers that a request whose outputs are to have a form needs before `add`."""
        return self._traits.grammars

    def add(self, request: Request) -> list[Event]:
        """Queue a request that `check` has passed, with an id that is not in use, and its matchers if it has a form.

        Returns events (token_ids=[]) for choices that had already finished according to `resume`; usually none. The
        caller must deliver them like those of `update`.
        """
        group = self._group(request)
        events = []
        for seq in self._choices(group):
            reason, match = group.enter(seq)
            if request.taken_over:
                seq.computed_before = len(seq.tokens)
            if self._rope_switch is not None and len(seq.tokens) > self._rope_switch:
                seq.root = long_root(seq.root)
            if reason is not None:
                group.unfinished -= 1
                events.append(group.event(seq, reason, match))
        self._prompt_tokens += len(request.prompt_ids)
        if group.followers:
            self._groups[request.id] = group
            self._planner.waiting.push(group.followers.pop(0))
        return events

    def _group(self, request: Request) -> Group:
        """A request's group, with no choices yet."""
        params = request.params
        # If nothing is generated, there are no candidates to choose from.
        limit = self._limits.output_limit(request)
        selects = params.selects and limit > 0
        beams = selects and params.beam_width is not None
        group = Group(request, unfinished=1 if beams else params.width if selects else params.n)
        if beams:
            group.search = BeamSearch(params, limit)
        elif selects:
            group.candidates = Candidates(params.width, params.n, params.logprobs is not None)
        if params.prompt_logprobs is not None:
            group.scores = PromptScores(list(request.prompt_ids), params.prompt_logprobs)
        return group

    def _choices(self, group: Group) -> list[Sequence]:
        """New sequences, one for each choice of a group."""
        request, traits = group.request, self._traits
        params, prompt = request.params, request.prompt_ids
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        # By version: a name may stand for another adapter by and by.
        root = root_hash(request.salt, request.loaded.version if request.loaded else "", traits.version)
        bad_words = traits.spelled(params.bad_words)
        limit = self._limits.output_limit(request)
        watermark = traits.watermark(params.watermark)
        matchers, request.matchers = request.matchers, []
        each = [matchers[choice] if params.forms else None for choice in range(group.unfinished)]
        plain = group.scores is None and not group.selects and not params.forms
        plain = plain and self.speculation is None and self._rope_switch is None
        choices = [
            Sequence(
                request=request,
                choice=choice,
                tokens=list(prompt),
                prompt_len=len(prompt),
                output=OutputState(params, traits.eos_token_ids, traits.new_detokenizer(), limit, matcher),
                seed=seed,
                serial=next(self._serials),
                queued_at=request.arrival,
                root=root,
                scores=group.scores,
                bad_words=bad_words,
                matcher=matcher,
                watermark=watermark,
                adapter=request.loaded,
                plain=plain,
            )
            for choice, matcher in enumerate(each)
        ]
        if group.search is not None:
            for seq in choices:
                seq.beam = Beam(seq.output)
                seq.guessed.barred = True  # drafts guess one token, and a beam wants several
        return choices

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks. Returns False if the id is unknown. No event follows."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        for seq in group.seqs:
            self._end(group, seq)
        self._aborted += 1
        return True

    def fail(
        self, target: Sequence | str, message: str, *, refused: bool = False, param: str | None = None
    ) -> list[Event]:
        """End one sequence, or all choices of a request id, with finish_reason "error". `refused`, `param`: see Event.

        Their blocks leave the prefix cache, because the K/V they wrote may be faulty.
        """
        request_id = target if isinstance(target, str) else target.request.id
        group = self._groups.get(request_id)
        if group is None:
            return []
        events = []
        # If one candidate fails, it is not known which are the best: the whole request fails.
        for seq in [target] if isinstance(target, Sequence) and not group.selects else group.seqs:
            if seq.status is not Status.FINISHED:
                self._tables.forget(seq)
                self._end(group, seq)
                events.append(replace(group.event(seq, "error", error=message), refused=refused, param=param))
        return group.failed(events[-1]) if group.selects and events else events

    # ---- one step

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step. Returns None if there is nothing to compute."""
        return self._planner.plan(now)

    def foresee(self, plan: StepPlan, needs_token: Callable[[Sequence], bool]) -> None:
        """Count a plan in flight as computed, so that the next step can be planned before its results are known.

        A sequence that samples in it then ends in an UNKNOWN token, which the next step may compute. A sequence has
        nothing to compute before `update` if: that token will end it for certain; the token takes it across the rope
        switch; the executor `needs_token` itself; it has a draft; it is to have a draft next; or it is a beam, which
        others may replace. All tokens but draft tokens are known, so the blocks they fill are offered to the prefix
        cache. The caller then calls `schedule`, and after it `update` or `take_back` of this plan, with nothing else
        between. Where several plans are in flight, each is foreseen once, in order; the executor then needs all tokens.
        """
        if any(plan is each for each in self._foreseen):
            return
        self._foreseen.append(plan)
        self._note_in_flight()
        size = self._tables.block_size
        for row in plan.rows:
            seq = row.seq
            if seq.status is not _RUNNING:
                continue
            if seq.plain and row.count == 1 and row.start >= seq.prompt_len:
                # A decode, as in `update`.
                seq.computed = computed = row.start + 1
                if computed % size == 0:
                    self._tables.register(seq)
                output = seq.output
                if row.samples and output.count + 1 < output.limit and not needs_token(seq):
                    seq.tokens.append(UNKNOWN)
                    seq.pending = True
                continue
            seq.computed = row.known_tokens
            self._tables.register(seq)
            if row.draft or seq.beam is not None or (self.speculation is not None and self.speculation.waits(seq)):
                continue
            if not row.samples or seq.output.count + 1 >= seq.output.limit or len(seq.tokens) == self._rope_switch:
                continue
            if not needs_token(seq):
                seq.tokens.append(UNKNOWN)
                seq.pending = True

    def _note_in_flight(self) -> None:
        self._planner.in_flight = {row.seq.serial for plan in self._foreseen for row in plan.rows}

    def take_back(self, plans: Iterable[StepPlan], now: float) -> None:
        """Give up plans whose results will never be known. Their sequences wait, with the tokens that are known, and
        compute the lost part again.
        """
        self._foreseen.clear()
        self._note_in_flight()
        for row in chain.from_iterable(plan.rows for plan in plans):
            self._tables.forget(row.seq, row.start)
            if row.seq.status is Status.RUNNING:
                self._planner.preempt(row.seq, now)

    def shrink(self, now: float, *, tried: bool) -> bool:
        """See Planner.shrink. Not allowed while a plan is in flight."""
        return self._planner.shrink(now, tried=tried)

    @property
    def step_tokens(self) -> int:
        """The most tokens of one step."""
        return self._planner.max_num_batched_tokens

    def update(self, plan: StepPlan, sampled: list[Sampled], now: float) -> list[Event]:
        """Apply a step's results and return their events. `sampled` has one entry for each row with samples=True, in
        order.

        Rows whose sequence has ended since `schedule` are skipped, although their entry is there. Such a sequence was
        aborted, has failed, or was ended by the step before, which was in flight then. A sequence preempted since then
        gets its token while it waits. Raises EngineError if the number of entries is not that of the sampling rows.
        """
        results = _by_row(plan, sampled)
        self._foreseen = [each for each in self._foreseen if each is not plan]
        self._note_in_flight()
        self._steps += 1
        events: list[Event] = []
        groups, tables, size, decoded = self._groups, self._tables, self._tables.block_size, 0
        for row, result in zip(plan.rows, results, strict=True):
            seq = row.seq
            if (
                seq.plain
                and row.count == 1
                and result is not None
                and row.start >= seq.prompt_len
                and seq.status is _RUNNING
                and result.error is None
            ):
                # A decode, as nearly all rows of most steps: what is below for it, without the calls.
                seq.computed = computed = row.start + 1
                if computed % size == 0:
                    tables.register(seq)
                token_id, output = result.token_id, seq.output
                if seq.pending:
                    seq.tokens[-1] = token_id
                    seq.pending = False
                else:
                    seq.tokens.append(token_id)
                decoded += 1
                name = seq.request.id
                group = groups[name]
                if group.followers:  # of a leader that was preempted while its prompt was in flight
                    self._release_followers(group, seq)
                text, reason, match = output.push(token_id)
                if reason is not None:
                    self._end(group, seq)
                    events.append(group.event(seq, reason, match, (result,), (text,)))
                    continue
                logprobs = None if result.logprobs is None else [result.logprobs]
                event = Event(name, seq.choice, output.count - 1, [token_id], [text], logprobs)
                event.prompt_tokens, event.cached_tokens = seq.prompt_len, group.cached_tokens or 0
                events.append(event)
                continue
            if seq.status is Status.FINISHED:
                continue
            group = self._groups[seq.request.id]
            if result is not None and result.error is not None:
                events += self._spoilt(row, result, now)
                continue
            if row.scored is not None and row.scored.error is not None:
                self._not_finite += 1
                events += self.fail(seq.request.id, row.scored.error)
                continue
            if seq.status is Status.RUNNING:
                # A later part of its prompt may have been foreseen, and blocks behind that one's window released.
                seq.computed = max(seq.computed, row.known_tokens)
                self._tables.register(seq)
                if group.followers and seq.computed >= seq.prompt_len:
                    self._release_followers(group, seq)
            if group.scores is not None:
                events += group.score(row)
            if result is not None and group.search is not None:
                events += self._continue_beam(group, group.search, seq, result, now)
            elif result is not None:
                events += self._extend(group, row, result, now)
        self._generated_tokens += decoded
        return events

    def _extend(self, group: Group, row: ScheduledSeq, result: Sampled, now: float) -> list[Event]:
        """Append the tokens that a row sampled: one, and one more for each accepted draft token."""
        seq = row.seq
        if self.speculation is not None and row.max_draft:
            self.speculation.entered(row, len(result.then))
        if seq.output.limit == 0:  # it ran for its prompt's log probabilities alone
            self._end(group, seq)
            return group.events_for_caller(group.event(seq, "length"))
        if result.then:
            return self._extend_by_draft(group, row, result, now)
        text, reason, match = self._append(group, seq, result.token_id, now)
        return group.events_for_caller(group.event(seq, reason, match, (result,), (text,)))

    def _extend_by_draft(self, group: Group, row: ScheduledSeq, result: Sampled, now: float) -> list[Event]:
        """Append the token that a row sampled and those of its accepted draft tokens.

        Each is appended as if it came alone, so the first token that ends the sequence is its last.
        """
        seq = row.seq
        reason: FinishReason | None = None
        match: str | int | None = None
        entered: list[Sampled] = []
        texts: list[str] = []
        token = result
        for token in (result, *result.then):
            if token.error is not None:
                break
            if entered and seq.status is Status.RUNNING:
                # The token before it was an accepted draft token: its K/V are in the cache.
                seq.computed += 1
                self._tables.register(seq)
            text, reason, match = self._append(group, seq, token.token_id, now)
            entered.append(token)
            texts.append(text)
            if reason is not None:
                break
        events = group.events_for_caller(group.event(seq, reason, match, entered, texts))
        return events if token.error is None else events + self._spoilt(row, token, now)

    def _append(
        self, group: Group, seq: Sequence, token_id: int, now: float
    ) -> tuple[str, FinishReason | None, str | int | None]:
        """Append one token to a sequence. Returns what OutputState.push returns."""
        if seq.pending:
            seq.tokens[-1] = token_id
            seq.pending = False
        else:
            seq.tokens.append(token_id)
        self._generated_tokens += 1
        text, reason, match = seq.output.push(token_id)
        if reason is not None:
            self._end(group, seq)
        elif self._rope_switch is not None and len(seq.tokens) == self._rope_switch + 1:
            seq.root = long_root(seq.root)
            seq.hashes = []
            if seq.status is Status.RUNNING:
                self._planner.preempt(seq, now)
        return text, reason, match

    # ---- beam search

    def _continue_beam(
        self, group: Group, search: BeamSearch, seq: Sequence, result: Sampled, now: float
    ) -> list[Event]:
        """Enter a beam's likeliest next tokens. Once all beams have theirs, the search goes on, or is over."""
        beams = [each.beam for each in group.seqs if each.beam is not None]
        assert seq.beam is not None
        if seq.matcher is not None and seq.matcher.error:  # its form is not at an end: nobody knows what may follow
            return self._unfollowed(seq, seq.matcher.error)
        seq.beam.continuations = result.continuations
        if seq.status is Status.WAITING:  # it was preempted while its step was in flight
            self._planner.park(seq)
        if any(beam.continuations is None for beam in beams):
            return []
        self._generated_tokens += len(beams)
        going = search.advance(beams)
        group.request.course.searched = search.tokens
        if going:
            self._branch(group, going, now)
            return []
        for each in group.seqs:
            self._end(group, each)
        return group.found(search)

    def _branch(self, group: Group, going: list[tuple[int, Beam]], now: float) -> None:
        """Replace a search's beams by those that go on. The first that continues a beam takes its sequence over. The
        others share its blocks."""
        parents = group.seqs
        heirs: dict[int, Beam] = {}
        others = [(parents[at], beam) for at, beam in going if heirs.setdefault(at, beam) is not beam]
        branches = [(parent, self._branched(parent, beam)) for parent, beam in others]
        for at, seq in enumerate(parents):
            if at not in heirs:  # first, so that there are slots and blocks
                self._end(group, seq)
        group.seqs = [*(parents[at] for at in heirs), *(seq for _, seq in branches)]
        group.unfinished = len(group.seqs)
        long = self._rope_switch is not None and len(parents[0].tokens) == self._rope_switch
        for parent, seq in branches:
            if long or parent.status is not Status.RUNNING or not self._planner.fork(seq, parent):
                self._planner.enqueue(seq, now)
        for at, beam in heirs.items():
            seq = parents[at]
            seq.tokens.append(beam.token_ids[-1])
            seq.beam, seq.output, seq.matcher = beam, beam.output, beam.output.matcher
            if seq.status is Status.WAITING:
                self._planner.enqueue(seq, now)
        for seq in group.seqs if long else ():
            seq.root, seq.hashes = long_root(seq.root), []
            if seq.status is Status.RUNNING:
                self._planner.preempt(seq, now)

    def _branched(self, parent: Sequence, beam: Beam) -> Sequence:
        """A new sequence for a beam that continues `parent`, in no queue yet."""
        return replace(
            parent,
            tokens=[*parent.tokens, beam.token_ids[-1]],
            output=beam.output,
            matcher=beam.output.matcher,
            beam=beam,
            serial=next(self._serials),
            slot=-1,
            computed=0,
            tables=[],
            allocated=0,
            status=Status.WAITING,
            account=None,
            hashes=list(parent.hashes),
            registered=0,
        )

    def _spoilt(self, row: ScheduledSeq, result: Sampled, now: float) -> list[Event]:
        """Handle a row whose sampling failed.

        If the row had a draft, the draft may be to blame: attention weighs masked values with 0, and 0 x NaN is NaN.
        Then the sequence is computed again, from now on without drafts. Else the sequence fails.
        """
        seq = row.seq
        if row.draft and not result.refused and self.speculation is not None:
            self.speculation.bar(seq)
            self._tables.forget(seq, row.start)
            if seq.status is Status.RUNNING:
                self._planner.preempt(seq, now)
            return []
        self._not_finite += not result.refused
        if result.refused and seq.matcher is not None and seq.matcher.error:
            return self._unfollowed(seq, seq.matcher.error)
        return self.fail(seq, result.error or "", refused=result.refused)

    def _unfollowed(self, seq: Sequence, why: str) -> list[Event]:
        """End a sequence whose form cannot be followed any further."""
        form = seq.request.params.forms[0]
        text = ErrorText.of("{} cannot be followed any further: {}", FieldName(form), why)
        return self.fail(seq, text, refused=True, param=form)

    def _release_followers(self, group: Group, leader: Sequence) -> None:
        """Queue the choices that waited for their leader to compute the prompt."""
        for seq in group.followers:
            if seq.root == leader.root:
                seq.hashes = leader.hashes[: leader.prompt_len // self._tables.block_size]
            self._planner.waiting.push(seq)
        group.followers.clear()

    def _end(self, group: Group, seq: Sequence) -> None:
        """Remove a sequence from all queues and tables. Does nothing if it has ended before."""
        if seq.status is Status.FINISHED:
            return
        if seq in group.followers:
            group.followers.remove(seq)
        elif not seq.parked:
            self._planner.remove(seq)
        seq.status = Status.FINISHED
        group.unfinished -= 1
        if group.unfinished == 0:
            del self._groups[seq.request.id]
        elif len(group.followers) == group.unfinished:
            self._release_followers(group, seq)

    # ---- observation

    @property
    def has_work(self) -> bool:
        """Whether any sequence is running or waiting."""
        return bool(self._groups)

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled and kept since the start."""
        return self._generated_tokens

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._planner.running),
            waiting=len(self._planner.waiting) + sum(len(group.followers) for group in self._groups.values()),
            kv_blocks_total=self._tables.num_blocks,
            kv_blocks_used=self._tables.used,
            kv_blocks_cached=self._tables.cached,
            kv_blocks_most=self._planner.most_blocks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._planner.cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._planner.preemptions,
            put_off_s=self._planner.put_off_s,
            recompute_s=0.0,
            aborted=self._aborted,
            out_of_memory=self._planner.out_of_memory,
            shrinks=self._planner.shrinks,
            not_finite=self._not_finite,
            drafted=0 if self.speculation is None else self.speculation.drafted,
            draft_accepted=0 if self.speculation is None else self.speculation.accepted,
        )

    def largest(self, count: int) -> list[Held]:
        """The running sequences that hold most blocks, up to `count`, the largest first."""
        return nlargest(
            count,
            (
                Held(
                    seq.request.id,
                    seq.choice,
                    seq.request.tier,
                    seq.prompt_len,
                    len(seq.tokens),
                    sum(len(table.blocks) for table in seq.tables),
                )
                for seq in self._planner.running
            ),
            key=lambda held: held.blocks,
        )

    def preempted(self, now: float) -> list[tuple[str, float]]:
        """See Planner.preempted."""
        return self._planner.preempted(now)

    def marks(self) -> list[str]:
        """The marks (`engine.prefix`) of loaded adapters, and of prefixes that are cached. Any thread may ask."""
        loaded = self._traits.adapters.items().values() if self._traits.adapters is not None else ()
        adapters = [adapter_mark(adapter.version, self._traits.version) for adapter in loaded]
        return adapters + self._tables.marks()

    def check_idle(self) -> None:
        """Raise EngineError if a block or a slot is held although there is no work. Takes constant time."""
        usage = self._tables.used, self._planner.slots_used
        if not self._groups and usage != (0, 0):
            raise EngineError(f"with no work, {usage[0]} KV blocks and {usage[1]} slots are held")

    def check_integrity(self) -> None:
        """Raise EngineError if blocks, slots, queues and tables are inconsistent. Takes time proportional to the
        pool."""
        self.check_idle()
        self._planner.check_integrity()
        groups = self._groups.values()
        alive = [seq for group in groups for seq in group.seqs if seq.status is not Status.FINISHED]
        placed = [*self._planner.running, *self._planner.waiting, *(seq for group in groups for seq in group.followers)]
        placed += [seq for seq in alive if seq.parked]
        if sorted(seq.serial for seq in alive) != sorted(seq.serial for seq in placed):
            raise EngineError("the unfinished sequences are not each in one queue")
        for group in groups:
            if group.unfinished != sum(seq.status is not Status.FINISHED for seq in group.seqs):
                raise EngineError(f"request {group.request.id!r} miscounts its unfinished choices")
