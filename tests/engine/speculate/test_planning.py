"""Drafts in plans: room that nobody else wants, and what becomes of blocks that they fill."""

from __future__ import annotations

import pytest

from engine.plan import Sampled, StepPlan, accepted
from engine.scheduling.scheduler import Scheduler
from engine.speculate import Speculation
from tests.engine.guessing import Guesser
from tests.engine.stepping import EOS, request, rows, scheduler


def guessing(most: int = 4, **settings: object) -> tuple[Scheduler, Speculation]:
    """Guesses 1 all the time."""
    speculation = Speculation(Guesser(lambda seq, tokens: 1, 1.0, 99, whole=True), max_tokens=most, adaptive=False)
    return scheduler(speculation=speculation, **settings), speculation


def step(s: Scheduler, speculation: Speculation, *chosen: list[int]) -> StepPlan:
    """One in which `chosen` is what the target chooses after each token of each sampling row; the last goes on."""
    plan = s.schedule(0.0)
    assert plan is not None
    speculation.propose(plan)
    results = []
    for row, tokens in zip([row for row in plan.rows if row.samples], chosen, strict=True):
        every = [*tokens, *tokens[-1:] * len(row.draft)][: 1 + len(row.draft)]
        results.append(accepted(row.draft, [Sampled(token) for token in every]))
    s.update(plan, results, 0.0)
    s.check_integrity()
    return plan


def test_a_decoding_sequence_has_a_draft_beside_a_prompt_without_one() -> None:
    s, speculation = guessing()
    s.add(request("a"))
    step(s, speculation, [1])
    s.add(request("b", 7))
    plan = step(s, speculation, [1, 1, 2], [1])
    assert rows(plan) == {"a": (4, 5), "b": (0, 7)}
    assert plan.num_tokens == 12
    assert s._groups["a"].seqs[0].tokens[4:] == [1, 1, 1, 2]
    # Two of the draft were right: their K/V stay, and the last token is to be computed.
    assert rows(step(s, speculation, [2], [2]))["a"] == (7, 5)


def test_a_draft_takes_half_of_what_is_left_of_a_step() -> None:
    s, speculation = guessing(max_num_batched_tokens=8, max_num_seqs=2)
    s.add(request("a"))
    step(s, speculation, [1])
    s.add(request("b", 20))
    assert rows(step(s, speculation, [2])) == {"a": (4, 4), "b": (0, 4)}


def test_a_draft_takes_no_block_that_a_decode_to_come_may_want() -> None:
    s, speculation = guessing(num_blocks=4)
    for name in ("a", "b"):
        s.add(request(name))
    step(s, speculation, [1], [1])
    # Four of four blocks are held: the fifth tokens begin each one's second.
    plan = step(s, speculation, [2], [2])
    assert [row.max_draft for row in plan.rows] == [3, 3]
    assert s.stats().preemptions == 0


def test_a_draft_preempts_no_sequence() -> None:
    s, speculation = guessing(num_blocks=3)
    s.add(request("a"))
    s.add(request("b", 3))
    step(s, speculation, [1], [1])
    # One block is free: the first to be planned begins it with its fifth token, and the other stays in its first.
    plan = step(s, speculation, [2], [2])
    assert [row.max_draft for row in plan.rows] == [3, 0]
    assert s.stats().preemptions == 0


def test_blocks_are_found_by_others_when_their_drafts_were_accepted_and_not_before() -> None:
    for chosen, cached in (([1] * 5, 8), ([1, 1, 2], 8), ([1, 2], 4)):
        s, speculation = guessing()
        s.add(request("a", [7, 7, 7, 7, 7]))
        step(s, speculation, [1])
        step(s, speculation, chosen)
        s.add(request("b", [7, 7, 7, 7, 7, 1, 1, 1, 5]))
        plan = s.schedule(0.0)
        assert plan is not None
        assert rows(plan)["b"][0] == cached


def test_what_comes_after_an_end_is_dropped() -> None:
    s, speculation = guessing()
    s.add(request("a", max_tokens=20))
    step(s, speculation, [1])
    speculation._proposer = Guesser(lambda seq, tokens: EOS, 1.0, 99, whole=True)
    plan = s.schedule(0.0)
    assert plan is not None
    speculation.propose(plan)
    found = accepted(plan.rows[0].draft, [Sampled(EOS) for _ in range(5)])
    assert len(found.then) == 4
    (event,) = s.update(plan, [found], 0.0)
    assert (event.token_ids, event.index, event.finish_reason, event.stop_match) == ([EOS], 1, "stop", EOS)
    assert s.stats().generated_tokens == 2
    s.check_idle()


@pytest.mark.parametrize("right", [0, 1])
def test_logits_that_are_not_finite_are_computed_again_without_a_draft_and_end_the_sequence_then(right: int) -> None:
    s, speculation = guessing()
    s.add(request("a"))
    step(s, speculation, [1])
    plan = s.schedule(0.0)
    assert plan is not None
    speculation.propose(plan)
    assert len(plan.rows[0].draft) == 4
    chosen = [*[Sampled(1)] * right, Sampled(-1, error="not finite"), *[Sampled(1)] * (4 - right)]
    told = s.update(plan, [accepted(plan.rows[0].draft, chosen)], 0.0)
    assert [(one.token_ids, one.finish_reason) for one in told] == [([1], None)] * right
    assert (s.stats().not_finite, s.stats().running, s.stats().waiting) == (0, 0, 1)
    plan = s.schedule(0.0)
    assert plan is not None
    (row,) = plan.rows
    # What that step wrote is not to be trusted, nor found by others; the block of the prompt before it is.
    assert (row.start, row.max_draft, row.samples) == (4, 0, True)
    (failed,) = s.update(plan, [Sampled(-1, error="not finite")], 0.0)
    assert (failed.token_ids, failed.finish_reason, failed.error, failed.done) == ([], "error", "not finite", True)
    assert s.stats().not_finite == 1


def test_logits_that_are_not_finite_after_a_wrong_guess_fail_no_sequence() -> None:
    s, speculation = guessing()
    s.add(request("b", 5))
    step(s, speculation, [1])
    plan = s.schedule(0.0)
    assert plan is not None
    speculation.propose(plan)
    (told,) = s.update(plan, [accepted(plan.rows[0].draft, [Sampled(3), Sampled(-1, error="not finite")])], 0.0)
    assert (told.token_ids, told.finish_reason) == ([3], None)
