"""Who is let in, who is put out and how a step's tokens are shared, case by case."""

from __future__ import annotations

import pytest

from engine.plan import Sampled
from engine.request import Course, Tier
from engine.scheduling.scheduler import Scheduler
from tests.engine.stepping import request, rows, scheduler, step


def test_a_long_prompt_is_computed_in_chunks_while_decodes_go_on():
    s = scheduler(max_num_batched_tokens=8)
    s.add(request("decode", 4, max_tokens=20))
    step(s)
    s.add(request("long", 20, arrival=1.0, max_tokens=1))
    assert rows(step(s)[0]) == {"decode": (4, 1), "long": (0, 7)}
    assert rows(step(s)[0]) == {"decode": (5, 1), "long": (7, 7)}
    plan, events = step(s)
    assert rows(plan) == {"decode": (6, 1), "long": (14, 6)}
    assert {e.request_id for e in events} == {"decode", "long"}


def test_a_decode_keeps_its_token_though_a_better_tier_prefills_the_whole_budget():
    s = scheduler(max_num_batched_tokens=8)
    s.add(request("batch", 4, Tier.BATCH, max_tokens=20))
    step(s)
    s.add(request("priority", 30, Tier.PRIORITY, max_tokens=1))
    assert rows(step(s)[0]) == {"priority": (0, 7), "batch": (4, 1)}


def test_a_higher_tier_takes_the_row_of_a_lower_one_at_once():
    s = scheduler(max_num_seqs=2)
    old, new = (request(name, 4, Tier.BATCH, arrival=at, max_tokens=20) for name, at in (("old", 0.0), ("new", 1.0)))
    s.add(old)
    s.add(new)
    assert (new.course.began_at, new.course.running) == (None, 0)
    step(s, now=4.0)
    s.add(request("p", 4, Tier.PRIORITY, arrival=2.0, max_tokens=1))
    assert rows(step(s, now=5.0)[0]) == {"p": (0, 4), "old": (4, 1)}
    assert s.preempted(7.0) == [("new", 2.0)]
    assert new.course.running == 0
    plan = step(s, now=8.0)[0]
    assert rows(plan) == {"old": (5, 1), "new": (4, 1)}
    assert {row.seq.request.id: row.seq.computed_before for row in plan.rows} == {"old": 0, "new": 4}
    assert s.preempted(8.0) == []
    assert (s.stats().preemptions, s.stats().put_off_s) == (1, 3.0)
    assert new.course == Course(4.0, 0, 1, 1, [(5.0, "better_tier")], put_off_s=3.0)
    assert old.course == Course(4.0, 0, 1)


@pytest.mark.parametrize("shortage", ["rows", "blocks", "both"])
@pytest.mark.parametrize("tier", [Tier.PRIORITY, Tier.DEFAULT, Tier.FLEX])
def test_a_waiting_request_of_a_higher_tier_is_in_the_very_next_step(shortage, tier):
    """Whatever a full batch of lower ones lacks, and however much less than theirs its tenant's share has left."""
    s = scheduler(num_blocks=64 if shortage == "rows" else 13, max_num_seqs=16 if shortage == "blocks" else 4)
    s.add(request("before", 12, tier, tenant="greedy", max_tokens=30))
    while s.has_work:
        step(s)
    for place in range(6):
        s.add(request(f"b{place}", 12, Tier.BATCH, arrival=float(place), tenant=f"t{place}", max_tokens=30))
    for _ in range(3):
        step(s)
    assert s.stats().waiting
    s.add(request("urgent", 12, tier, arrival=9.0, tenant="greedy", max_tokens=3))
    assert [rows(step(s)[0]).get("urgent", (0, 0))[1] for _ in range(3)] == [12, 1, 1]


