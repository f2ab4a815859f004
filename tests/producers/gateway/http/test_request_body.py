"""Bodies whose JSON would hold the interpreter are refused by their parts, or read in turns."""

from __future__ import annotations

import gzip
import json
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.contract import fields, json_parts
from producers.contract.fields import MAX_PROMPT_TOKENS, read_json
from producers.contract.json_parts import MAX_PARTS, count_parts, count_values
from producers.contract.task import Task
from producers.gateway import app
from producers.gateway.http import request_body as body
from producers.gateway.http.request_body import MAX_VALUES
from producers.gateway.openai.completions import Completion
from tests.histories import examples
from tests.producers.gateway.conftest import Open, until
from tests.waiting import PATIENCE_S

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}",\\ax') | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='{["\\b'), inner),
    max_leaves=30,
)


def parts(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts, value.values()))
    return 1 + sum(map(parts, value)) if isinstance(value, list) else int(isinstance(value, str))


def values(value: Any) -> int:
    """One, and all but the first of each list and object."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + max(0, len(inner) - 1) + sum(values(one) - 1 for one in inner)


@settings(max_examples=examples(30, 100))
@given(VALUES, st.sampled_from([1, 3, 1 << 18]))
def test_lists_objects_and_strings_are_counted_outside_of_strings(value: Any, size: int) -> None:
    text = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_parts, "SLICE", size)
        assert count_parts(text, -1) == parts(value)
        assert count_values(text, 0) == values(value)
    assert count_parts(text, len(text)) >= parts(value)
    assert count_values(text, len(text) + 1) >= values(value)


@pytest.mark.parametrize(
    ("part", "most"),
    [
        (b"[],", MAX_PARTS),
        (b'{"a":1},', MAX_PARTS),
        (b'"a",', MAX_PARTS),
        (b'{"role":"user","content":"x"},', MAX_PARTS),
        (b"7,", MAX_VALUES),
    ],
    ids=["lists", "objects", "texts", "chat", "numbers"],
)
def test_a_body_of_too_many_parts_is_refused_without_being_parsed(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, model: str, part: bytes, most: int
) -> None:
    parsed: list[int] = []
    loads = json.loads
    monkeypatch.setattr(fields.json, "loads", lambda text, **more: parsed.append(len(text)) or loads(text, **more))
    large = b'{"model": "tiny", "messages": [' + part * (most + 1) + b"1]}"
    for path in ("chat/completions", "completions", "responses", "tasks"):
        answer = http.post(f"/v1/{path}", content=large, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_parts"), answer.text
    assert max(parsed, default=0) < len(large) // 2


@pytest.mark.parametrize("prompt", ['[{"' * 50_000, "," * 1_000_000, [7] * MAX_PROMPT_TOKENS])
def test_signs_in_a_text_are_text_and_a_prompt_is_as_long_as_any_may_be(
    http: httpx.Client, model: str, monkeypatch: pytest.MonkeyPatch, prompt: str | list[int]
) -> None:
    monkeypatch.setattr(body, "MAX_VALUES", MAX_VALUES if isinstance(prompt, list) else MAX_PARTS)
    answer = http.post("/v1/tasks", json={"model": model, "prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("members", "more", "code"),
    [
        (1, b"", ""),
        (body.MEMBERS, b"", ""),
        (1, b"\0" * 512, ""),  # padding
        (body.MEMBERS + 1, b"", "invalid_gzip"),  # thousands of empty ones took seconds
        (1, gzip.compress(b"", mtime=0)[:-1], "invalid_gzip"),
        (0, b"", "invalid_gzip"),
        (1, b"x", "invalid_gzip"),
    ],
)
def test_a_gzip_of_some_members_is_taken(http: httpx.Client, model: str, members: int, more: bytes, code: str) -> None:
    text = json.dumps({"model": model, "prompt": "x" * members}).encode()
    cuts = [text[at : at + 1] for at in range(members - 1)]
    packed = b"".join(map(gzip.compress, [*cuts, text[members - 1 :]][:members])) + more
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = http.post("/v1/tasks", content=packed, headers=headers)
    assert (answer.status_code, answer.json().get("error", {}).get("code", "")) == (400 if code else 202, code)


@pytest.mark.parametrize("path", ["batches", "webhook_endpoints", "webhook_endpoints/x/test"])
def test_a_body_that_makes_no_task_is_small(http: httpx.Client, path: str) -> None:
    """No limit of a minute's requests holds for it."""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    large = gzip.compress(json.dumps({"name": "x" * body.SETTINGS}).encode())
    answer = http.post(f"/v1/{path}", content=large, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(("tokens", "thread"), [(1, False), (body.INLINE, True)])
def test_tokens_of_a_large_body_are_checked_on_a_thread(
    http: httpx.Client, model: str, monkeypatch: pytest.MonkeyPatch, tokens: int, thread: bool
) -> None:
    """Thousands of them in many prompts take a quarter of a second."""
    names, tasks = list[str](), Completion.tasks

    def noted(wanted: Completion) -> list[Task]:
        names.append(threading.current_thread().name)
        return tasks(wanted)

    monkeypatch.setattr(Completion, "tasks", noted)
    answer = http.post("/v1/completions", json={"model": model, "prompt": [[7] * tokens, [7] * 2000]})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert [name == "penstock-body" for name in names] == [thread]


@pytest.mark.parametrize("path", ["/v1/tasks", "/v1/chat/completions"])
@pytest.mark.parametrize(("properties", "thread"), [(1, False), (100, True)])
def test_a_form_of_more_than_a_few_properties_is_read_on_a_thread(
    http: httpx.Client, model: str, monkeypatch: pytest.MonkeyPatch, path: str, properties: int, thread: bool
) -> None:
    """Its references and alternatives may say much in few characters."""
    names, formed = list[str](), Task.formed

    def noted(task: Task) -> Task:
        names.append(threading.current_thread().name)
        return formed(task)

    monkeypatch.setattr(Task, "formed", noted)
    schema = {"type": "object", "properties": {f"property{at}": {"type": "number"} for at in range(properties)}}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    asked: dict[str, Any] = {"prompt": "x", "json_schema": schema}
    if path != "/v1/tasks":
        asked = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
    answer = http.post(path, json={"model": model, "max_tokens": 100_000, **asked})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert (names[0] == "penstock-body") is thread


def test_large_bodies_that_do_not_end_are_bounded(open_door: Open, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has many connections may send slowly on all. What came goes with its connection."""
    monkeypatch.setattr(app, "BODY_BYTES", (1 << 20, 300_000))
    door = open_door()
    room = door.app.state.gateway.body_room
    head = b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as first:
        first.sendall(head + b" " * 200_000)
        assert until(lambda: room._reserved.total() == 200_000)
        with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as second:
            second.sendall(head + b" " * 200_000)
            answer = b""
            while not answer.endswith(b"}") and (part := second.recv(1 << 16)):  # head and body may come apart
                answer += part
            assert answer.startswith(b"HTTP/1.1 429")
            assert b"connection: close" in answer.lower()
            assert b"body_busy" in answer
        small = httpx.post(f"{door.url}/v1/tasks", json={"model": model, "prompt": "x"}, timeout=PATIENCE_S)
        assert small.status_code == 202
    assert until(lambda: room._reserved.total() == 0)
    large = json.dumps({"model": model, "prompt": "x"}).encode().ljust(200_000)
    answers = [
        httpx.post(
            f"{door.url}/v1/tasks", content=large, headers={"content-type": "application/json"}, timeout=PATIENCE_S
        )
        for _ in range(3)
    ]
    assert [one.status_code for one in answers] == [202] * 3
    assert room._reserved.total() == 0


@pytest.fixture
def others_turns() -> Iterator[list[int]]:
    """Counts the turns that another thread has. The interpreter changes threads wherever it may."""
    turns, over, before = [0], threading.Event(), sys.getswitchinterval()

    def count() -> None:
        while not over.is_set():
            turns[0] += 1

    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=count)
    thread.start()
    yield turns
    over.set()
    thread.join()
    sys.setswitchinterval(before)


@pytest.mark.parametrize("number", [b"7,", b"0.5,"])
def test_others_have_turns_while_many_numbers_are_read(others_turns: list[int], number: bytes) -> None:
    text = b"[" + number * 300_000 + b"1]"
    before = others_turns[0]
    assert len(read_json(text)) == 300_001
    assert others_turns[0] - before > 1000
