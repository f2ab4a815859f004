"""Which tasks are compared with which, and what comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from producers.rollouts import refusals
from producers.rollouts.metrics import BUFFERED, DRAWN, MATCHES, Evidence, Matcher, defaults, findings, usual
from producers.rollouts.operations import RolloutError, checked
from producers.store.fleet.canaries import ALIAS, Canary, Plan
from producers.store.shadows import Pair, Score

STATE = replace(
    Canary("m", "r", "b", "a", checked(Plan(steps=(10.0,), warm_up_s=0.0, block_s=0.0)), 1, "me")
    .decided("judging", "", 0)
    .acted(1000)
)


def row(arm: str, **more: Any) -> dict[str, str]:
    alias, version = {"candidate": (ALIAS, "b"), "baseline": ("default", "a")}[arm]
    fields: dict[str, Any] = {
        "model": "m",
        "alias": alias,
        "version": version,
        "status": "completed",
        "tier": "default",
        "drawn": 1,
    }
    fields |= {
        "prompt": 10,
        "cached": 0,
        "output": 20,
        "longest": 20,
        "deaths": 0,
        "discarded": 0,
        "reasons": '["stop"]',
        "refused": 0,
        "form": "regex",
    }
    fields |= {"created": 2000, "started": 2001, "first": 2100, "ended": 4000}
    return {name: str(value) for name, value in (fields | more).items()}


def compared(*rows: dict[str, str], state: Canary = STATE) -> dict[str, Counter[int]]:
    evidence = Evidence.of("", state)
    Matcher(state).enter(rows, evidence, 0)
    return evidence.steps[0]


def test_a_candidates_task_takes_the_last_ones_of_the_baseline_and_each_once() -> None:
    failed = row("candidate", status="failed", first="")
    before = [row("baseline", status="failed")] * 3 + [row("baseline")] * MATCHES
    differences = compared(*before, failed, failed)
    assert differences["failed"] == {16: 1, 0: 1}, "the second finds two of the failed ones alone: a power of two"
    assert "first_token" not in differences, "what failed had no first token"


def test_a_candidates_task_waits_for_one_like_it() -> None:
    differences = compared(row("candidate", prompt=5000), row("baseline"), row("baseline", tier="flex"))
    assert differences == {}
    differences = compared(row("candidate", prompt=5000), row("baseline", prompt=9000, cached=4000))
    assert differences["failed"] == {0: 1}


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("failed", {"status": "failed"}, 16),
        ("failed", {"deaths": 1}, 16),
        ("abandoned", {"status": "cancelled"}, 16),
        ("empty", {"output": 0, "longest": 0}, 16),
        ("cut_off", {"reasons": '["length"]'}, 16),
        ("refused", {"refused": 1}, 16),
        ("invalid", {"reasons": '["length"]'}, 16),
        ("first_token", {"first": 2106}, 16),
        ("first_token", {"first": 2104}, -16),
        ("per_token", {"ended": 4200}, 16),
        ("end_to_end", {"ended": 4200}, 16),
        ("end_to_end", {"ended": 4099}, -16),
        ("longer", {"longest": 31}, 16),
        ("shorter", {"longest": 13}, 16),
        ("shorter", {"longest": 14}, -16),
    ],
)
def test_what_is_worse(name: str, more: dict[str, Any], expected: int) -> None:
    assert compared(row("baseline"), row("candidate", **more))[name] == {expected: 1}


def test_a_slow_tail_is_that_of_tasks_that_are_in_no_comparison_any_more() -> None:
    usual = [row("baseline")] * (BUFFERED + 50)
    assert compared(*usual, row("candidate", ended=9000))["end_to_end_p95"] == {16: 1}
    assert "end_to_end_p95" not in compared(*usual[:60], row("candidate", ended=9000))


def test_scores_are_compared_among_themselves_and_count_no_task() -> None:
    def score(arm: str, value: str) -> dict[str, str]:
        alias, version = {"candidate": (ALIAS, "b"), "baseline": ("default", "a")}[arm]
        return {"model": "m", "alias": alias, "version": version, "created": "2000", "drawn": "1", "score": value}

    rows = [score("baseline", "1"), row("baseline"), score("candidate", "0.5"), score("candidate", "1")]
    evidence = Evidence.of("", STATE)
    Matcher(STATE).enter([*rows, score("baseline", "0.2")], evidence, 0)
    assert evidence.steps[0] == {"feedback": {16: 1, -16: 1}}
    assert (evidence.candidate.tasks, evidence.baseline.tasks) == (0, 1)
    assert (evidence.candidate.mean("feedback"), evidence.baseline.mean("feedback")) == (75, 60)


def test_outputs_that_are_less_likely_under_the_candidate_and_copies_that_differ() -> None:
    pair = Pair("t", "a", "b", ("completed",) * 2, (9, 9), 0.75, (("stop",),) * 2, (1, 1), (None, None))
    metrics = defaults() | {"diverged": usual("diverged")}
    state = replace(STATE, plan=replace(STATE.plan, metrics=metrics))
    scores = [Score("t", "a", "b", 5, (-1.0, after)) for after in (-1.0, -1.5, -9.0, -0.5)]
    evidence = Evidence.of("", state)
    rows: list[Pair | Score] = [pair, replace(pair, refused=(False, True)), *scores]
    rows += [replace(scores[0], shadow="c"), replace(pair, version="c")]
    Matcher(state).enter_pairs(rows, evidence, 0)
    assert evidence.steps[0]["likelihood"] == {0: 1, 3: 1, 15: 1, -4: 1}, "by a ratio of 1, 0.6, 0.0003 and 1.6"
    assert evidence.steps[0]["shadow"] == {0: 1, 16: 1}, "a refusal is bad"
    assert evidence.steps[0]["diverged"] == {4: 2}
    assert evidence.compared(0, copies=False) == 0
    assert Score.parse(scores[0].to_json()) == scores[0]
    assert (Pair.parse(scores[0].to_json()), Score.parse(pair.to_json())) == (None, None)


def test_what_callers_chose_themselves_or_sent_before_is_not_compared() -> None:
    others = [row("baseline", alias="candidate"), row("baseline", alias=""), row("baseline", created=999)]
    others += [row("baseline", model="other"), row("baseline", version="c"), row("baseline", drawn="")]
    assert compared(*others, row("candidate")) == {}
    assert compared(row("baseline"), row("candidate", drawn="")) == {}, "it named the rollout's own alias"


def test_of_tasks_that_share_a_key_the_first_alone_is_compared() -> None:
    """Such as the lines of a batch, or a caller's: one draw decided where all of them go."""
    baseline, drawn = [row("baseline")] * 60, row("candidate", status="failed", drawn="0abcdef1")
    assert compared(*baseline, drawn, drawn, {**drawn, "drawn": "00000002"})["failed"] == {16: 2}
    keyed = [row("baseline", status="failed", drawn="0abcdef2")] * 9
    assert compared(*keyed, row("baseline"), row("candidate"))["failed"] == {-8: 1}, "two of the baseline"
    evidence = Evidence.of("", STATE)
    Matcher(STATE).enter([*baseline, drawn], evidence, 0)
    evidence = Evidence.of(evidence.to_json(), STATE)
    Matcher(STATE).enter([*baseline, drawn], evidence, 0)
    assert evidence.steps[0]["failed"] == {16: 1}, "whoever goes on with it"


