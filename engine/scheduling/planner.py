"""Plans the next step: chooses the tokens of each sequence, admits waiting sequences and preempts running ones.

There are no prefill and decode phases: every sequence catches `computed` up to `len(tokens)`. The planner visits the
running and waiting sequences once, in the order of policy.py. In each effective tier, running sequences come first.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.kv import BlockTables, Capacity, Claim
from engine.plan import ScheduledSeq, StepPlan
from engine.scheduling.group import Group
from engine.scheduling.policy import (
    EXCLUSIVE_INTERVAL,
    EXCLUSIVE_STEPS,
    TIERS,
    Policy,
    WaitingQueue,
    is_priority,
    running_key,
)
from engine.sequence import UNKNOWN, Sequence, Status
from engine.speculate import Speculation

#: One in this many of a step's tokens is kept for running decodes even if prompts of better tiers could use it.
DECODE_SHARE = 8


class Planner:
    """Holds the waiting and running sequences with their slots and KV blocks."""

    def __init__(
        self,
        tables: BlockTables,
        groups: Mapping[str, Group],
        capacity: Capacity,
        policy: Policy,
        speculation: Speculation | None,
    ) -> None:
        """`groups`: the unfinished requests by id, which the scheduler keeps."""
        self._speculation = speculation
        self._tables = tables
        self._groups = groups
        self.max_num_seqs = capacity.max_num_seqs
        self.max_num_batched_tokens = capacity.max_num_batched_tokens
        self.waiting = WaitingQueue(policy.ageing_s)
        self.running: list[Sequence] = []  # sorted by running_key
        self._slots = list(range(capacity.max_num_seqs))  # a heap: low rows are used first, which keeps batches compact
        self.preemptions = 0
        self.put_off_s = 0.0
        self.cached_tokens = 0
        self.out_of_memory = self.shrinks = 0
        # The copies of the next plan: those for beams that have branched since the last one.
        self._copies: list[tuple[int, int, int]] = []
        self.most_blocks = 0
        #: The serials of the sequences of the steps in flight, while the next step is planned.
        self.in_flight: Set[int] = frozenset()
        self._ordinary_tokens = capacity.step_tokens
        self._batches = policy.batches
        self._max_exclusive_credit = EXCLUSIVE_STEPS * EXCLUSIVE_INTERVAL if policy.exclusive else 0
        # The number of steps that may still exclude worse tiers, in units of 1 / EXCLUSIVE_INTERVAL step.
        self._exclusive_credit = self._max_exclusive_credit

    def plan(self, now: float) -> StepPlan | None:
        """Plan the next step. Returns None if there is nothing to compute."""
        running, step = self.running, self._begin(now)
        step.plan.copies = self._copies
        position = 0
        below = TIERS  # only requests of a tier better than this are still admitted
        freely = True  # False: only by preempting others
        head = self.waiting.first(now)
        if head is None and self._speculation is None:
            position = self._decodes(step)
            head = self.waiting.first(now)
        while position < len(running) or head is not None:
            waits = position == len(running) or (head is not None and head[0] < running[position].effective_tier)
            if waits and head is not None:
                tier, seq = head
            else:
                tier, seq = running[position].effective_tier, running[position]
            if tier > 0 and step.has_priority_prompt and step.may_exclude:
                self._exclusive_credit -= EXCLUSIVE_INTERVAL
                break
            if not waits:
                if self._advance(seq, step):
                    position += 1
                else:  # the sequence that was preempted waits now, and may be the first
                    head = self.waiting.first(now, below)
                continue
            if step.budget == 0:
                below = 0
            elif self._admit(seq, tier, step, freely):
                position += 1
            else:
                # No later request may take what this one waits for. But a request of a better tier, which this
                # one has reached by ageing alone, may still displace sequences that this one could not.
                below, freely = seq.request.tier, False
            head = self.waiting.first(now, below)
        else:
            self._exclusive_credit = min(self._exclusive_credit + 1, self._max_exclusive_credit)
        self.most_blocks = max(self.most_blocks, self._tables.used)
        if step.plan.rows:
            self._copies = []
            return step.plan
        if len(self.waiting) and running and running[-1].idle and not self.in_flight:
            # Beams that wait for others of their searches hold what these need. They have nothing to compute.
            self.preempt(running[-1], now, "kv_room")
            return self.plan(now)
        return None

    def _begin(self, now: float) -> Step:
        decoding = [seq for seq in self.running if len(seq.tokens) - seq.computed == 1]
        decodes = [0] * TIERS
        for seq in decoding:
            decodes[seq.effective_tier] += 1
        if self._speculation is not None:
            self._speculation.begin(decoding)
        step_tokens = self.max_num_batched_tokens
        return Step(
            now,
            step_tokens,
            decodes,
            decode_share=max(1, step_tokens // DECODE_SHARE),
            reserved=max(0, step_tokens - self._ordinary_tokens),
            may_exclude=self._exclusive_credit >= EXCLUSIVE_INTERVAL,
            rows=-(-len(self.running) // self._batches) if self._batches > 1 else self.max_num_seqs,
        )

    def _decodes(self, step: Step) -> int:
        """Plan the decodes before the first other sequence while nothing waits, as `_advance` would, but for their
        calls: most steps have nothing else. Returns the position of the first sequence that is not planned."""
        rows, put = step.plan.rows, 0
        room = min(step.unreserved, step.rows)
        for position, seq in enumerate(self.running):
            start = seq.computed
            end = start + 1
            if end != len(seq.tokens) or put >= room:
                break
            if end > seq.allocated:
                step.spend(put)
                room, put = room - put, 0
                if not self._advance(seq, step):
                    return position
                room -= 1
                continue
            step.decodes[seq.effective_tier] -= 1
            if end > seq.paid and seq.account is not None:
                seq.account.served += (end - seq.paid) / seq.request.weight
                seq.paid = end
            rows.append(ScheduledSeq(seq, start, 1, True))
            put += 1
        else:
            position = len(self.running)
        step.spend(put)
        return position

    def _advance(self, seq: Sequence, step: Step) -> bool:
        """Plan a running sequence. Returns False if blocks ran out and a sequence was preempted; then call it again.

        The last sequence in order is preempted. It may be this sequence, but never one that is already in the plan.
        """
        pending, tier = len(seq.tokens) - seq.computed, seq.effective_tier
        decodes = pending == 1
        step.decodes[tier] -= decodes
        if decodes and step.rows == 0:
            return True
        if decodes:
            count = 1 if (step.budget if step.has_priority_prompt else step.unreserved) > 0 else 0
        else:
            count = min(pending, step.budget_for(seq, tier))
        if count <= 0:
            return True
        if decodes and seq.computed < seq.allocated and self._speculation is None:  # nearly all
            step.put(seq, 1)
            step.rows -= 1
            return True
        # Decodes not yet visited may need a block, too.
        to_come = step.to_come
        count = self._tables.grow(seq, count, spare=to_come)
        if count == 0:
            step.decodes[tier] += decodes
            self._preempt_last(step, "kv_room")
            return False
        if decodes:
            step.put(seq, count, self._guesses(seq, step.unreserved - to_come - 1, to_come))
            step.rows -= 1
        else:
            step.put_prompt(seq, count)
        return True

    def _guesses(self, seq: Sequence, budget: int, spare: int) -> int:
        """The number of draft tokens for which a decoding sequence gets KV slots.

        It takes at most half of the remaining `budget`, because prompts may follow. It takes none of the blocks that
        the `spare` decodes not yet visited may need.
        """
        if self._speculation is None:
            return 0
        count = min(self._speculation.draft_limit(seq), budget // 2)
        return self._tables.reach(seq, count, spare) if count > 0 else 0

    def _admit(self, seq: Sequence, tier: int, step: Step, freely: bool) -> bool:
        """Admit a waiting sequence, if necessary by preempting running ones. Returns whether it was admitted."""
        if seq.serial in self.in_flight:  # preempted just now: its next token is not known yet
            return False
        group = self._groups[seq.request.id]
        claim = self._make_room(group, seq, tier, step, freely)
        if claim is None:
            return False
        self.waiting.remove(seq)
        seq.waited += step.now - seq.queued_at
        seq.preempted = False
        seq.effective_tier = tier
        seq.status = Status.RUNNING
        seq.slot = heapq.heappop(self._slots)
        self._charge(seq, claim.computed)
        insort(self.running, seq, key=running_key)
        # All copies of a plan are made at one time: what is yet to be copied is taken from where it comes from.
        sources = {(space, block): source for space, source, block in step.plan.copies}
        for space, source, block in self._tables.take(seq, claim):
            step.plan.copies.append((space, sources.get((space, source), source), block))
        if group.cached_tokens is None:
            group.cached_tokens = min(claim.computed, seq.prompt_len)
            self.cached_tokens += group.cached_tokens
        course = seq.request.course
        put_off_s = course.put_off_s
        course.admit(step.now, group.cached_tokens)
        self.put_off_s += course.put_off_s - put_off_s
        step.admitted.add(seq.serial)
        pending = len(seq.tokens) - seq.computed
        step.put_prompt(seq, self._tables.grow(seq, min(pending, step.budget_for(seq, tier)), spare=step.to_come))
        return True

    def _make_room(self, group: Group, seq: Sequence, tier: int, step: Step, freely: bool) -> Claim | None:
        """The claim of a waiting sequence once there is room for it, if necessary by preempting running ones.

        Only sequences whose effective tier is worse than the request's tier are preempted, and only if that makes
        enough room. None of them is in the plan yet.
        """
        claim = self._claim(group, seq, step)
        if freely and self._fits(seq, claim, tier, step):
            return claim
        if not self._fits_displacing(seq, claim, tier, step):
            return None
        while not freely or not self._fits(seq, claim, tier, step):
            if not self._displaceable(seq):
                return None
            self._preempt_last(step, "better_tier")
            freely = True
            claim = self._claim(group, seq, step)
        return claim

    def _charge(self, seq: Sequence, cached: int) -> None:
        """Charge an admitted sequence's tenant for its tokens without `cached` K/V, each token once."""
        shares, account, request = self.waiting.shares, seq.account, seq.request
        if account is None or account.tier != seq.effective_tier:
            if account is not None:
                shares.close(account)
            account = seq.account = shares.open(seq.effective_tier, request.tenant)
            seq.tag = account.served
        elif seq.paid == 0:
            seq.tag = account.served
        shares.admitted(account)
        account.served += max(0, len(seq.tokens) - max(seq.paid, cached)) / request.weight
        seq.paid = max(seq.paid, len(seq.tokens))

    def _claim(self, group: Group, seq: Sequence, step: Step) -> Claim:
        return self._tables.claim(seq, group.donor(seq.root, step.admitted))

    def _fits(self, seq: Sequence, claim: Claim, tier: int, step: Step) -> bool:
        """Whether there are a free slot, a token of the budget and enough blocks."""
        if not self._slots or step.budget_for(seq, tier) <= 0:
            return False
        return self._tables.fits(claim, headroom=self._leaves_headroom(tier))

    def _fits_displacing(self, seq: Sequence, claim: Claim, tier: int, step: Step) -> bool:
        """Whether it would fit if all sequences that it may displace were preempted."""
        victims = [other for other in self.running if other.effective_tier > seq.request.tier]
        if not victims or step.budget_for(seq, tier, displacing=True) <= 0:
            return False
        return self._tables.fits_without(claim, victims, headroom=self._leaves_headroom(tier))

    def _displaceable(self, seq: Sequence) -> bool:
        return bool(self.running) and self.running[-1].effective_tier > seq.request.tier

    def _leaves_headroom(self, tier: int) -> bool:
        """Whether an admission leaves headroom. If only worse tiers run, a sequence may take the whole pool."""
        return bool(self.running) and self.running[0].effective_tier <= tier

    def _preempt_last(self, step: Step, why: str) -> None:
        """Preempt the last sequence in order. It keeps its tokens and later computes again those whose K/V are no
        longer cached."""
        seq = self.running[-1]
        if len(seq.tokens) - seq.computed == 1:
            step.decodes[seq.effective_tier] -= 1
        self.preempt(seq, step.now, why)

    def preempt(self, seq: Sequence, now: float, why: str = "recompute") -> None:
        """Preempt a running sequence: it waits, and computes its tokens again. Between steps it may be any sequence.
        `why`: see `Course.preempted`."""
        if seq.idle:
            self.park(seq)
            self.preemptions += 1
            seq.request.course.preempt(now, why)
            return
        self.running.remove(seq)
        seq.computed_before = max(seq.computed_before, seq.computed)
        self._leave(seq)
        seq.status = Status.WAITING
        seq.preempted = True
        seq.queued_at = now
        self.waiting.push(seq)
        self.preemptions += 1
        seq.request.course.preempt(now, why)

    def shrink(self, now: float, *, tried: bool) -> bool:
        """React to a step for which the device had no memory. Halves max_num_batched_tokens, down to max_num_seqs, and
        preempts the last sequence unless it is the only one.

        Returns False, and changes nothing, if steps cannot be smaller and this was `tried` before or only one sequence
        runs.
        """
        self.out_of_memory += 1
        smaller = max(self.max_num_seqs, self.max_num_batched_tokens // 2)
        several = len(self.running) > 1
        if smaller == self.max_num_batched_tokens and (tried or not several):
            return False
        self.max_num_batched_tokens = smaller
        if several:
            self.preempt(self.running[-1], now, "memory")
        self.shrinks += 1
        return True

    def remove(self, seq: Sequence) -> None:
        """Remove a running or waiting sequence and free its slot and blocks."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._leave(seq)
        else:
            self.waiting.remove(seq)
        if seq.account is not None:
            self.waiting.shares.close(seq.account)
            seq.account = None

    # ---- beams

    def fork(self, beam: Sequence, parent: Sequence) -> bool:
        """Run a new beam that goes on from what a running one has computed. Returns False, and does nothing, if there
        is no slot or block for it: then `enqueue` it."""
        if not self._slots or not self._tables.forkable(parent):
            return False
        self._copies += self._tables.fork(beam, parent)
        beam.status = Status.RUNNING
        beam.slot = heapq.heappop(self._slots)
        beam.account = self.waiting.shares.open(parent.effective_tier, parent.request.tenant)
        insort(self.running, beam, key=running_key)
        beam.request.course.running += 1
        return True

    def enqueue(self, beam: Sequence, now: float) -> None:
        """Let a beam wait that is in no queue, as one that was preempted."""
        beam.status = Status.WAITING
        beam.preempted = True
        beam.queued_at = now
        beam.account = self.waiting.shares.open(beam.effective_tier, beam.request.tenant)
        self.waiting.push(beam)

    def park(self, beam: Sequence) -> None:
        """Take a beam that has nothing to compute out of its queue: its slot and blocks are for others."""
        self.remove(beam)
        beam.status = Status.WAITING

    def _leave(self, seq: Sequence) -> None:
        if seq.pending:  # update() appends the token itself once it is known
            seq.tokens.pop()
            seq.pending = False
        if self._copies and seq.beam is not None:  # nothing may be copied into its blocks any more
            self._copies[:] = [copy for copy in self._copies if copy[2] not in seq.tables[copy[0]].blocks]
        self._tables.free(seq)
        heapq.heappush(self._slots, seq.slot)
        seq.slot = -1
        seq.request.course.running -= 1

    @property
    def slots_used(self) -> int:
        return self.max_num_seqs - len(self._slots)

    def preempted(self, now: float) -> list[tuple[str, float]]:
        """(request id, seconds since) of preempted requests of which no choice runs."""
        since: dict[str, float] = {}
        for seq in self.waiting.preempted():
            since[seq.request.id] = max(seq.queued_at, since.get(seq.request.id, seq.queued_at))
        for seq in self.running:
            since.pop(seq.request.id, None)
        return [(request_id, now - queued_at) for request_id, queued_at in since.items()]

    def check_integrity(self) -> None:
        """Raise EngineError if blocks, slots and queues are inconsistent. Takes time proportional to the pool's
        size."""
        running = self.running
        self._tables.check_integrity(running)
        if running != sorted(running, key=running_key):
            raise EngineError("the running sequences are out of order")
        if sorted([*self._slots, *(seq.slot for seq in running)]) != list(range(self.max_num_seqs)):
            raise EngineError("the slots are not each free or held by one running sequence")
        for seq in running:
            in_flight = seq.serial in self.in_flight
            if seq.status is not Status.RUNNING or not 0 <= seq.computed < len(seq.tokens) + (in_flight or seq.idle):
                raise EngineError(f"request {seq.request.id!r} runs with {seq.computed} of {len(seq.tokens)} tokens")
            if seq.pending != (UNKNOWN in seq.tokens) or (seq.pending and not in_flight):
                raise EngineError(f"request {seq.request.id!r} runs with a token that is not known")
        holders = Counter(id(seq.account) for seq in [*running, *self.waiting])
        if any(
            seq.account is None or seq.account.open_requests != holders[id(seq.account)]
            for seq in [*running, *self.waiting]
        ):
            raise EngineError("the accounts of tenants do not count those who wait and run on them")
        for seq in self.waiting:
            if UNKNOWN in seq.tokens:
                raise EngineError(f"request {seq.request.id!r} waits with a token that is not known")
            if seq.status is not Status.WAITING or seq.tables or seq.computed or seq.slot != -1:
                raise EngineError(f"request {seq.request.id!r} waits, and yet is {seq.status.name} or holds blocks")


@dataclass(slots=True)
class Step:
    """The state of a step while it is planned."""

    now: float
    budget: int
    """The tokens left in the step."""
    decodes: list[int]
    """The number of running decodes not yet visited, by effective tier."""
    decode_share: int
    """The number of those decodes that keep their token however many prompts there are."""
    reserved: int
    """The number of tokens reserved for prompts of requests of the best tier."""
    rows: int
    """The decodes that may still be put into the step, which others in flight share."""
    may_exclude: bool
    """Whether a prompt of the best tier excludes all worse tiers from this step."""
    has_priority_prompt: bool = False
    """Whether the plan has a prompt of the best tier."""
    plan: StepPlan = field(default_factory=StepPlan)
    admitted: set[int] = field(default_factory=set)
    """The serials of the sequences admitted in this step. Their new blocks hold no K/V yet."""

    @property
    def to_come(self) -> int:
        """The number of decodes not yet visited, each of which may need a block."""
        return sum(self.decodes)

    def budget_for(self, seq: Sequence, tier: int, *, displacing: bool = False) -> int:
        """The tokens that a prompt in effective tier `tier` may take.

        Decodes of that tier and better ones keep their tokens. A few decodes of worse tiers keep theirs too, so that a
        stream of prompts cannot stall them. Decodes worse than the request's own tier keep none if the prompt is
        `displacing` them or excludes them from the step.
        """
        worst = seq.request.tier if displacing or self._excludes(seq) else TIERS - 1
        worse = sum(self.decodes[tier + 1 : worst + 1])
        budget = self.budget if is_priority(seq) else self.unreserved
        return budget - sum(self.decodes[: tier + 1]) - min(worse, self.decode_share)

    @property
    def unreserved(self) -> int:
        """The tokens left for all but prompts of the best tier. In a step with such a prompt, decodes may use more."""
        return self.budget - self.reserved

    def put(self, seq: Sequence, count: int, max_draft: int = 0) -> None:
        """Add `count` tokens of a sequence to the plan, and take `max_draft` more from the budget for draft tokens."""
        end = seq.computed + count
        if end > seq.paid and seq.account is not None:  # a token that was generated
            seq.account.served += (end - seq.paid) / seq.request.weight
            seq.paid = end
        self.budget -= count + max_draft
        self.plan.num_tokens += count
        samples = seq.computed + count == len(seq.tokens)
        self.plan.rows.append(ScheduledSeq(seq, seq.computed, count, samples, max_draft=max_draft))

    def spend(self, tokens: int) -> None:
        """Count tokens of decodes that are in the plan already."""
        self.budget -= tokens
        self.rows -= tokens
        self.plan.num_tokens += tokens

    def put_prompt(self, seq: Sequence, count: int) -> None:
        self.put(seq, count)
        self.plan.prompts += 1
        self.plan.prompt_tokens += count
        self.has_priority_prompt |= count > 0 and is_priority(seq)

    def _excludes(self, seq: Sequence) -> bool:
        return self.may_exclude and is_priority(seq)
