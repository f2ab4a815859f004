"""What becomes of requests, case by case; test_scheduler_histories.py tries them at random."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.errors import EngineError
from engine.plan import Sampled
from engine.request import Tier
from tests.engine.stepping import EOS, request, rows, scheduler, step


def test_a_prompt_and_its_decode_become_one_event_a_token_and_free_everything_at_the_end():
    s = scheduler()
    s.add(request("a", 5, max_tokens=2))
    plan, events = step(s)
    assert rows(plan) == {"a": (0, 5)}
    assert [(e.index, e.token_ids, e.finish_reason, e.done) for e in events] == [(0, [1], None, False)]
    plan, events = step(s)
    assert rows(plan) == {"a": (5, 1)}
    assert [(e.index, e.token_ids, e.finish_reason, e.done) for e in events] == [(1, [1], "length", True)]
    assert s.schedule(0.0) is None
    assert not s.has_work
    s.check_idle()


def test_the_stop_token_is_listed_and_never_cached():
    s = scheduler()
    s.add(request("a", [1, 2, 3, 4], max_tokens=9))
    step(s, token=5)
    _, events = step(s, token=EOS)
    assert (events[0].token_ids, events[0].texts, events[0].finish_reason) == ([EOS], [""], "stop")
    assert (events[0].stop_match, events[0].done) == (EOS, True)
    s.add(request("b", [1, 2, 3, 4, 5, EOS, 7, 7, 7], max_tokens=1))
    plan, events = step(s)
    assert rows(plan) == {"b": (4, 5)}
    assert events[0].cached_tokens == 4


def test_the_most_that_was_held_is_known_when_all_have_ended():
    s = scheduler()
    s.add(request("a", list(range(8)), max_tokens=1))
    s.add(request("b", list(range(20, 25)), max_tokens=1))
    step(s)
    assert (s.stats().kv_blocks_used, s.stats().kv_blocks_most) == (0, 4)


def test_who_holds_most_blocks_is_known_and_what_is_cached_when_it_ends():
    s = scheduler()
    s.add(request("a", [1, 2, 3], max_tokens=2))
    s.add(request("b", list(range(8)), max_tokens=9))
    step(s, token=5)
    first, second = s.largest(5)
    assert (first.request_id, first.choice, first.prompt_tokens, first.tokens) == ("b", 0, 8, 9)
    assert (second.request_id, second.tokens, s.largest(1)) == ("a", 4, [first])
    assert (s.stats().kv_blocks_used, s.stats().kv_blocks_cached) == (first.blocks + second.blocks, 0)
    step(s, token=5)
    assert [held.request_id for held in s.largest(5)] == ["b"]
    assert s.stats().kv_blocks_cached == 1


def test_nothing_is_shared_across_salts():
    s = scheduler()
    s.add(request("a", list(range(8)), max_tokens=1))
    step(s)
    s.add(request("b", list(range(8)), max_tokens=1, salt="tenant"))
    assert rows(step(s)[0]) == {"b": (0, 8)}


def test_what_is_cached_is_shared_by_requests_of_one_version_of_an_adapter():
    s = scheduler()
    for name, version, computed in (("a", None, (0, 8)), ("b", "1", (0, 8)), ("c", "1", (4, 4)), ("d", "2", (0, 8))):
        of_adapter = request(name, list(range(8)), max_tokens=1)
        of_adapter.loaded = None if version is None else SimpleNamespace(version=version)
        s.add(of_adapter)
        assert rows(step(s)[0]) == {name: computed}


def test_what_a_failed_sequence_wrote_is_not_found_again():
    s = scheduler()
    prompt = list(range(8))
    s.add(request("a", prompt, max_tokens=5))
    step(s)
    plan = s.schedule(0.0)
    events = s.update(plan, [Sampled(-1, error="logits are not finite")], 0.0)
    assert [(e.finish_reason, e.error, e.token_ids, e.done) for e in events] == [
        ("error", "logits are not finite", [], True)
    ]
    s.add(request("b", prompt, max_tokens=1))
    assert rows(step(s)[0]) == {"b": (0, 8)}


def test_choices_share_the_prompt_and_copy_its_last_partial_block():
    s = scheduler()
    s.add(request("a", 6, n=3, max_tokens=3))
    assert rows(step(s)[0]) == {"a": (0, 6)}
    plan, events = step(s)
    tables = [row.seq.tables[0].blocks for row in plan.rows]
    assert [(row.seq.choice, row.start, row.count) for row in plan.rows] == [(0, 6, 1), (1, 5, 1), (2, 5, 1)]
    assert tables[0][0] == tables[1][0] == tables[2][0]
    assert plan.copies == [(0, tables[0][1], tables[1][1]), (0, tables[0][1], tables[2][1])]
    assert [(e.choice, e.index) for e in events] == [(0, 1), (1, 0), (2, 0)]
    _, events = step(s)
    assert [(e.choice, e.finish_reason, e.done) for e in events] == [
        (0, "length", False),
        (1, None, False),
        (2, None, False),
    ]
    _, events = step(s)
    assert [(e.choice, e.finish_reason, e.done) for e in events] == [(1, "length", False), (2, "length", True)]


def test_a_choice_admitted_in_this_step_has_nothing_to_copy_yet():
    s = scheduler(max_num_seqs=3, enable_prefix_caching=False, ageing_s=10.0)
    s.add(request("x", 4, Tier.PRIORITY, max_tokens=3))
    s.add(request("a", 6, n=3, max_tokens=9))
    step(s, now=0.0)
    # Choice 1 gets the last row, aged to tier 0; choice 0 has tier 1 and so makes room for p.
    step(s, now=20.0)
    s.add(request("p", 4, Tier.PRIORITY, arrival=20.0, max_tokens=1))
    assert rows(step(s, now=20.0)[0]) == {"x": (5, 1), "a": (6, 1), "p": (0, 4)}
    plan, _ = step(s, now=40.0)
    assert [(row.seq.choice, row.start) for row in plan.rows] == [(1, 7), (0, 6), (2, 5)]
    donor, again, new = (row.seq.tables[0].blocks for row in plan.rows)
    assert plan.copies == [(0, donor[1], again[1]), (0, donor[1], new[1])]


def test_choices_go_on_when_the_first_fails_in_the_middle_of_its_prompt():
    s = scheduler(max_num_batched_tokens=4)
    s.add(request("a", 6, n=2, max_tokens=1))
    plan, _ = step(s)
    assert [(e.choice, e.error, e.done) for e in s.fail(plan.rows[0].seq, "broken")] == [(0, "broken", False)]
    step(s)
    assert [(e.choice, e.finish_reason, e.done) for e in step(s)[1]] == [(1, "length", True)]


def test_requests_without_a_seed_get_one_that_the_engine_seed_decides():
    def seeds(seed):
        s = scheduler(seed=seed)
        s.add(request("a", 4, max_tokens=1))
        s.add(request("b", 4, max_tokens=1, seed=77))
        s.add(request("c", 4, max_tokens=1))
        return [row.seq.seed for row in s.schedule(0.0).rows]

    assert seeds(1) == seeds(1) != seeds(2)
    assert seeds(1)[1] == 77
    assert len(set(seeds(1))) == 3


def test_results_that_do_not_go_with_the_plan_are_refused():
    s = scheduler()
    s.add(request("a", 4))
    with pytest.raises(EngineError, match="0 tokens were sampled for a plan with 1"):
        s.update(s.schedule(0.0), [], 0.0)


def test_a_sequence_that_grows_past_the_switch_is_computed_anew_and_shares_nothing_with_its_shorter_self():
    s = scheduler(rope_switch=9)
    s.add(request("a", list(range(8)), max_tokens=9))
    assert [rows(step(s)[0]) for _ in range(3)] == [{"a": (0, 8)}, {"a": (8, 1)}, {"a": (0, 10)}]
    assert (s.stats().preemptions, s.preempted(0.0)) == (1, [])
    assert rows(step(s)[0]) == {"a": (10, 1)}
    # One that is long from its beginning finds what the first left when it was long, a short one what it left before.
    s.add(request("long", [*range(8), 1, 1, 1, 1], max_tokens=1))
    s.add(request("short", list(range(8)), max_tokens=1))
    assert rows(step(s)[0]) == {"a": (11, 1), "long": (8, 4), "short": (4, 4)}


def test_a_choice_below_the_switch_takes_nothing_from_one_beyond():
    s = scheduler(rope_switch=9, max_num_seqs=2, enable_prefix_caching=False)
    s.add(request("other", 4, arrival=0.0, max_tokens=6))
    s.add(request("a", 8, arrival=1.0, n=2, max_tokens=9))
    for _ in range(6):
        assert "other" in rows(step(s)[0])
    plan, _ = step(s)
    assert [(row.seq.choice, row.start, row.count) for row in plan.rows] == [(0, 13, 1), (1, 0, 8)]


def test_choices_of_a_resumed_request_may_lie_on_both_sides_of_the_switch():
    s = scheduler(rope_switch=9)
    s.add(request("a", 8, n=2, max_tokens=9, resume=[[1, 2, 3]]))
    assert rows(step(s)[0]) == {"a": (0, 11)}
    plan, _ = step(s)
    assert [(row.seq.choice, row.start, row.count) for row in plan.rows] == [(0, 11, 1), (1, 0, 8)]
