"""Texts are planned by tier and tenant within a step's budget, and what fails ends its own request alone."""

from __future__ import annotations

import pytest

from engine.errors import NOT_FINITE, RequestError, TextError
from engine.plan import Sampled, StepPlan
from engine.pooling.scheduler import PoolingScheduler, TextLimits
from engine.request import Event, Pooling, Request


def scheduler(step_tokens: int = 10, texts: int = 4, window_s: float = 0.0) -> PoolingScheduler:
    limits = TextLimits(frozenset({"embed"}), max_length=50, vocab_size=100, dimensions=8)
    return PoolingScheduler(limits, step_tokens=step_tokens, max_num_seqs=texts, ageing_s=30.0, window_s=window_s)


def request(name: str, *lengths: int, tier: int = 1, tenant: str = "", arrival: float = 0.0) -> Request:
    pooling = Pooling("embed", lengths)
    return Request(name, [7] * sum(lengths), pooling=pooling, tier=tier, tenant=tenant, arrival=arrival)


def planned(plan: StepPlan | None) -> list[tuple[str, int]]:
    return [] if plan is None else [(row.seq.request.id, row.count) for row in plan.rows]


def enter(texts: PoolingScheduler, plan: StepPlan, *errors: int) -> list[Event]:
    results = [
        Sampled(-1, error=NOT_FINITE) if i in errors else Sampled(-1, row=[float(row.seq.choice)])
        for i, row in enumerate(plan.rows)
    ]
    return texts.update(plan, results, 1.0)


def test_a_step_takes_the_best_tier_first_and_as_many_texts_as_fit() -> None:
    texts = scheduler()
    for each in (request("low", 4, tier=3), request("first", 3, 4), request("best", 5, tier=0)):
        texts.add(each)
    plan = texts.schedule(1.0)
    assert planned(plan) == [("best", 5), ("first", 3)]  # the next has 4, and 2 are left
    assert plan is not None
    assert [event.request_id for event in enter(texts, plan)] == ["best"]
    plan = texts.schedule(1.0)
    assert planned(plan) == [("first", 4), ("low", 4)]
    assert plan is not None
    ends = enter(texts, plan)
    assert [(event.request_id, event.rows) for event in ends] == [("first", [[0.0], [1.0]]), ("low", [[0.0]])]
    assert not texts.has_work
    assert texts.schedule(1.0) is None
    texts.check_idle()


def test_a_text_longer_than_a_step_runs_alone_and_steps_have_so_many_texts() -> None:
    texts = scheduler()
    texts.add(request("long", 30))
    texts.add(request("short", *[1] * 6))
    steps = []
    while (plan := texts.schedule(1.0)) is not None:
        steps.append(planned(plan))
        enter(texts, plan)
    assert steps == [[("long", 30)], [("short", 1)] * 4, [("short", 1)] * 2]


def test_a_request_says_how_many_tokens_of_its_texts_are_done() -> None:
    texts, several = scheduler(), request("several", 4, 5, 6)
    texts.add(several)
    done = []
    while (plan := texts.schedule(1.0)) is not None:
        enter(texts, plan)
        done.append(several.course.computed)
    assert done == [9, 15]


def test_tenants_take_turns() -> None:
    texts = scheduler(step_tokens=4)
    texts.add(request("a", *[4] * 3, tenant="a"))
    texts.add(request("b", 4, tenant="b"))
    order = []
    while (plan := texts.schedule(1.0)) is not None:
        order += planned(plan)
        enter(texts, plan)
    assert [name for name, _ in order] == ["a", "b", "a", "a"]


def test_a_step_waits_for_more_texts_within_the_window_of_the_first_and_never_for_one_that_found_it_idle() -> None:
    texts = scheduler(window_s=0.02)
    assert texts.batching_wait(0.0) == 0.0
    texts.add(request("alone", 2))
    assert texts.batching_wait(0.0) == 0.0, "nothing ran"
    plan = texts.schedule(0.0)
    assert plan is not None
    texts.add(request("second", 2, arrival=0.001))
    texts.add(request("third", 2, arrival=0.005))
    enter(texts, plan)
    assert texts.batching_wait(0.011) == pytest.approx(0.01)
    assert texts.batching_wait(0.021) == 0.0
    texts.add(request("fills", 6, arrival=0.006))
    assert texts.batching_wait(0.011) == 0.0, "more would not fit"
    while (plan := texts.schedule(0.03)) is not None:
        enter(texts, plan)
    texts.add(request("alone again", 2, arrival=0.04))
    assert texts.batching_wait(0.04) == 0.0