def test_a_prompt_of_a_better_tier_leaves_worse_decodes_an_eighth_of_the_step_and_its_equals_all():
    s = scheduler(num_blocks=200, max_num_seqs=16, max_num_batched_tokens=16)
    for place in range(6):
        s.add(request(f"b{place}", 2, Tier.BATCH, arrival=float(place), max_tokens=20))
    for place in range(3):
        s.add(request(f"p{place}", 2, Tier.PRIORITY, arrival=float(place), max_tokens=20))
    while len(plan := step(s)[0].rows) < 9 or not all(row.start >= 2 for row in plan):
        pass
    s.add(request("long", 30, Tier.PRIORITY, arrival=9.0, max_tokens=9))
    others = {"p0": 1, "p1": 1, "p2": 1, "b0": 1, "b1": 1}
    for count in (11, 11):
        plan, _ = step(s)
        assert {row.seq.request.id: row.count for row in plan.rows} == {**others, "long": count}
    plan, _ = step(s)  # what the prompt's end leaves is theirs again
    found = {row.seq.request.id: row.count for row in plan.rows}
    assert found == {**others, "long": 8, "b2": 1, "b3": 1, "b4": 1}
    plan, _ = step(s)
    assert sum(row.count for row in plan.rows) == len(plan.rows) == 10


def beside_decodes(budget: int = 16, tier: int = Tier.DEFAULT, **settings) -> Scheduler:
    """Four sequences of a worse tier that decode."""
    s = scheduler(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=200, **settings)
    for place in range(4):
        s.add(request(f"d{place}", 2, tier, arrival=float(place), max_tokens=90))
    while len(plan := step(s)[0].rows) < 4 or not all(row.start >= 2 for row in plan):
        pass
    return s


def test_a_prompt_of_the_best_tier_has_steps_for_itself_but_not_more_than_three_in_a_row():
    s = beside_decodes(exclusive=True)
    s.add(request("p", 100, Tier.PRIORITY, arrival=9.0, max_tokens=3))
    seen = [rows(step(s)[0]) for _ in range(9)]
    assert [found.pop("p", (0, 0))[1] for found in seen] == [16, 16, 16, 14, 14, 14, 10, 1, 1]
    # Two of them keep their token meanwhile, as they do where nobody has a step for itself; then all have one again.
    assert [len(found) for found in seen] == [0, 0, 0, 2, 2, 2, 0, 4, 4]


def test_in_the_long_run_one_step_in_four_is_the_best_tiers_alone():
    s = beside_decodes(exclusive=True)
    alone = 0
    for place in range(40):
        s.add(request(f"p{place}", 4, Tier.PRIORITY, arrival=9.0 + place, max_tokens=1))
        alone += set(rows(step(s)[0])) == {f"p{place}"}
    assert alone == 3 + (40 - 3 + 2) // 4


@pytest.mark.parametrize("exclusive", [True, False], ids=["apart", "not"])
def test_an_exclusive_step_admits_no_worse_tier_either(exclusive):
    s = beside_decodes(budget=32, exclusive=exclusive)
    s.add(request("late", 8, Tier.DEFAULT, arrival=8.0, max_tokens=1))
    s.add(request("p", 8, Tier.PRIORITY, arrival=9.0, max_tokens=1))
    assert set(rows(step(s)[0])) == ({"p"} if exclusive else {"p", "late", "d0", "d1", "d2", "d3"})
    assert ("late" in rows(step(s)[0])) == exclusive


@pytest.mark.parametrize("tier", [Tier.DEFAULT, Tier.FLEX])
def test_an_aged_request_has_no_exclusive_steps(tier):
    s = beside_decodes(tier=Tier.BATCH, max_non_priority_step_tokens=8, exclusive=True)
    s.add(request("p", 20, tier, arrival=-1000.0, max_tokens=3))
    found = rows(step(s, now=100.0)[0])
    assert found.pop("p") == (0, 6)
    assert set(found) == {"d0", "d1"}


