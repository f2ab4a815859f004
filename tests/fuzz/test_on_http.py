"""Fuzzed requests at a real gateway, and a judge that would notice."""

from __future__ import annotations

import json

import pytest

from tests.fuzz import on_http
from tests.fuzz.answers import Answer, Malformed, declared, faults, take
from tests.histories import SEED, examples


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_request_is_answered_as_declared() -> None:
    count = examples(60, 150)
    findings = on_http.run(count, 12 + SEED)
    assert findings.faults == []
    assert findings.sent == count
    # Few requests have a wrong method: where others are drawn each time, there may be none.
    assert {200, 400, 404} | ({405} if SEED == 0 else set()) <= findings.statuses.keys()


def whole(status: int, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} Some Words\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def error(**changes: object) -> bytes:
    fields = {"message": "m", "type": "invalid_request_error", "param": None, "code": "invalid_json", **changes}
    return json.dumps({"error": {name: value for name, value in fields.items() if value != "gone"}}).encode()


def theirs(*, type: str, code: str) -> bytes:
    """An error in Anthropic's form."""
    error = {"type": type, "message": "m", "details": {"error_code": code, "param": None}}
    return json.dumps({"type": "error", "error": error, "request_id": "x"}).encode()


def of(data: bytes) -> list[str]:
    answer, rest = take(data)
    assert answer is not None
    assert rest == b""
    return faults(answer)


def test_the_declared_errors_are_those_of_the_page() -> None:
    assert {
        (400, "invalid_json"),
        (404, "task_not_found"),
        (503, "submit_failed"),
        (405, "method_not_allowed"),
    } <= declared()
    assert (400, "submit_failed") not in declared()


@pytest.mark.parametrize(
    ("status", "body", "fine"),
    [
        (400, error(), True),
        (404, error(), False),  # not at this status
        (400, error(code="surprise"), False),
        (400, error(type="server_error"), False),
        (400, error(param=3), False),
        (400, error(message=""), False),
        (400, error(param="gone"), False),
        (400, b"Invalid HTTP request received.", False),
        (400, b'{"detail": "Not Found"}', False),
        (500, error(type="server_error", code="internal"), False),  # declared, and a fault all the same
        (503, error(type="server_error", code="service_unavailable"), False),
        (504, error(type="server_error", code="expired"), True),
        (404, theirs(type="not_found_error", code="task_not_found"), True),
        (404, theirs(type="invalid_request_error", code="task_not_found"), False),
        (404, theirs(type="not_found_error", code="surprise"), False),
        (302, b"{}", False),
        (200, b"{}", True),
        (200, b"{oops", False),
    ],
)
def test_an_error_that_is_not_of_the_form_is_noticed(status: int, body: bytes, fine: bool) -> None:
    assert (of(whole(status, body)) == []) == fine


@pytest.mark.parametrize(
    ("events", "fine"),
    [
        (b': still here\n\ndata: {"x": 1}\n\ndata: [DONE]\n\n', True),
        (b"id: 1\nevent: token\ndata: {}\n\n", True),
        (b"data: {oops\n\n", False),
        (b"surprise: 1\n\n", False),
        (b"data: " + error(code="surprise") + b"\n\n", False),
        (b"data: " + error(type="server_error", code="engine_error") + b"\n\n", False),
        (b"data: " + theirs(type="api_error", code="engine_error") + b"\n\n", False),
        (b"data: " + theirs(type="invalid_request_error", code="cancelled") + b"\n\n", True),
    ],
)
def test_events_that_are_none_are_noticed(events: bytes, fine: bool) -> None:
    assert (of(whole(200, events, "text/event-stream")) == []) == fine


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 20 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nwhere does it end",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n",
    ],
)
def test_what_is_no_http_is_noticed(data: bytes) -> None:
    with pytest.raises(Malformed):
        take(data)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_an_answer_is_taken_when_it_is_whole(cut: int) -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    assert take(data[:cut])[0] is None
    answer, rest = take(data + b"more")
    assert answer == Answer(200, {"transfer-encoding": "chunked"}, b"ab")
    assert rest == b"more"
    with pytest.raises(Malformed):
        take(data[:-3], closed=True)


def test_an_answer_to_head_has_no_body() -> None:
    answer, rest = take(b"HTTP/1.1 405 No\r\ncontent-length: 50\r\n\r\n", head=True)
    assert answer is not None
    assert (answer.status, rest) == (405, b"")
