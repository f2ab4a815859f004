"""The scaling policy: each number, each limit of a step, each constant, and what holds for any history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from producers.contract.profile import Profile
from tests.workers.autoscaler.looks import PROFILE, RULES, Pool, raw, seen
from workers.autoscaler.policy import LevelQueue, Memory, Rules, Signals, decide

# ---- a: room -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ({}, 0),
        ({"default": 1}, 1),
        ({"default": 4, "priority": 4}, 1),
        ({"default": 5, "priority": 4}, 2),
        ({"in_flight": 8}, 1),
        ({"in_flight": 9}, 2),
        ({"default": 4, "in_flight": 20, "ready": 2}, 3),
        ({"in_flight": 20, "patient": 20, "ready": 2}, 0),
        # 10 hurried among 20 in flight at a knee of 10: without the patient ones they would be 5.
        ({"in_flight": 20, "patient": 10, "ready": 1}, 1),
        ({"in_flight": 20, "patient": 10, "ready": 2}, 2),
        ({"in_flight": 40, "patient": 10, "ready": 1}, 3),
        ({"in_flight": 5, "patient": 10, "ready": 1}, 0),
    ],
)
def test_hurried_tasks_get_room_at_headroom_of_the_knee(said: dict[str, Any], number: int) -> None:
    assert raw(seen(**said))["a"] == number


def test_headroom_and_the_default_knee_are_settings() -> None:
    assert raw(seen(default=10), replace(RULES, headroom=1.0))["a"] == 1
    unknown = Profile()
    assert raw(seen(0, unknown, default=7))["a"] == 2  # 0.8 * 8
    assert raw(seen(0, unknown, default=7), replace(RULES, default_knee=10))["a"] == 1
    slow = Profile(knee=0.01)
    assert raw(seen(0, slow, default=4))["a"] == 5  # a worker holds one sequence at least


@pytest.mark.parametrize(("tokens", "number"), [(400, 25), (100, 10), (25, 3), (5, 1)])
def test_short_tasks_share_room_if_all_are_done_in_priority_s_target_wait(tokens: int, number: int) -> None:
    short = replace(PROFILE, knee=1, tokens_per_task=tokens)  # a quarter, 1, 4 and 20 tasks a second
    assert raw(seen(0, short, default=20))["a"] == number


# ---- d: release ----------------------------------------------------------------------------------


def later(number: int, below: int, able: int = 0, in_flight: int = 0, tier: str = "default") -> dict[str, Any]:
    """So many tasks that need level 1 wait; `in_flight`: hurried tasks of the workers that can do them."""
    levels = (LevelQueue(1, {tier: number}, below, able, in_flight),)
    return {tier: number, "ready": below + able, "levels": levels}


@pytest.mark.parametrize(
    ("said", "number"),
    [
        (later(0, 1), 0),
        (later(1, 0), 1),
        (later(1, 1), 2),
        (later(9, 3), 5),
        (later(1, 1, able=1), 0),  # it has room, and the worker that takes none is not needed for it
        (later(1, 1, able=1, in_flight=8), 3),
        (later(1, 2, tier="batch"), 0),
    ],
)
def test_a_worker_of_an_earlier_release_is_none_for_what_needs_a_later_one(said: dict[str, Any], number: int) -> None:
    assert raw(seen(**said))["d"] == number


def test_patient_tasks_that_count_need_one_worker_that_can_do_them() -> None:
    said = later(1, 2, tier="batch") | {"batch": (1, 2000.0)}
    assert raw(seen(**said))["d"] == 3


def test_one_is_started_beside_an_idle_worker_of_an_earlier_release_and_that_one_goes() -> None:
    pool = Pool(memory=Memory(wanted=1, changed_at=-1e4))
    assert pool.see(60, **later(1, 1)) == 2
    assert "1 queued for a later release than that of 1 workers" in pool.last.reason
    idle = {"ready": 2, "in_flight": 1}
    assert pool.see(60, **later(0, 1, able=1, in_flight=1) | idle) == 2
    assert pool.see(RULES.cool_down * 2, **idle) == 1


def test_no_more_are_started_if_what_was_started_is_of_no_later_release() -> None:
    pool = Pool(memory=Memory(wanted=1, changed_at=-1e4))
    assert pool.see(30, **later(1, 1)) == 2
    assert pool.see(3600, **later(1, 2)) == 2
    assert pool.see(RULES.cool_down * 9, ready=2) == 0
    assert pool.memory.below == ()


def test_unknown_kinds_keep_one_worker_and_start_no_more() -> None:
    pool = Pool(memory=Memory(wanted=0, changed_at=-1e4))
    assert pool.see(60, aside=10_000) == 1
    assert pool.see(3600, aside=1, ready=1) == 1
    assert pool.see(RULES.cool_down * 9, ready=1) == 0


# ---- b: wait -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ({"default": 20}, 1),  # 20 s of work, and 20 s of cold start are longer than the target of 10 s
        ({"default": 21}, 2),
        ({"priority": 20, "default": 20}, 2),
        ({"flex": 300}, 1),
        ({"flex": 301}, 2),
        ({"batch": 3600}, 1),
        ({"batch": 3601}, 2),
        ({"flex": 300, "batch": 3301}, 2),
    ],
)
def test_waits_are_kept_within_their_targets(said: dict[str, Any], number: int) -> None:
    assert raw(seen(**said))["b"] == number


def test_a_target_counts_where_it_is_longer_than_the_cold_start() -> None:
    fast = replace(PROFILE, cold_start={"total": 1.0})
    assert raw(seen(0, fast, default=101))["b"] == 11
    assert raw(seen(0, fast, priority=100))["b"] == 50
    assert raw(seen(0, replace(PROFILE, cold_start={}), priority=100))["b"] == 50


def test_without_measured_speed_there_is_no_b() -> None:
    assert raw(seen(0, replace(PROFILE, tokens_per_s=None), default=1000))["b"] == 0


# ---- flex and batch ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ({"flex": (1, 149.0)}, 0),
        ({"flex": (1, 150.0)}, 1),
        ({"batch": (1, 1799.0)}, 0),
        ({"batch": (1, 1800.0)}, 1),
        ({"batch": (39, 0.0)}, 0),  # work of 39 s; two cold starts are 40 s
        ({"batch": (40, 0.0)}, 1),
        ({"flex": (20, 0.0), "batch": (20, 0.0)}, 1),
        ({"batch": (900, 0.0)}, 1),  # room for all at once would be 113
    ],
)
def test_patient_tasks_start_a_worker_once_they_waited_or_are_worth_it(said: dict[str, Any], number: int) -> None:
    assert Pool().see(0, **said) == number


@pytest.mark.parametrize("tier", ["flex", "batch"])
@pytest.mark.parametrize(
    ("start", "cheap_start", "counts"),
    [
        (4.0, 10.0, 8.0),
        (9.9, 10.0, 19.8),
        (10.0, 10.0, None),
        (20.0, 3600.0, 40.0),
        (None, 3600.0, 20.0),  # it was never started
        (None, 10.0, None),
        (4.0, 0.0, None),
        (1000.0, 3600.0, None),  # two of them are later than its patience
    ],
)
def test_where_a_start_is_cheap_patient_tasks_wait_for_two(
    tier: str, start: float | None, cheap_start: float, counts: float | None
) -> None:
    rules, profile = replace(RULES, cheap_start=cheap_start), Profile(cold_start={"total": start} if start else {})
    late = counts or RULES.patience * RULES.target_wait[tier]
    late = min(late, RULES.patience * RULES.target_wait[tier])
    assert Pool(rules).see(0, profile, **{tier: (1, late - 0.1)}) == 0
    pool = Pool(rules)
    assert pool.see(0, profile, **{tier: (1, late - 7.0)}) == 0
    assert pool.last.reason.endswith("counted in 7 s")
    assert Pool(rules).see(0, profile, **{tier: (1, late)}) == 1


def test_patience_and_worth_are_settings() -> None:
    assert Pool(replace(RULES, patience=0.9)).see(0, flex=(1, 269.0)) == 0
    assert Pool(replace(RULES, worth=3.0)).see(0, batch=(59, 0.0)) == 0


def test_a_due_tier_counts_in_the_wait_and_gets_no_room_for_all_at_once() -> None:
    assert raw(seen(flex=(301, 151.0), batch=(5000, 0.0)), replace(RULES, worth=1e6)) == {
        "a": 1,
        "b": 2,
        "c": 0,
        "d": 0,
        "raw": 2,
    }


def test_patient_work_in_flight_starts_no_worker_and_keeps_one() -> None:
    pool = Pool(memory=Memory(wanted=1, changed_at=-1e4))
    assert pool.see(4000, batch=(5, 0.0), in_flight=20, patient=20, ready=1, running=20) == 1


# ---- c: strain -----------------------------------------------------------------------------------

FULL = {"default": 1, "in_flight": 16, "running": 16, "ready": 2}


@pytest.mark.parametrize(
    ("profile", "said", "number"),
    [
        ({"ttft_p95": 1.01}, {}, 3),
        ({"ttft_p95": 1.0}, {}, 0),
        ({}, {"kv_used": 0.86}, 3),
        ({}, {"kv_used": 0.85}, 0),
        ({"ttft_p95": 9.0}, {"running": 15}, 0),
        ({"ttft_p95": 9.0}, {"default": 0}, 0),
        ({"ttft_p95": 9.0}, {"default": 0, "batch": (10, 0.0)}, 0),  # patient tasks always fill the workers
        ({"ttft_p95": 9.0}, {"ready": 0}, 0),
    ],
)
def test_strain_of_full_workers_asks_for_one_more(profile: dict[str, Any], said: dict[str, Any], number: int) -> None:
    assert raw(seen(0, replace(PROFILE, **profile), **{**FULL, **said}), memory=Memory(2))["c"] == number


def test_a_worker_that_has_its_turn_half_of_the_time_counts_as_half_as_fast() -> None:
    """By its work and in the time in which it had some, not by its knee."""
    backlog = {"default": 200, "ready": 1, "running": 10}
    assert raw(seen(**backlog))["b"] == 10
    assert raw(seen(**backlog, turn_share=0.5))["b"] == 20
    assert raw(seen(**backlog, turn_share=0.5))["a"] == raw(seen(**backlog))["a"]
    quick = replace(PROFILE, tokens_per_s=10_000)
    assert (raw(seen(0.0, quick, **backlog))["a"], raw(seen(0.0, quick, **backlog, turn_share=0.5))["a"]) == (1, 2)
    for turn_share, more in ((1.0, 0), (0.5, 2)):
        pool = Pool()
        working = {"default": 1, "ready": 1, "running": 10, "turn_share": turn_share}
        pool.see(121.0, replace(PROFILE, duty=0.45), **working)
        assert pool.last.raw["c"] == more


def test_a_high_duty_cycle_counts_once_it_lasts() -> None:
    busy = replace(PROFILE, duty=0.71)
    pool = Pool(memory=Memory(wanted=3, changed_at=0.0))
    pool.see(115, busy, **{**FULL, "ready": 3, "running": 24})
    pool.see(4, busy, **{**FULL, "ready": 3, "running": 24})
    assert pool.last.raw["c"] == 0
    pool.see(1, busy, **{**FULL, "ready": 3, "running": 24})
    assert pool.last.raw["c"] == 4
    pool.see(0, replace(PROFILE, duty=0.7), **{**FULL, "ready": 3, "running": 24})
    assert pool.last.raw["c"] == 0


def test_strain_asks_for_no_more_while_a_worker_starts_or_leases_lie() -> None:
    slow = replace(PROFILE, ttft_p95=9.0)
    pool = Pool(memory=Memory(wanted=2))
    assert pool.see(600, slow, **FULL) == 3
    lying = {**FULL, "ready": 50, "running": 500, "in_flight": 8}
    assert raw(seen(0, slow, **lying), memory=Memory(2))["c"] == 3


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "numbers"),
    [
        (RULES, [1] * 5 + [2] * 5 + [4] * 5 + [8] * 5 + [10]),
        (Rules(max=100, growth=1.5, step=2.0), [1, 1, 2, 2, 3, 3, 4, 4, 6]),
    ],
)
def test_from_zero_at_once_then_at_most_by_growth_every_step(rules: Rules, numbers: list[int]) -> None:
    pool = Pool(rules)
    for number in numbers:
        assert pool.see(0, default=80) == number
        pool.at += 1


def test_the_first_task_starts_a_worker_just_after_the_policy_began() -> None:
    assert Pool(memory=Memory(wanted=0, changed_at=0.0), at=1.0).see(0, default=1) == 1


def test_in_by_one_once_fewer_were_enough_for_a_cool_down() -> None:
    pool = Pool(memory=Memory(wanted=4, changed_at=-1000.0))
    pool.see(0, in_flight=32)
    assert pool.see(299, in_flight=8) == 4
    assert pool.see(1, in_flight=8) == 3
    assert pool.see(295, in_flight=8) == 3
    assert pool.see(5, in_flight=8) == 2
    assert pool.see(10_000, in_flight=8) == 1
    begun = Pool(memory=Memory(wanted=4))
    assert begun.see(295, in_flight=8) == 4, "what was before the first look counts as needed"
    assert begun.see(5, in_flight=8) == 3


def test_the_largest_number_of_the_cool_down_holds() -> None:
    pool = Pool(memory=Memory(wanted=4, changed_at=-1000.0))
    pool.see(200, in_flight=8)
    pool.see(0, in_flight=25)
    pool.at += 5
    assert pool.see(290, in_flight=8) == 4
    assert pool.see(5, in_flight=8) == 3


def test_after_a_turn_it_waits_two_cool_downs() -> None:
    pool = Pool(memory=Memory(wanted=3, changed_at=-1000.0))
    assert pool.see(300, in_flight=8) == 2
    pool.at += 1
    assert pool.see(0, in_flight=24) == 3
    turned = pool.at
    assert pool.see(595, in_flight=8) == 3
    assert pool.see(5, in_flight=8) == 2
    assert pool.at == turned + 600


def test_to_the_least_once_nothing_is_left_for_the_cool_down_or_two_cold_starts() -> None:
    pool = Pool(memory=Memory(wanted=5, changed_at=-1000.0))
    assert pool.see(295) == 5
    assert pool.see(5) == 0
    slow = replace(PROFILE, cold_start={"total": 200.0})
    pool = Pool(Rules(min=1, max=9), Memory(wanted=1, changed_at=0.0))
    pool.see(10, slow, in_flight=16)
    assert pool.last.target == 2
    pool.at += 5
    assert pool.see(395, slow) == 1  # in by one meanwhile
    pool = Pool(Rules(max=9), Memory(wanted=1, changed_at=0.0))
    assert pool.see(395, slow) == 1
    assert pool.see(5, slow) == 0


def test_to_the_least_after_a_turn_takes_two_cool_downs() -> None:
    pool = Pool(memory=Memory(wanted=1, changed_at=0.0, turned_at=0.0))
    assert pool.see(599) == 1
    assert pool.see(1) == 0


def test_limits_that_change_hold_at_once() -> None:
    memory = Memory(wanted=7)
    assert decide(Rules(max=3), seen(in_flight=80), memory)[0].target == 3
    assert decide(Rules(min=9, max=9), seen(), memory)[0].target == 9
    assert decide(Rules(max=3), None, memory)[0].target == 3


# ---- missing numbers and clocks ------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, seen(0, missing=("queued",)), seen(0, missing=("in_flight", "duty"))])
def test_missing_numbers_hold_what_there_is(nothing: Signals | None) -> None:
    decision, memory = decide(RULES, nothing, before := Memory(wanted=4, empty_since=-1e6))
    assert (decision.target, memory) == (4, before)
    assert decision.reason.startswith("holds 4")


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_jump_of_the_clock_or_a_long_silence_neither_ends_nor_prolongs_a_wait(jump: float) -> None:
    pool = Pool(memory=Memory(wanted=2, changed_at=-1000.0))
    pool.see(200)
    pool.at += jump
    assert pool.see(90) == 2
    assert pool.see(20) == 0


def test_a_silence_within_the_limit_counts() -> None:
    for silence, wanted in ((15.0, 0), (15.1, 2)):
        pool = Pool(memory=Memory(wanted=2, changed_at=-1000.0))
        pool.see(285)
        pool.at += silence
        assert pool.see(0) == wanted


@pytest.mark.parametrize("odd", [5e-324, 1e-300, 1e300, 1e308])
@pytest.mark.parametrize("queued", [1, 10**12, 10**18])
def test_huge_and_tiny_figures_ask_for_no_more_than_the_most(odd: float, queued: int) -> None:
    for name in ("knee", "tokens_per_s", "tokens_per_task", "ttft_p95", "duty"):
        decision, _ = decide(RULES, seen(0, replace(PROFILE, **{name: odd}), default=queued), Memory(wanted=64))
        assert 64 <= decision.target <= 100


# ---- the words -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, "0: nothing is queued or in flight"),
        ({"batch": (1, 600.0)}, "0: 1 queued of flex or batch: worth no start yet, and counted in 1200 s"),
        ({"batch": (1, 1800.0)}, "out from 0 to 1: 1 flex or batch tasks have waited for long, or are worth a start"),
        ({"in_flight": 2, "patient": 2, "ready": 1}, "0: 2 in flight of flex or batch"),
        ({"missing": ("queued", "card")}, "holds 0: the model is not published, and no worker serves it"),
    ],
)
def test_the_reason_says_what_an_idle_pool_waits_for(said: dict[str, Any], words: str) -> None:
    assert decide(RULES, seen(**said), Memory())[0].reason.startswith(words)


def test_the_reason_says_when_the_number_falls() -> None:
    pool = Pool(replace(RULES, cool_down=60.0))
    pool.see(100, default=20)
    assert pool.last.target == 3
    pool.see(10, in_flight=1, ready=3)
    assert pool.last.reason == "holds 3: 1 would be enough; the number falls in 50 s if that lasts"
    pool.see(50, in_flight=1, ready=3)
    assert pool.last.reason == "in from 3 to 2: 1 were enough for 60 s"
    pool.see(300, in_flight=1, ready=1)
    pool.see(5)
    assert pool.last.reason == "holds 1: nothing is queued or in flight; the last worker ends in 55 s if that lasts"
    pool.see(55)
    assert pool.last.reason == "in from 1 to 0: nothing was queued or in flight for 60 s"
