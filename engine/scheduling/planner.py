"""Which tokens of which sequences the next step computes; who is let into the batch and who is put out of it.

There are no prefill and decode phases: every sequence catches `computed` up to `len(tokens)`. Running and waiting
sequences are gone through once, in the order of policy.py, the running before the waiting of each effective tier.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.kv import BlockTables, Claim
from engine.plan import ScheduledSeq, StepPlan
from engine.scheduling.group import Group
from engine.scheduling.policy import APART, APART_AGAIN, TIERS, Hurry, WaitingQueue, hurries, running_key
from engine.sequence import UNKNOWN, Sequence, Status
from engine.speculate import Speculation

#: Of a step's tokens, the part that running decodes keep though prompts of better tiers could use it: one in so many.
SHARE = 8


@dataclass(slots=True)
class _Step:
    """A step while it is being planned."""

    now: float
    budget: int
    """Tokens left."""
    decodes: list[int]
    """Running decodes that have yet to be come to, by effective tier."""
    share: int
    """So many of them keep their token whatever prompts there are."""
    hurried: int
    """So many of the tokens are for prompts of requests of the best tier alone."""
    may_part: bool
    """Whether such a prompt leaves all worse tiers out of it."""
    rushed: bool = False
    """There is one in the plan."""
    plan: StepPlan = field(default_factory=StepPlan)
    entered: set[int] = field(default_factory=set)
    """Serials of the sequences admitted in it: their blocks hold nothing yet."""

    @property
    def to_come(self) -> int:
        """Decodes that have yet to be come to, each of which may want a block."""
        return sum(self.decodes)

    def left(self, seq: Sequence, tier: int, *, displacing: bool = False) -> int:
        """Tokens that a prompt may take which stands in that tier: all but those of the decodes of that tier and better
        ones, and of a few of the others, which else would stand still for as long as there are prompts before them.
        Where it is `displacing` those who are worse than its request's tier, or leaves them out, they want none."""
        worst = seq.request.tier if displacing or self._parts(seq) else TIERS - 1
        worse = sum(self.decodes[tier + 1 : worst + 1])
        budget = self.budget if hurries(seq) else self.unhurried
        return budget - sum(self.decodes[: tier + 1]) - min(worse, self.share)

    @property
    def unhurried(self) -> int:
        """Tokens left for whatever is not a prompt of the best tier; beside one, running decodes may have more."""
        return self.budget - self.hurried

    def put(self, seq: Sequence, count: int, room: int = 0) -> None:
        """`room`: for so many draft tokens, of which the budget is kept."""
        end = seq.computed + count
        if end > seq.paid and seq.account is not None:  # a token that was generated
            seq.account.served += (end - seq.paid) / seq.request.weight
            seq.paid = end
        self.budget -= count + room
        self.plan.num_tokens += count
        samples = seq.computed + count == len(seq.tokens)
        self.plan.rows.append(ScheduledSeq(seq, seq.computed, count, samples, room=room))

    def put_prompt(self, seq: Sequence, count: int) -> None:
        self.put(seq, count)
        self.rushed |= count > 0 and hurries(seq)

    def _parts(self, seq: Sequence) -> bool:
        return self.may_part and hurries(seq)