def test_a_step_without_a_prompt_of_the_best_tier_is_short_and_with_one_may_be_full():
    s = scheduler(num_blocks=200, max_num_batched_tokens=32, max_model_len=200, max_non_priority_step_tokens=8)
    s.add(request("long", 40, Tier.DEFAULT, max_tokens=3))
    assert rows(step(s)[0]) == {"long": (0, 8)}
    s.add(request("p", 28, Tier.PRIORITY, arrival=1.0, max_tokens=3))
    assert rows(step(s)[0]) == {"p": (0, 28)}
    assert rows(step(s)[0]) == {"p": (28, 1), "long": (8, 7)}
    s.add(request("q", 3, Tier.PRIORITY, arrival=2.0, max_tokens=1))
    assert rows(step(s)[0]) == {"p": (29, 1), "q": (0, 3), "long": (15, 4)}


def test_where_memory_made_steps_small_they_are_small_for_all():
    s = scheduler(max_num_seqs=2, max_num_batched_tokens=16, max_non_priority_step_tokens=8)
    s.add(request("a", 20, Tier.DEFAULT, max_tokens=1))
    step(s)
    for _ in range(3):
        assert s.shrink(0.0, tried=False) or s.step_tokens == 2
    s.add(request("p", 9, Tier.PRIORITY, arrival=1.0, max_tokens=1))
    assert sum(count for _, count in rows(step(s)[0]).values()) == 2


def test_a_higher_tier_takes_the_last_tokens_of_the_budget_from_lower_ones():
    s = scheduler(max_num_seqs=4, max_num_batched_tokens=4)
    for place in range(4):
        s.add(request(f"b{place}", 2, Tier.BATCH, arrival=float(place), max_tokens=20))
    while len(plan := step(s)[0].rows) < 4 or not all(row.start >= 2 for row in plan):
        pass
    s.add(request("p", 4, Tier.PRIORITY, arrival=9.0, max_tokens=1))
    plan, _ = step(s)
    assert [(row.seq.request.id, row.count) for row in plan.rows] == [("p", 3), ("b0", 1)]


def test_a_higher_tier_takes_the_blocks_of_lower_ones_but_only_as_many_as_it_needs():
    s = scheduler(num_blocks=10, max_num_seqs=4, enable_prefix_caching=False)
    for place, name in enumerate(("x", "y", "z")):
        s.add(request(name, 12, Tier.FLEX, arrival=float(place), max_tokens=3))
    running = {row.seq.request.id: row.seq.request.course for row in step(s)[0].rows}
    s.add(request("p", 15, Tier.DEFAULT, arrival=9.0, max_tokens=1))
    # z made room for p; y then for x, which had filled its blocks.
    assert rows(step(s)[0]) == {"p": (0, 15), "x": (12, 1)}
    assert {name for name, _ in s.preempted(0.0)} == {"y", "z"}
    assert [running[name].preempted[0][1] for name in ("z", "y")] == ["better_tier", "kv_room"]


def test_no_sequence_is_preempted_for_a_request_that_would_still_not_fit():
    s = scheduler(num_blocks=12, enable_prefix_caching=False)
    s.add(request("same", 30, Tier.DEFAULT, max_tokens=5))
    s.add(request("lower", 8, Tier.BATCH, max_tokens=5))
    step(s)
    s.add(request("big", 20, Tier.DEFAULT, max_tokens=1))
    assert set(rows(step(s)[0])) == {"same", "lower"}
    assert s.stats().preemptions == 0


@pytest.mark.parametrize("tier", [Tier.DEFAULT, Tier.FLEX])
def test_an_equal_or_lower_tier_waits_its_turn(tier):
    s = scheduler(max_num_seqs=1)
    s.add(request("a", 4, Tier.DEFAULT, arrival=5.0, max_tokens=3))
    step(s, now=5.0)
    s.add(request("b", 4, tier, arrival=0.0, max_tokens=1))
    assert [rows(step(s, now=6.0)[0]) for _ in range(3)] == [{"a": (4, 1)}, {"a": (5, 1)}, {"b": (0, 4)}]