def test_without_a_window_no_step_waits() -> None:
    texts = scheduler()
    texts.add(request("a", 2, 9))
    plan = texts.schedule(0.0)
    assert plan is not None
    enter(texts, plan)
    assert texts.batching_wait(0.0) == 0.0


def test_what_fails_or_is_aborted_leaves_the_others_whole() -> None:
    texts = scheduler()
    for name in ("bad", "gone", "good"):
        texts.add(request(name, 2, 1))
    plan = texts.schedule(1.0)
    assert planned(plan) == [("bad", 2), ("bad", 1), ("gone", 2), ("gone", 1)]
    assert plan is not None
    assert texts.abort("gone")
    (end,) = enter(texts, plan, 0)
    assert (end.request_id, end.error, end.finish_reason, end.done) == ("bad", NOT_FINITE, "error", True)
    assert not texts.abort("gone")
    plan = texts.schedule(1.0)
    assert plan is not None
    assert [event.request_id for event in enter(texts, plan)] == ["good"]
    stats = texts.stats()
    assert (stats.aborted, stats.not_finite, stats.waiting, stats.prompt_tokens) == (1, 1, 0, 9)
    texts.check_idle()


def test_a_step_without_memory_is_planned_again_half_as_large() -> None:
    texts = scheduler()
    texts.add(request("a", 4, 4))
    assert planned(texts.schedule(1.0)) == [("a", 4), ("a", 4)]
    assert texts.shrink(1.0, tried=False)
    assert texts.step_tokens == 4
    assert planned(texts.schedule(1.0)) == [("a", 4)]
    assert texts.shrink(1.0, tried=False)  # once more, before it is to blame
    assert planned(texts.schedule(1.0)) == [("a", 4)]
    assert not texts.shrink(1.0, tried=True)


def test_texts_with_errors_are_not_computed_and_keep_their_numbers() -> None:
    texts, bad = scheduler(), TextError("empty_prompt", "the text is empty")
    mixed = Request("a", [1, 2, 3], pooling=Pooling("embed", (1, 0, 2), errors={1: bad}))
    texts.check(mixed)
    assert texts.add(mixed) == []
    plan = texts.schedule(1.0)
    assert plan is not None
    (event,) = enter(texts, plan)
    assert event.rows is not None
    assert (len(plan.rows), len(event.rows), event.rows[1]) == (2, 3, bad)
    none = Request("b", [], pooling=Pooling("embed", (0,), errors={0: bad}))
    texts.check(none)
    (event,) = texts.add(none)
    assert (event.rows, event.done, texts.has_work) == ([bad], True, False)


def test_halved_steps_grow_again_once_some_went_well() -> None:
    """And wait for twice as long if they are too large again."""
    texts = scheduler()
    usual, waits = texts.step_tokens, []
    for number in range(2):
        texts.add(request(f"wide {number}", 4, 4))
        texts.schedule(1.0)
        assert texts.shrink(1.0, tried=False)
        steps = 0
        while texts.step_tokens < usual:
            if not texts.has_work:
                texts.add(request(f"{number} {steps}", 1))
            plan = texts.schedule(1.0)
            assert plan is not None
            enter(texts, plan)
            steps += 1
        waits.append(steps)
    assert waits[1] == 2 * waits[0] > 100


@pytest.mark.parametrize(
    ("pooling", "ids", "message"),
    [
        (None, [1], "the model cannot generate; it can embed"),
        (Pooling("rerank", (1,)), [1], "the model cannot rerank; it can embed"),
        (Pooling("embed", ()), [], "the texts' lengths must be above 0"),
        (Pooling("embed", (1, 0)), [1], "the texts' lengths must be above 0"),
        (Pooling("embed", (1, 1), errors={1: TextError("a", "b")}), [1, 1], "the texts' lengths must be above 0"),
        (Pooling("embed", (51,)), [1] * 51, "a text has 51 tokens; the model takes 50"),
        (Pooling("embed", (2,)), [1, 100], "token id 100; ids are from 0 to 99"),
        (Pooling("embed", (1,), dimensions=9), [1], "dimensions=9 must be from 1 to 8"),
    ],
)
def test_what_could_never_run_is_refused_by_name(pooling: Pooling | None, ids: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        scheduler().check(Request("a", ids, pooling=pooling))
