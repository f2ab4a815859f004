"""A record that something else damaged: what cannot be told is left out, or the answer names the field."""

from __future__ import annotations

import json
from contextlib import suppress

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis import Redis
from starlette.responses import JSONResponse

from producers.admin.explain import explanation
from producers.admin.fleet import Pool
from producers.admin.observation import Observation
from producers.contract import keys
from producers.contract.profile import Profile
from producers.contract.record import Record
from producers.errors import BrokenRecord
from producers.gateway.tasks.explain import ExplanationView
from producers.gateway.tasks.views import TaskView
from tests.fuzz.messages import FIELD_BYTES, FIELDS
from tests.producers.gateway.conftest import Submit

GOOD = {
    "status": b"in_progress",
    "task": b'{"model": "m", "prompt": "x"}',
    "created": b"1790000000000",
    "claims": b"2",
    "began": b"1790000000100",
    "lost": b'[{"owner": "w", "at": 1790000000050, "entries": 1, "start": 1}]',
    "run:2": b'["w", 1790000000100, 1790000000200, null, 3, 1, [[1790000000300, "kv_room"]]]',
}
ODD = (
    *(b"[[]]", b"[1]", b'[{"owner": 1, "at": "x"}]', b'{"a": 1e999}', b'{"message": "\\ud800"}', b"[NaN]", b"[" * 5000),
    *(b'["w", 1, 2, 3, 4, 5, [[6]]]', b'["w", 1e300, 2, 3, 4, 5, []]', b'[{"owner": "w", "at": 1e999, "entries": 1}]'),
)
NAMES = ("run:2", "run:x", *FIELDS)


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from((*FIELD_BYTES, *ODD, *GOOD.values())) | st.none()))
@example({"status": None})
@example({"created": None})
@example({"error": b'{"message": "\\ud800"}', "status": b"failed"})
def test_a_record_is_answered_or_its_field_is_named(damage: dict[str, bytes | None]) -> None:
    fields = {name.encode(): value for name, value in (GOOD | damage).items() if value is not None}
    measured = Profile(knee=4, tokens_per_s=1000, tokens_per_task=100)
    for view in (
        lambda record: TaskView.of(record),
        lambda record: ExplanationView.of(
            explanation(Observation(record, 1790000001000.0, Pool("m@1", "m"), profile=measured))
        ),
    ):
        with suppress(BrokenRecord):
            JSONResponse(view(Record.parse("t", fields)).model_dump())


@pytest.mark.parametrize(
    ("field", "value", "explained"),
    [
        ("status", b"weird", 500),
        ("created", None, 200),
        ("created", b"x", 500),
        ("n", b"1e3", 200),
        ("usage", b"{oops", 200),
        ("lost", b"{oops", 500),
        ("claims", b"\xff", 500),
    ],
)
def test_the_answer_names_the_field(
    submit: Submit, http: httpx.Client, valkey: Redis, field: str, value: bytes | None, explained: int
) -> None:
    task_id = submit()
    if value is None:
        valkey.hdel(keys.task(task_id), field)
    else:
        valkey.hset(keys.task(task_id), field, value)
    seen = {path: http.get(f"/v1/tasks/{task_id}{path}") for path in ("", "/explain")}
    assert seen["/explain"].status_code == explained
    for answer in seen.values():
        if answer.status_code != 200:
            error = json.loads(answer.text)["error"]
            assert (answer.status_code, error["code"], error["type"]) == (500, "broken_record", "server_error")
            assert error["param"] == field
            assert "Traceback" not in answer.text
    assert http.get("/v1/tasks").status_code == 200