def test_for_want_of_blocks_the_latest_of_the_worst_tier_goes():
    s = scheduler(num_blocks=7, enable_prefix_caching=False)
    for place, (name, tier) in enumerate([("a", 2), ("b", 1), ("c", 2)]):
        s.add(request(name, 7, tier, arrival=float(place), max_tokens=9))
    step(s)
    assert rows(step(s)[0]) == {"b": (7, 1), "a": (7, 1), "c": (7, 1)}
    # b takes the last free block and a, in want of one, that of c.
    assert rows(step(s)[0]) == {"b": (8, 1), "a": (8, 1)}
    assert [name for name, _ in s.preempted(0.0)] == ["c"]


def test_one_that_was_preempted_goes_before_worse_tiers_in_the_same_step():
    s = scheduler(num_blocks=8, windows=(3,), block_size=1, max_num_seqs=3)
    asked = {"batch": (9, Tier.BATCH, 11), "priority": (1, Tier.PRIORITY, 14), "flex": (6, Tier.FLEX, 3)}
    for name, (prompt, tier, max_tokens) in asked.items():
        s.add(request(name, prompt, tier=tier, max_tokens=max_tokens))
        step(s)
    while s.has_work:
        plan, _ = step(s)
        assert sorted(plan.rows, key=lambda row: row.seq.request.tier) == plan.rows


def test_a_starved_batch_request_ages_to_the_front_and_is_then_left_in_peace():
    s = scheduler(max_num_seqs=1, ageing_s=10.0)
    s.add(request("batch", 4, Tier.BATCH, arrival=0.0, max_tokens=3))
    s.add(request("p0", 4, Tier.PRIORITY, arrival=0.0, max_tokens=1))
    served = []
    for second in range(60):
        if "batch" not in served:
            s.add(request(f"p{second + 1}", 4, Tier.PRIORITY, arrival=float(second), max_tokens=1))
        plan = s.schedule(float(second))
        served += rows(plan)
        s.update(plan, [Sampled(1)] * len(plan.rows), float(second))
        if served.count("batch") == 3:
            break
    assert served.index("batch") == 30
    assert served[-3:] == ["batch"] * 3


def test_an_aged_request_does_not_put_out_those_of_its_own_tier():
    s = scheduler(max_num_seqs=1, ageing_s=10.0)
    s.add(request("a", 4, Tier.DEFAULT, arrival=100.0, max_tokens=30))
    step(s, now=100.0)
    s.add(request("b", 4, Tier.DEFAULT, arrival=100.0, max_tokens=30))
    assert rows(step(s, now=500.0)[0]) == {"a": (4, 1)}


def test_a_fresh_priority_request_displaces_though_an_aged_one_waits_before_it():
    s = scheduler(max_num_seqs=1, ageing_s=10.0)
    s.add(request("running", 4, Tier.DEFAULT, arrival=0.0, max_tokens=30))
    step(s)
    s.add(request("aged", 4, Tier.DEFAULT, arrival=0.0, max_tokens=30))
    s.add(request("p", 4, Tier.PRIORITY, arrival=500.0, max_tokens=1))
    assert rows(step(s, now=500.0)[0]) == {"p": (0, 4)}
    assert rows(step(s, now=501.0)[0]) == {"aged": (0, 4)}


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones():
    s = scheduler(num_blocks=8, max_num_seqs=4, enable_prefix_caching=False)
    s.add(request("s0", 8, arrival=0.0, max_tokens=4))
    step(s)
    s.add(request("large", 28, arrival=1.0, max_tokens=1))
    for number in range(1, 30):
        s.add(request(f"s{number}", 8, arrival=1.0 + number, max_tokens=4))
        if "large" in rows(step(s)[0]):
            break
    assert number < 6