def test_no_more_keys_are_remembered_than_is_bounded() -> None:
    evidence = Evidence.of("", STATE)
    Matcher(STATE).enter((row("baseline", drawn=f"{k:08x}") for k in range(DRAWN + 5)), evidence, 0)
    assert len(evidence.drawn) == DRAWN


def test_a_tenants_part_of_the_comparisons_is_bounded_where_that_is_set() -> None:
    """Also across controllers, and of both arms: else one caller could decide a rollout by many keys."""
    state = replace(STATE, plan=replace(STATE.plan, per_tenant=3))
    others = [row("baseline", tenant=f"t{k}") for k in range(MATCHES)]
    hostile = [row("candidate", status="failed", tenant="h", drawn=f"{k:08x}") for k in range(10)]
    flood = [entry for task in hostile for entry in (*others, task)]
    assert compared(*flood)["failed"] == {16: 10}
    assert compared(*flood[: 6 * (MATCHES + 1)], row("candidate", tenant="x"), state=state)["failed"] == {16: 3, 0: 1}
    better = [row("baseline", status="failed", tenant="h")] * 90
    candidates = [row("candidate", tenant=f"t{k}") for k in range(9)]
    assert compared(*better, *candidates, state=state)["failed"] == {-16: 3}
    busy = [row("baseline", tenant=f"t{k % 3}") for k in range(300)]
    flood_of_baseline = [entry for k in range(20) for entry in (*busy, row("candidate", tenant=f"t{k % 3}"))]
    assert compared(*flood_of_baseline, state=state)["failed"] == {0: 9}, "what is in no comparison does not count"
    evidence = Evidence.of("", state)
    for half in (flood[: len(flood) // 2], flood[len(flood) // 2 :]):
        Matcher(state).enter(half, evidence, 0)
        evidence = Evidence.of(evidence.to_json(), state)
    assert (evidence.steps[0]["failed"], evidence.candidate.tasks) == ({16: 3}, 10), "figures count all of them"


def test_a_broken_candidates_metrics_have_more_of_the_error_and_all_together_alpha() -> None:
    limits = {finding.settings.metric.name: finding.limit for finding in findings(STATE, Evidence.of("", STATE))}
    assert sum(1 / limit for limit in limits.values()) == pytest.approx(STATE.plan.alpha)
    assert limits["per_token"] == pytest.approx(4 * limits["failed"])


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ("I’m sorry, but I can’t help with that.", True),
        ("**I cannot\n assist** with this", True),
        ("Here is the recipe: take some flour.", False),
        ("x" * 200 + " I can't help with that", False),
    ],
)
def test_a_refusal_is_told_by_its_first_words(answer: str, refused: bool) -> None:
    assert refusals.refuses(answer) == refused
    assert refusals.refuses("Nope. Ask another.", refusals.checked([" NOPE.  ask "]))


