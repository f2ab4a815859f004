"""Who gets a draft and how long it may be; what becomes of a proposer that fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine.plan import ScheduledSeq, StepPlan
from engine.sequence import Sequence, Status
from engine.speculate import Speculation
from tests.engine.guessing import Guesser
from tests.engine.sampling.sequences import sequence


def speculation(agreement: float = 1.0, **settings: Any) -> Speculation:
    """Guessing takes no time."""
    defaults = {"max_tokens": 4, "clock": lambda: 0.0}
    return Speculation(Guesser(lambda seq, tokens: 5, agreement, 9, whole=True), **(defaults | settings))


def running(slot: int = 0, length: int = 3) -> Sequence:
    one = sequence(slot, length=length)
    one.status = Status.RUNNING
    return one


def step(guessing: Speculation, seqs: list[Sequence], seconds: float, accepted: float = 1.0) -> list[int]:
    """One in which all decode, and of each draft that part is accepted. Returns the drafts' lengths."""
    guessing.begin(seqs)
    plan = StepPlan(num_tokens=len(seqs))
    plan.rows += [ScheduledSeq(seq, len(seq.tokens) - 1, 1, True, max_draft=guessing.draft_limit(seq)) for seq in seqs]
    guessing.propose(plan)
    assert plan.num_tokens == sum(row.count for row in plan.rows)
    for row in plan.rows:
        if row.max_draft:
            guessing.entered(row, int(accepted * len(row.draft)))
    guessing.record(plan, seconds * (1 + 0.01 * plan.num_tokens), 0.0)
    return [len(row.draft) for row in plan.rows]


def test_no_draft_goes_past_where_the_sequence_ends_for_certain() -> None:
    guessing = speculation(adaptive=False)
    one = running()
    one.output.limit, one.output.count = 10, 7
    assert guessing.draft_limit(one) == 2
    # In flight, with one token more to come before a draft.
    assert guessing.waits(one)
    one.output.count = 8
    assert (guessing.draft_limit(one), guessing.waits(one)) == (1, False)
    one.output.count = 9
    assert guessing.draft_limit(one) == 0


def test_no_draft_goes_across_the_rope_switch() -> None:
    guessing = speculation(adaptive=False, rope_switch=10)
    assert [guessing.draft_limit(running(length=length)) for length in (5, 7, 9, 10, 11, 12)] == [4, 3, 1, 0, 4, 4]
    assert [guessing.waits(running(length=length)) for length in (8, 9, 10, 11)] == [True, False, False, True]


def test_who_is_barred_or_ends_in_a_token_that_is_not_known_gets_none() -> None:
    one = running()
    assert speculation(adaptive=False, barred=lambda seq: seq is one).draft_limit(one) == 0
    assert not speculation(adaptive=False, barred=lambda seq: seq is one).waits(one)
    one.pending = True
    assert speculation(adaptive=False).draft_limit(one) == 0


def test_who_was_not_guessed_lately_is_planned_ahead_for_ever_longer() -> None:
    guessing = speculation(adaptive=False)
    one = running()
    row = ScheduledSeq(one, 2, 1, True, max_draft=4)
    waited = []
    for _ in range(4):
        guessing.entered(row, 0)  # there was no draft
        ahead = 0
        while not guessing.waits(one):
            ahead += 1
        waited.append(ahead)
    assert waited == [2, 4, 8, 16]
    row.draft = (1,)
    guessing.entered(row, 0)
    assert guessing.waits(one)


def test_what_is_counted() -> None:
    guessing = speculation()
    row = ScheduledSeq(running(), 2, 5, True, max_draft=4, draft=(1, 2, 3, 4))
    guessing.entered(row, 3)
    guessing.entered(row, 0)
    assert (guessing.drafted, guessing.accepted) == (8, 3)


def test_drafts_come_when_steps_are_measured_and_go_when_they_are_wrong() -> None:
    guessing = speculation()
    one = running()
    first = [step(guessing, [one], 1.0)[0] for _ in range(40)]
    assert first[:2] == [0, 0]
    assert first[-1] == 4
    later = [step(guessing, [one], 1.0, accepted=0.0)[0] for _ in range(600)]
    # Now and then it is tried again, briefly: each token costs a hundredth of a step.
    assert 0 < sum(later[-300:]) <= 300
    assert max(later[-300:]) == 1
    again = [step(guessing, [one], 1.0)[0] for _ in range(600)]
    assert again[-1] == 4


def test_of_many_that_are_guessed_badly_one_is_tried_at_a_time_and_who_was_not_for_longest_comes_first() -> None:
    guessing = speculation()
    many = [running(slot) for slot in range(16)]
    tried: list[int] = []
    for turn in range(600):
        found = [slot for slot, length in enumerate(step(guessing, many, 1.0, accepted=0.0)) if length]
        if turn >= 500:
            assert len(found) <= 1
            tried += found
    assert len(tried) >= 16
    assert all(len(set(tried[at : at + 16])) == 16 for at in range(len(tried) - 15))


class Broken:
    def __init__(self) -> None:
        self.asked = self.forgot = 0
        self.fails = True

    def propose(self, rows: list[ScheduledSeq]) -> list[tuple[int, ...]]:
        self.asked += 1
        if self.fails:
            raise ZeroDivisionError
        return [(1,) for _ in rows]

    def forget(self) -> None:
        self.forgot += 1


def test_a_proposer_that_fails_costs_the_drafts_alone_and_after_a_while_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Broken()
    guessing = Speculation(broken, max_tokens=4, adaptive=False)
    one = running()
    with caplog.at_level(logging.ERROR, "penstock.engine"):
        for fails in (True, True, False, True, True, True):
            broken.fails = fails
            assert step(guessing, [one], 1.0) == [not fails]
    assert broken.forgot == 5
    assert guessing.draft_limit(one) == 0
    assert not guessing.waits(one)
    assert step(guessing, [one], 1.0) == [0]
    assert broken.asked == 6
    assert "they are not guessed any more" in caplog.records[-1].message