def test_a_request_as_large_as_the_pool_runs_alone():
    s = scheduler(num_blocks=4, max_model_len=100)
    s.add(request("small", 4, Tier.BATCH, max_tokens=9))
    step(s)
    s.add(request("all", 16, max_tokens=1))
    assert rows(step(s)[0]) == {"all": (0, 16)}
    s.add(request("rest", 4))
    events = []
    while s.has_work:
        events += [event for event in step(s)[1] if event.request_id == "rest"]
    # The last token is never computed: prompt and output are one more than the pool holds.
    assert (events[-1].finish_reason, events[-1].index) == ("length", 16 - 4)


def test_an_admission_leaves_a_block_to_those_who_run():
    s = scheduler(num_blocks=4, enable_prefix_caching=False)
    s.add(request("a", 8, max_tokens=5))
    step(s)
    s.add(request("b", 4, arrival=1.0, max_tokens=5))
    s.add(request("c", 4, arrival=2.0, max_tokens=5))
    assert rows(step(s)[0]) == {"a": (8, 1)}
    assert s.stats().preemptions == 0


def test_a_priority_request_does_not_take_the_room_that_an_aged_one_waits_for():
    s = scheduler(num_blocks=8, enable_prefix_caching=False, ageing_s=10.0)
    s.add(request("running", 8, Tier.PRIORITY, max_tokens=3))
    step(s)
    s.add(request("aged", 28, Tier.BATCH, max_tokens=1))
    s.add(request("p", 4, Tier.PRIORITY, arrival=99.0, max_tokens=1))
    served = [list(rows(step(s, now=100.0)[0])) for _ in range(4)]
    assert served == [["running"], ["running"], ["aged"], ["p"]]


def test_blocks_shared_with_those_put_out_are_counted_when_they_are_out():
    s = scheduler(num_blocks=9)
    s.add(request("first", 9, Tier.BATCH, max_tokens=9))
    s.add(request("same", list(range(17)), Tier.BATCH, arrival=1.0, max_tokens=9))
    step(s)
    s.add(request("p", list(range(33)), Tier.PRIORITY, arrival=2.0, max_tokens=1))
    # Of its nine blocks four are those of "same"; once that is out they are no longer held for it by another.
    assert rows(step(s)[0]) == {"p": (16, 17)}


def test_time_waited_before_it_ran_still_counts_after_it_was_put_out():
    s = scheduler(max_num_seqs=1, ageing_s=10.0)
    s.add(request("batch", 4, Tier.BATCH, max_tokens=9))
    step(s, now=25.0)
    s.add(request("p", 4, Tier.PRIORITY, arrival=25.0, max_tokens=1))
    s.add(request("later", 4, Tier.DEFAULT, arrival=26.0, max_tokens=1))
    assert list(rows(step(s, now=26.0)[0])) == ["p"]
    assert list(rows(step(s, now=31.0)[0])) == ["batch"]


def test_past_an_aged_one_that_cannot_enter_a_better_tier_pays_with_anothers_place():
    s = scheduler(num_blocks=9, enable_prefix_caching=False, ageing_s=10.0)
    s.add(request("running", 8, Tier.DEFAULT, arrival=99.0, max_tokens=9))
    step(s, now=99.0)
    s.add(request("aged", 36, Tier.BATCH, max_tokens=1))
    s.add(request("p", 4, Tier.PRIORITY, arrival=100.0, max_tokens=2))
    # There was room for p without this; but what is free is what "aged" waits for.
    assert list(rows(step(s, now=100.0)[0])) == ["p"]
    assert s.preempted(100.0) == [("running", 0.0)]


def test_no_sequence_is_preempted_for_blocks_that_the_request_would_share_with_it():
    s = scheduler(num_blocks=10)
    s.add(request("equal", 15, Tier.DEFAULT, max_tokens=3))
    s.add(request("lower", list(range(17)), Tier.BATCH, max_tokens=3))
    step(s)
    s.add(request("big", list(range(33)), Tier.DEFAULT, arrival=1.0, max_tokens=1))
    assert list(rows(step(s)[0])) == ["equal", "lower"]
    assert s.stats().preemptions == 0