@pytest.mark.parametrize(("phrases", "message"), [(map(str, range(201)), "201 phrases"), (["x" * 101], "101 char")])
def test_phrases_are_bounded(phrases: Iterable[str], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        checked(Plan(refusals=tuple(phrases)))


def test_times_of_a_cold_start_are_not_compared_and_its_failures_are() -> None:
    state = replace(STATE, plan=replace(STATE.plan, warm_up_s=5.0))
    differences = compared(row("baseline"), row("candidate", status="failed"), state=state)
    assert (differences["failed"], "end_to_end" in differences) == ({16: 1}, False)


def test_times_within_a_block_are_one_comparison_and_failures_are_each_one() -> None:
    """A worker that stands still for a moment is slow to all of its tasks."""
    state = replace(STATE, plan=replace(STATE.plan, block_s=10.0))
    evidence, matcher = Evidence.of("", state), Matcher(state)
    for ended, waited in (*[(20_000, 5000)] * 9, (29_999, 1000), (30_000, 5000), (55_000, 5000)):
        times = {"created": ended - 9000, "first": ended - 8000, "ended": ended}
        slow = row("candidate", **{**times, "first": ended - 9000 + waited})
        matcher.enter([row("baseline", **times), slow], evidence, 0)
    assert evidence.steps[0]["failed"] == {0: 12}
    assert evidence.steps[0]["first_token"] == {12: 1, 16: 1}, "nine of ten, rounded down; the last has only begun"


def test_evidence_is_the_same_after_it_was_stored_and_of_no_other_rollout() -> None:
    evidence = Evidence.of("", STATE)
    assert evidence.cursor == "999-0"
    Matcher(STATE).enter([row("baseline"), row("candidate", status="failed")], evidence, 0)
    stored = Evidence.of(evidence.to_json(), STATE)
    assert (stored.steps, stored.candidate, stored.baseline) == (evidence.steps, evidence.candidate, evidence.baseline)
    assert Evidence.of(evidence.to_json(), replace(STATE, id="other")).steps == []
    for broken in ('{"rollout": "r"}', '{"rollout": "r", "steps": [1], "cursor": "1"}', "[", evidence.to_json()[:-9]):
        assert Evidence.of(broken, STATE) == Evidence.of("", STATE), "it is begun anew"


def test_a_candidate_that_fails_always_is_found_within_20_tasks_and_an_equal_one_never() -> None:
    evidence, matcher = Evidence.of("", STATE), Matcher(STATE)
    for _ in range(17):
        matcher.enter([*[row("baseline")] * MATCHES, row("candidate", status="failed", reasons="")], evidence, 0)
    (worse,) = [finding for finding in findings(STATE, evidence) if finding.worse]
    assert worse.text().startswith("failed: tasks that failed, or whose worker died: +100.0 points")
    evidence, matcher = Evidence.of("", STATE), Matcher(STATE)
    for _ in range(500):
        matcher.enter([row("baseline"), row("candidate")], evidence, 0)
    assert len(findings(STATE, evidence)) == len(defaults())
    assert not any(finding.suspect for finding in findings(STATE, evidence))
