"""A task's spans are made of whatever its record has, and lie within each other in time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from producers.contract.record import Record, Run
from producers.tracing.spans import FIELDS, Span, TaskTrace, task_spans
from tests.producers.contract.test_record import GOOD, TRACE

#: A task that a worker lost after four tokens, another gave back, and a third ended, preempted once.
WHOLE = {
    "status": "completed",
    "model": "tiny",
    "queue": "q",
    "tier": "flex",
    "tenant": "acme",
    "n": "1",
    "traceparent": GOOD,
    "created": "1000",
    "queued": "1010",
    "started": "1100",
    "first": "1150",
    "finished": "2000",
    "settled": "2005",
    "claims": "3",
    "deaths": "1",
    "prompt_tokens": "9",
    "lost": json.dumps([{"owner": "a", "at": 1300, "entries": 4, "start": 1, "began": 1100}]),
    "given_back": json.dumps([{"owner": "b", "at": 1400, "entries": 4, "why": "drained", "start": 2, "began": 1350}]),
    "usage": json.dumps({"prompt_tokens": 9, "cached_tokens": 4, "output_tokens": 20}),
    "reasons": json.dumps(["length"]),
    "error": "null",
}
RUNS = {
    1: Run("a", 1100, 1110, 1200, 0, 0, [], 1, [(1, 1150), (4, 1200)], 7_000),
    3: Run("c", 1500, 1520, 1990, 4, 1, [(1700, "kv_room")], 2, [(1, 1600), (4, 1800), (16, 1990)], 9_000),
}


def spans_of(fields: dict[str, str], runs: dict[int, Run] = RUNS) -> list[Span]:
    noted = {f"run:{start}": run.script_argument(start).partition(" ")[2] for start, run in runs.items()}
    record = Record.parse("t", fields | noted)
    return task_spans(record, TaskTrace.of("t", fields))


def test_a_task_that_three_workers_had() -> None:
    spans = spans_of(WHOLE)
    assert [(span.name, span.start, span.end) for span in spans] == [
        *(("generate tiny", 1000, 2005), ("submit", 1000, 1010), ("queue", 1010, 1100)),
        *(("attempt", 1100, 1300), ("schedule", 1100, 1110), ("prefill", 1110, 1150), ("decode", 1150, 1300)),
        *(("queue", 1300, 1350), ("attempt", 1350, 1400), ("schedule", 1350, 1400)),
        *(("queue", 1400, 1500), ("attempt", 1500, 2000), ("schedule", 1500, 1520), ("prefill", 1520, 1600)),
        *(("decode", 1600, 1990), ("publish", 1990, 2000), ("settle", 2000, 2005)),
    ]
    root, *others = spans
    assert {span.trace_id for span in spans} == {TRACE}
    assert root.parent_id == GOOD.split("-")[2]
    assert len({span.span_id for span in spans}) == len(spans)
    attempts = [span for span in others if span.name == "attempt"]
    assert [link[1:] for span in attempts for link in span.links] == [
        (attempts[0].span_id, "failover"),
        (attempts[1].span_id, "given_back"),
    ]
    last = others[-3]
    assert [(moment.name, moment.at) for moment in last.events] == [
        *(("tokens", 1600), ("preempted", 1700), ("tokens", 1800), ("tokens", 1990)),
    ]
    prefill = others[-4]
    assert (prefill.attributes["penstock.chunks"], prefill.attributes["gen_ai.usage.cache_read.input_tokens"]) == (2, 4)
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]


def test_spans_that_are_made_twice_are_the_same() -> None:
    assert spans_of(WHOLE) == spans_of(WHOLE)
    untraced = {name: value for name, value in WHOLE.items() if name != "traceparent"}
    assert TaskTrace.of("t", untraced) == TaskTrace.of("t", untraced) != TaskTrace.of("u", untraced)


def test_a_failed_task_says_its_code_and_not_its_message() -> None:
    error = json.dumps({"code": "invalid_value", "message": "the prompt says hello", "param": None})
    root, *others = spans_of(WHOLE | {"status": "failed", "error": error})
    assert (root.error, root.attributes["error.type"]) == ("invalid_value", "invalid_value")
    assert "hello" not in str((root, others))


@pytest.mark.parametrize("missing", sorted({*WHOLE} - {"finished"}))
def test_a_field_that_is_missing_or_broken_leaves_the_others(missing: str) -> None:
    for fields in ({name: value for name, value in WHOLE.items() if name != missing}, WHOLE | {missing: "\x00{"}):
        spans = spans_of(fields)
        assert spans[0].name.startswith("generate")
        assert all(span.start <= span.end for span in spans)


def test_without_an_end_there_are_none() -> None:
    assert spans_of({name: value for name, value in WHOLE.items() if name != "finished"}) == []
    assert spans_of(WHOLE | {"finished": "soon"}) == []


def test_time_that_is_lost_between_workers_is_a_failover_or_a_handover() -> None:
    noted = {f"run:{start}": run.script_argument(start).partition(" ")[2] for start, run in RUNS.items()}
    record = Record.parse("t", WHOLE | noted)
    assert record.lost_ms(4, 2100) == {"failover": 1500 - 1200, "handover": 2100 - 1990}
    assert record.lost_ms(3, 1450) == {"failover": 1450 - 1200, "handover": 0}
    assert record.lost_ms(1, 900) == {"failover": 0, "handover": 0}
    assert Record.parse("t", WHOLE | noted | {"lost": "7"}).lost_ms(3, 1450) == {"failover": 0, "handover": 250}
    assert Record.parse("t", WHOLE | noted | {"lost": "{"}).lost_ms(3, 1450) == {"failover": 0, "handover": 250}


def test_neither_prompt_nor_output_is_read() -> None:
    assert not {"task", "metadata", "webhook", "calls", "response"} & {*FIELDS}


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ([], (0, [], 0, 0)),
        ([1500], (0, [], 1500, 0)),
        ([2, [[1, 5]], 1500], (2, [(1, 5)], 1500, 0)),
        ([2, [[1, 5]], 1500, 70, 1500], (2, [(1, 5)], 1500, 70)),
    ],
    ids=["before the engine's time", "0.2", "no meter", "with energy"],
)
def test_starts_as_releases_wrote_them(tail: list[Any], expected: tuple[Any, ...]) -> None:
    raw = ["w", 1, 2, 3, 0, 0, [], *tail]
    run = Run.parse(json.dumps(raw))
    assert (run.chunks, run.marks, run.engine_us, run.energy_uj) == expected
    if len(tail) > 1:
        assert json.loads(run.script_argument(3).removeprefix("3 ")) == raw