class Planner:
    """Holds the sequences that wait and those that run, their rows and their blocks."""

    def __init__(
        self,
        tables: BlockTables,
        groups: Mapping[str, Group],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        ageing_s: float,
        speculation: Speculation | None,
        hurry: Hurry,
    ) -> None:
        """`groups` are the unfinished requests by id, which the scheduler keeps. Raises EngineError where a step could
        not hold one token of each sequence."""
        unhurried = max_num_batched_tokens if hurry.unhurried_tokens is None else hurry.unhurried_tokens
        for name, tokens in (("max_num_batched_tokens", max_num_batched_tokens), ("unhurried_tokens", unhurried)):
            if tokens < max_num_seqs:
                less = f"{name}={tokens} is less than max_num_seqs={max_num_seqs}"
                raise EngineError(f"{less}: a step must hold one token of every sequence")
        self._speculation = speculation
        self._tables = tables
        self._groups = groups
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = WaitingQueue(ageing_s)
        self.running: list[Sequence] = []  # sorted by running_key
        self._slots = list(range(max_num_seqs))  # a heap: low rows are used first, which keeps batches compact
        self.preemptions = 0
        self.cached_tokens = 0
        self.out_of_memory = self.shrinks = 0
        self.most_blocks = 0
        #: Serials of the sequences of a step whose results are awaited while the next is planned.
        self.in_flight: Set[int] = frozenset()
        self._unhurried = unhurried
        self._most_patience = APART * APART_AGAIN if hurry.apart else 0
        # For how many steps worse tiers may still be left out; in parts of which APART_AGAIN make one.
        self._patience = self._most_patience

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute."""
        running = self.running
        decoding = [seq for seq in running if len(seq.tokens) - seq.computed == 1]
        decodes = [0] * TIERS
        for seq in decoding:
            decodes[seq.effective_tier] += 1
        if self._speculation is not None:
            self._speculation.begin(decoding)
        step = _Step(
            now,
            self.max_num_batched_tokens,
            decodes,
            share=max(1, self.max_num_batched_tokens // SHARE),
            hurried=max(0, self.max_num_batched_tokens - self._unhurried),
            may_part=self._patience >= APART_AGAIN,
        )
        place = 0
        below = TIERS  # only requests of a tier better than this are still admitted
        freely = True  # False: only in the place of others
        head = self.waiting.first(now)
        while place < len(running) or head is not None:
            waits = place == len(running) or (head is not None and head[0] < running[place].effective_tier)
            if waits and head is not None:
                tier, seq = head
            else:
                tier, seq = running[place].effective_tier, running[place]
            if tier > 0 and step.rushed and step.may_part:
                self._patience -= APART_AGAIN
                break
            if not waits:
                place += self._advance(seq, step)
                continue
            if step.budget == 0:
                below = 0
            elif self._admit(seq, tier, step, freely):
                place += 1
            else:
                # Whoever comes later may not take what this one waits for; but a request of a better tier,
                # which this one has reached by ageing alone, may still displace those whom it could not.
                below, freely = seq.request.tier, False
            head = self.waiting.first(now, below)
        else:
            self._patience = min(self._patience + 1, self._most_patience)
        self.most_blocks = max(self.most_blocks, self._tables.used)
        return step.plan if step.plan.rows else None

    def _advance(self, seq: Sequence, step: _Step) -> bool:
        """Plan a running sequence; False if one was put out for want of blocks, after which it is to be tried again.

        The last in order goes, which may be the sequence itself, but never one that is already in the plan.
        """
        pending, tier = len(seq.tokens) - seq.computed, seq.effective_tier
        decodes = pending == 1
        step.decodes[tier] -= decodes
        if decodes:
            count = 1 if (step.budget if step.rushed else step.unhurried) > 0 else 0
        else:
            count = min(pending, step.left(seq, tier))
        if count > 0:
            # A decode that is still to come may want a block, too.
            to_come = step.to_come
            count = self._tables.grow(seq, count, spare=to_come)
            if count == 0:
                step.decodes[tier] += decodes
                self._preempt_last(step)
                return False
            if decodes:
                step.put(seq, count, self._guesses(seq, step.unhurried - to_come - 1, to_come))
            else:
                step.put_prompt(seq, count)
        return True

    def _guesses(self, seq: Sequence, left: int, spare: int) -> int:
        """For how many draft tokens a sequence that decodes gets places: of the budget that is `left` it takes half,
        for there may be prompts, and of the blocks none that the `spare` decodes to come may want."""
        if self._speculation is None:
            return 0
        wanted = min(self._speculation.wanted(seq), left // 2)
        return self._tables.reach(seq, wanted, spare) if wanted > 0 else 0

    def _admit(self, seq: Sequence, tier: int, step: _Step, freely: bool) -> bool:
        """Let a waiting sequence in, if need be in the place of running ones, of which none is in the plan yet:
        only those whose effective tier is worse than its request's tier, and only if that makes room enough.
        """
        if seq.serial in self.in_flight:  # put out just now: what it goes on with is not known yet
            return False
        group = self._groups[seq.request.id]
        claim = self._claim(group, seq, step)
        if not (freely and self._fits(seq, claim, tier, step)):
            if not self._fits_displacing(seq, claim, tier, step):
                return False
            while not freely or not self._fits(seq, claim, tier, step):
                if not self._displaceable(seq):
                    return False
                self._preempt_last(step)
                freely = True
                claim = self._claim(group, seq, step)
        self.waiting.remove(seq)
        seq.waited += step.now - seq.queued_at
        seq.preempted = False
        seq.effective_tier = tier
        seq.status = Status.RUNNING
        seq.slot = heapq.heappop(self._slots)
        self._charge(seq, claim.computed)
        insort(self.running, seq, key=running_key)
        step.plan.copies += self._tables.take(seq, claim)
        if group.cached_tokens is None:
            group.cached_tokens = min(claim.computed, seq.prompt_len)
            self.cached_tokens += group.cached_tokens
        step.entered.add(seq.serial)
        pending = len(seq.tokens) - seq.computed
        step.put_prompt(seq, self._tables.grow(seq, min(pending, step.left(seq, tier)), spare=step.to_come))
        return True

    def _charge(self, seq: Sequence, cached: int) -> None:
        """It has been admitted, with so many tokens of which the K/V are there: the rest is paid for once."""
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

    def _claim(self, group: Group, seq: Sequence, step: _Step) -> Claim:
        return self._tables.claim(seq, group.donor(seq.root, step.entered))

    def _fits(self, seq: Sequence, claim: Claim, tier: int, step: _Step) -> bool:
        """Whether there is a row, a token of the budget, and blocks enough."""
        if not self._slots or step.left(seq, tier) <= 0:
            return False
        return self._tables.fits(claim, headroom=self._leaves_headroom(tier))

    def _fits_displacing(self, seq: Sequence, claim: Claim, tier: int, step: _Step) -> bool:
        """Whether there would be, with all those put out whom the sequence may displace."""
        victims = [other for other in self.running if other.effective_tier > seq.request.tier]
        if not victims or step.left(seq, tier, displacing=True) <= 0:
            return False
        return self._tables.fits_without(claim, victims, headroom=self._leaves_headroom(tier))

    def _displaceable(self, seq: Sequence) -> bool:
        return bool(self.running) and self.running[-1].effective_tier > seq.request.tier

    def _leaves_headroom(self, tier: int) -> bool:
        """Not where only worse tiers run: alone, a sequence may have the whole pool."""
        return bool(self.running) and self.running[0].effective_tier <= tier

    def _preempt_last(self, step: _Step) -> None:
        """Put the last in order out of the batch. It keeps its tokens and computes them again, where the cache has
        not kept them."""
        seq = self.running[-1]
        if len(seq.tokens) - seq.computed == 1:
            step.decodes[seq.effective_tier] -= 1
        self.preempt(seq, step.now)

    def preempt(self, seq: Sequence, now: float) -> None:
        """Put a running sequence, between steps any of them, out of the batch, to compute all of its tokens again."""
        self.running.remove(seq)
        self._leave(seq)
        seq.status = Status.WAITING
        seq.preempted = True
        seq.queued_at = now
        self.waiting.push(seq)
        self.preemptions += 1

    def shrink(self, now: float, *, tried: bool) -> bool:
        """The device had no memory for a step: make those to come half as large, down to one token for each sequence
        there may be, and put the last sequence out of the batch unless it is the only one.

        False, and nothing done, where they are as small already and that was `tried`, or where nothing can be done.
        """
        self.out_of_memory += 1
        smaller = max(self.max_num_seqs, self.max_num_batched_tokens // 2)
        several = len(self.running) > 1
        if smaller == self.max_num_batched_tokens and (tried or not several):
            return False
        self.max_num_batched_tokens = smaller
        if several:
            self.preempt(self.running[-1], now)
        self.shrinks += 1
        return True

    def remove(self, seq: Sequence) -> None:
        """Take a running or waiting sequence out and free what it holds."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._leave(seq)
        else:
            self.waiting.remove(seq)
        if seq.account is not None:
            self.waiting.shares.close(seq.account)
            seq.account = None

    def _leave(self, seq: Sequence) -> None:
        if seq.pending:  # the token itself is appended when it is known, wherever the sequence is then
            seq.tokens.pop()
            seq.pending = False
        self._tables.free(seq)
        heapq.heappush(self._slots, seq.slot)
        seq.slot = -1

    @property
    def slots_used(self) -> int:
        return self.max_num_seqs - len(self._slots)

    def preempted(self, now: float) -> list[tuple[str, float]]:
        """(request id, seconds) of requests that were put out of the batch and have no choice running."""
        since: dict[str, float] = {}
        for seq in self.waiting.preempted():
            since[seq.request.id] = max(seq.queued_at, since.get(seq.request.id, seq.queued_at))
        for seq in self.running:
            since.pop(seq.request.id, None)
        return [(request_id, now - queued_at) for request_id, queued_at in since.items()]

    def check_integrity(self) -> None:
        """Raise EngineError if blocks, slots and queues do not agree. Takes time with the size of the pool."""
        running = self.running
        self._tables.check_integrity(running)
        if running != sorted(running, key=running_key):
            raise EngineError("the running sequences are out of order")
        if sorted([*self._slots, *(seq.slot for seq in running)]) != list(range(self.max_num_seqs)):
            raise EngineError("the slots are not each free or held by one running sequence")
        for seq in running:
            in_flight = seq.serial in self.in_flight
            if seq.status is not Status.RUNNING or not 0 <= seq.computed < len(seq.tokens) + in_flight:
                raise EngineError(f"request {seq.request.id!r} runs with {seq.computed} of {len(seq.tokens)} tokens")
            if seq.pending != (UNKNOWN in seq.tokens) or (seq.pending and not in_flight):
                raise EngineError(f"request {seq.request.id!r} runs with a token that is not known")
        holders = Counter(id(seq.account) for seq in [*running, *self.waiting])
        if any(
            seq.account is None or seq.account.held != holders[id(seq.account)] for seq in [*running, *self.waiting]
        ):
            raise EngineError("the accounts of tenants do not count those who wait and run on them")
        for seq in self.waiting:
            if UNKNOWN in seq.tokens:
                raise EngineError(f"request {seq.request.id!r} waits with a token that is not known")
            if seq.status is not Status.WAITING or seq.tables or seq.computed or seq.slot != -1:
                raise EngineError(f"request {seq.request.id!r} waits, and yet is {seq.status.name} or holds blocks")
