"""What a step's news come to: entries by choice, and how the task ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import NOT_FINITE, TextError
from engine.request import Event
from producers.contract.record import Record
from workers.flow.publisher import MAX_ENTRIES, Batch, Conclusion, part
from workers.state.delivery import Delivery, Incarnation


def taken(uuid: str = "a", n: int = 1) -> Delivery:
    """A delivery that runs from its first token."""
    delivery = Delivery(uuid, f"task-{uuid}", Incarnation("w"))
    delivery.begin(Record(delivery.task_id, {"status": "in_progress"}), [0] * n)
    return delivery


def event(index: int = 0, tokens: int = 1, **how: Any) -> Event:
    said: dict[str, Any] = {
        "request_id": "a",
        "choice": 0,
        "index": index,
        "token_ids": [7] * tokens,
        "texts": [" x"] * tokens,
        "logprobs": None,
        "finish_reason": None,
        "stop_match": None,
        "done": False,
        "error": None,
        "prompt_tokens": 4,
        "cached_tokens": 0,
    }
    return Event(**said | how)


def test_a_task_that_ends_by_itself_is_complete_though_its_deadline_passes() -> None:
    batch, delivery = Batch(), taken()
    batch.conclude(Conclusion(delivery, "incomplete"))
    batch.add(delivery, event(0))
    batch.add(delivery, event(1, finish_reason="length", done=True))
    (append,) = batch.appends.values()
    assert [json.loads(entry)[:3] for entry in append.entries] == [[0, 0, 7], [0, 1, 7]]
    assert batch.ends["a"].status == "completed"
    later = Batch()
    later.conclude(Conclusion(delivery, "incomplete"))
    assert not later.ends


def test_choices_that_best_of_selects_come_all_at_once() -> None:
    batch, delivery = Batch(), taken(n=2)
    delivery.selects = True
    batch.add(delivery, event(choice=1, finish_reason="length"))
    assert not batch.appends
    batch.add(delivery, event(choice=0, finish_reason="length", done=True))
    assert set(batch.appends) == {("a", 1), ("a", 0)}


@pytest.mark.parametrize("status", ["cancelled", "incomplete"])
def test_a_cut_counts_what_was_made_for_choices_that_nobody_will_see(status: str) -> None:
    search, best_of, plain = taken("a"), taken("b"), taken("c")
    search.selects = best_of.selects = True
    search.course.searched = 40
    batch = Batch()
    batch.add(best_of, event(tokens=3))
    for delivery in (search, best_of, plain):
        batch.conclude(Conclusion(delivery, status))
    assert {uuid: append.discarded for (uuid, _), append in batch.appends.items()} == {"a": 40, "b": 3}
    assert [search.generated, best_of.generated] == [40, 3]


def test_an_end_in_nan_names_the_adapter_of_its_task() -> None:
    batch, delivery = Batch(), taken()
    fields = {"status": "in_progress", "model": "mine", "adapter": "0123456789ab"}
    delivery.begin(Record(delivery.task_id, fields), [0])
    batch.add(delivery, event(tokens=0, done=True, finish_reason="error", error=NOT_FINITE))
    message = json.loads(batch.doubted["a"].error)["message"]
    assert message.startswith(f"{NOT_FINITE} with the adapter mine (version 0123456789ab)")


@pytest.mark.parametrize(("error", "asked"), [(NOT_FINITE, True), ("broken", False)])
def test_an_end_in_nan_waits_for_the_question_who_is_to_blame(error: str, asked: bool) -> None:
    batch, delivery = Batch(), taken()
    batch.add(delivery, event(tokens=0, error=error, finish_reason="error", done=True))
    assert ("a" in batch.doubted, "a" in batch.ends) == (asked, not asked)


def test_so_does_one_of_which_a_text_is_nan() -> None:
    batch = Batch()
    batch.add(taken(), event(tokens=0, finish_reason="stop", done=True, rows=[[1.0], TextError("x", NOT_FINITE)]))
    assert (batch.doubted["a"].status, [*batch.ends]) == ("completed", [])


def test_what_a_task_says_at_once_stays_in_one_call() -> None:
    batch = Batch()
    for uuid, choices in (("a", 1), ("b", 2), ("c", 1)):
        delivery = taken(uuid, choices)
        for choice in range(choices):
            batch.add(delivery, event(choice=choice, tokens=MAX_ENTRIES // 2))
    now, rest = part(list(batch.appends.values()))
    assert [one.claim_id for one in now] == ["a", "b", "b"]
    assert [one.claim_id for one in rest] == ["c"]


def test_gaps_are_between_publications_of_a_choice() -> None:
    delivery = taken(n=2)
    delivery.record = Record(delivery.task_id, {"status": "in_progress", "tier": "flex"})
    gaps: list[dict[tuple[str, float], int]] = []
    for at, events in (
        (100.0, [event(0), event(0, choice=1)]),
        (100.5, [event(1), event(2), event(1, tokens=3, choice=1)]),  # behind, and with tokens guessed ahead
        (102.5, [event(3)]),
    ):
        batch = Batch(at=at)
        for each in events:
            batch.add(delivery, each)
        gaps.append(dict(batch.gaps))
    assert gaps == [{}, {("flex", 0.5): 2}, {("flex", 2.0): 1}]
    resumed, selects = taken(), taken()
    selects.selects = True
    resumed.begin(Record("a", {"status": "in_progress"}), [7])
    for delivery in (resumed, selects):
        batch = Batch(at=103.0)
        batch.add(delivery, event(7))
        assert not batch.gaps
