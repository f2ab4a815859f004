"""Random histories of requests, aborts, faults and steps against a model whose tokens show what is in the KV cache.

Each with tokens guessed ahead or not: drafts that are always right, never, or half of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.kv import KvSpace, window_blocks
from engine.params import SamplingParams
from engine.plan import Sampled, StepPlan
from engine.request import Event, Request
from engine.sequence import Sequence
from engine.speculate import Speculation
from tests.engine.guessing import Guesser
from tests.engine.paged_model import EOS, MAX_MODEL_LEN, VOCAB, PagedModel, choose, computed_plainly, expected
from tests.engine.stepping import made
from tests.exhaustive import few
from tests.histories import examples, histories


@dataclass
class Seen:
    request: Request
    tokens: list[list[int]]
    reasons: list[str | None]
    done: bool = False
    faulty: bool = False


class Histories(RuleBasedStateMachine):
    caching = True
    hurry: ClassVar[dict[str, object]] = {}
    spaces: ClassVar = [KvSpace(12)]
    block_size = 4
    switch = MAX_MODEL_LEN

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.serial = 0
        self.seen: dict[str, Seen] = {}

    @initialize(agreement=st.sampled_from([None, 0.0, 0.5, 1.0]))
    def begin(self, agreement):
        self.build(agreement)

    def build(self, agreement: float | None) -> None:
        """`agreement`: how often guessed tokens are right; None guesses none."""
        self.speculation = None
        if agreement is not None:
            self.speculation = Speculation(
                Guesser(self.right, agreement, VOCAB),
                max_tokens=3,
                adaptive=False,
                rope_switch=self.switch,
                barred=self.needs_token,
            )
        self.scheduler = made(
            spaces=self.spaces,
            block_size=self.block_size,
            max_num_seqs=4,
            max_num_batched_tokens=9,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[EOS],
            ageing_s=10.0,
            enable_prefix_caching=self.caching,
            vocab_size=VOCAB,
            rope_switch=self.switch,
            speculation=self.speculation,
            **self.hurry,
        )
        self.model = self.make_model()

    def right(self, seq: Sequence, tokens: list[int]) -> int:
        windows = tuple(space.window for space in self.spaces)
        made = len(tokens) - seq.prompt_len
        banned = tuple(sorted(seq.output.ends)) if made < seq.request.params.min_tokens else ()
        last = computed_plainly(tokens, windows, len(seq.tokens) > self.switch)[-1]
        return choose(last, seq.seed, seq.choice, banned)

    def needs_token(self, seq: Sequence) -> bool:
        return False

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now)
        if plan is not None and self.speculation is not None:
            self.speculation.propose(plan)
        return plan

    def make_model(self) -> PagedModel:
        return PagedModel(self.spaces, self.block_size, self.switch, copies_at_once=self.caching)

    def live(self) -> list[str]:
        return [name for name, seen in self.seen.items() if not seen.done]

    # Prompts are made of few chunks as long as a block, so that they often share blocks, and often must not.
    @rule(
        chunks=st.lists(st.sampled_from([(1, 2, 3, 4), (1, 2, 3, 5), (4, 4, 4, 4)]), max_size=5),
        tail=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=4),
        tier=st.integers(0, 3),
        salt=st.sampled_from(["", "", "tenant"]),
        tenant=st.sampled_from(["", "a", "b"]),
        weight=st.sampled_from([1.0, 1.0, 0.5, 3.0]),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.sampled_from([None, 1, 2, 5, 12]),
        min_tokens=st.integers(0, 6),
        seed=st.integers(0, 3),
        stops=st.sampled_from([(), (3,)]),
    )
    def add(self, chunks, tail, tier, salt, tenant, weight, n, max_tokens, min_tokens, seed, stops):
        prompt = [token for chunk in chunks for token in chunk] + tail
        if max_tokens is not None:
            min_tokens = min(min_tokens, max_tokens)
        params = SamplingParams(n=n, max_tokens=max_tokens, min_tokens=min_tokens, seed=seed, stop_token_ids=stops)
        self.serial += 1
        request = Request(
            f"r{self.serial}", prompt, params, tier, salt=salt, tenant=tenant, weight=weight, arrival=self.now
        )
        self.seen[request.id] = Seen(request, [[] for _ in range(n)], [None] * n)
        assert self.scheduler.add(request) == []

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(self.live()))
        assert self.scheduler.abort(name)
        assert not self.scheduler.abort(name)
        del self.seen[name]

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def crash_and_resume(self, data):
        """The worker dies and another goes on from the tokens that were published."""
        name = data.draw(st.sampled_from(self.live()))
        seen = self.seen[name]
        self.scheduler.abort(name)
        old = seen.request
        seen.request = Request(
            name,
            old.prompt_ids,
            old.params,
            tier=old.tier,
            salt=old.salt,
            tenant=old.tenant,
            weight=old.weight,
            resume=[list(t) for t in seen.tokens],
            arrival=self.now,
        )
        finished_before = [reason for reason in seen.reasons if reason not in (None, "error")]
        seen.reasons = [None] * len(seen.reasons)
        seen.faulty = False
        events = self.scheduler.add(seen.request)
        assert all(event.token_ids == [] and event.finish_reason for event in events)
        self.take(events)
        assert [reason for reason in seen.reasons if reason] == finished_before

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def fail_request(self, data):
        name = data.draw(st.sampled_from(self.live()))
        self.seen[name].faulty = True
        events = self.scheduler.fail(name, "broken")
        assert events
        assert all(event.error == "broken" for event in events)
        self.take(events)
        assert self.seen[name].done

    @rule(seconds=st.sampled_from([0.0, 0.5, 11.0, 45.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(steps=st.integers(1, 6))
    def steps(self, steps):
        for _ in range(steps):
            self.step()

    @rule(data=st.data(), how=st.sampled_from(["logits", "forward", "abort"]))
    def troubled_step(self, data, how):
        """A row fails by its logits, or in the forward pass, or its request is aborted while the step runs."""
        plan = self.schedule()
        if plan is None:
            return
        row = data.draw(st.sampled_from(plan.rows))
        name = row.seq.request.id
        if how == "logits" and row.samples:
            sampled = self.model.execute(plan)
            sampling = [other for other in plan.rows if other.samples]
            sampled[sampling.index(row)] = Sampled(-1, error="not finite")
            self.seen[name].faulty = True
            self.take(self.scheduler.update(plan, sampled, self.now))
        elif how == "abort":
            sampled = self.model.execute(plan)
            self.scheduler.abort(name)
            del self.seen[name]
            self.take(self.scheduler.update(plan, sampled, self.now))
        else:
            sampled = self.model.execute(plan)
            self.model.ruin(row, plan)
            self.seen[name].faulty = True
            self.take(self.scheduler.fail(row.seq, "forward failed"))
            self.take(self.scheduler.update(plan, sampled, self.now))

    def step(self) -> bool:
        plan = self.schedule()
        assert (plan is not None) == self.scheduler.has_work, "there is work and no plan, or no work and a plan"
        if plan is None:
            return False
        self.check_plan(plan)
        self.take(self.scheduler.update(plan, self.model.execute(plan), self.now))
        return True

    def check_plan(self, plan: StepPlan) -> None:
        assert 0 < plan.num_tokens <= 9
        assert len({row.seq.slot for row in plan.rows}) == len(plan.rows) <= 4
        destinations = [(group, destination) for group, _, destination in plan.copies]
        assert len(destinations) == len(set(destinations))

    def take(self, events: list[Event]) -> None:
        for event in events:
            seen = self.seen[event.request_id]
            assert not seen.done, "an event follows the last"
            assert seen.reasons[event.choice] is None, "an event follows the choice's last"
            tokens = seen.tokens[event.choice]
            assert event.index == len(tokens)
            assert len(event.texts) == len(event.token_ids)
            tokens += event.token_ids
            assert event.prompt_tokens == len(seen.request.prompt_ids)
            # The last token of the prompt is computed, unless there are published ones behind it.
            assert 0 <= event.cached_tokens < event.prompt_tokens + bool(seen.request.resume)
            right, reason = expected(seen.request, event.choice, self.model.windows, self.switch)
            assert tokens == right[: len(tokens)]
            seen.reasons[event.choice] = event.finish_reason
            if event.finish_reason == "error":
                assert seen.faulty
            elif event.finish_reason is not None:
                assert (tokens, event.finish_reason) == (right, reason)
            assert event.done == all(seen.reasons)
            seen.done = event.done

    @invariant()
    def whole(self):
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats.running <= 4
        assert stats.kv_blocks_used <= sum(space.num_blocks for space in self.spaces)
        self.check_windows()
        assert {name for name, _ in self.scheduler.preempted(self.now)} <= set(self.live())

    def check_windows(self) -> None:
        """Behind a window no sequence holds more than its last step saw."""
        for seq in self.scheduler._planner.running:
            for table, window in zip(seq.tables, self.model.windows, strict=True):
                if window is not None:
                    assert len(table.blocks) <= window_blocks(window, self.block_size) + 1 + -(-9 // self.block_size)

    def teardown(self):
        steps = 0
        while self.step() and (steps := steps + 1) < 3000:
            self.whole()
        assert not self.live(), "requests were left over"
        self.scheduler.check_idle()
        assert not len(self.scheduler._planner.waiting.shares), "something is kept of tenants who are gone"
        assert self.scheduler.stats().kv_blocks_used == 0


WORLDS: dict[str, dict[str, Any]] = {
    "plain": {},
    # Runs of neighbouring blocks, of which the last is shorter than the others.
    "runs": {"spaces": [KvSpace(14, run=3), KvSpace(window_blocks(7, 4) + 1, 7, run=2)]},
    "uncached": {"caching": False},
    # As many blocks as one longest sequence needs: nearly every step preempts.
    "tight": {"spaces": [KvSpace(10)]},
    "blocks of one": {"spaces": [KvSpace(41)], "block_size": 1},
    # Beside full attention, in as many blocks as a sequence takes to begin and one more.
    "window": {"spaces": [KvSpace(14), KvSpace(window_blocks(7, 4) + 1, 7)]},
    "window, uncached": {"spaces": [KvSpace(14), KvSpace(window_blocks(7, 4) + 1, 7)], "caching": False},
    # Two of them: sequences are longer than what either group holds.
    "windows alone": {"spaces": [KvSpace(6, 9), KvSpace(9, 3)]},
    "a window alone": {"spaces": [KvSpace(8, 3)], "block_size": 1},
    # For the priority tier alone there are steps, and more than half of the tokens of others.
    "hurry": {"hurry": {"max_non_priority_step_tokens": 4, "exclusive": True}},
    "hurry, tight": {"hurry": {"max_non_priority_step_tokens": 5, "exclusive": True}, "spaces": [KvSpace(10)]},
    # Some prompts are longer than the length at which keys change, some sequences grow past it.
    "switch": {"spaces": [KvSpace(14), KvSpace(8, 6)], "switch": 9},
}


def run_in(world: str, machine: type[Histories], count: int) -> None:
    """Run random histories of a machine with the settings of one of WORLDS."""
    run_state_machine_as_test(type(machine.__name__, (machine,), WORLDS[world]), settings=histories(count, 30))


@pytest.mark.parametrize("world", few(WORLDS, "runs", "tight", "windows alone", "hurry", "switch"))
def test_every_history_gives_the_tokens_of_an_undisturbed_run(world):
    run_in(world, Histories, examples(20, 60))
