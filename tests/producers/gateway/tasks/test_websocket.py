"""A task's events on a WebSocket, read by the `websockets` client."""

from __future__ import annotations

import json
import os
import socket
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from producers.client.reader import MAX_POSITION
from producers.gateway.http.websocket import FRAMES
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Door, Open, Submit, until
from tests.waiting import PATIENCE_S


def opened(door: Door, path: str, **options: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{door.port}{path}", open_timeout=PATIENCE_S, proxy=None, **options)


def read(ws: ClientConnection) -> tuple[list[dict[str, Any]], int]:
    """All messages until the close, and its code."""
    messages = []
    while True:
        try:
            messages.append(json.loads(ws.recv(60)))
        except ConnectionClosed as closed:
            return messages, closed.rcvd.code if closed.rcvd else 0


def events_of(http: httpx.Client, path: str) -> list[dict[str, Any]]:
    """What server-sent events say."""
    blocks = http.get(path).text.split("\n\n")
    lines = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
    return [{"event": said["event"], "data": json.loads(said["data"])} for said in lines if "event" in said]


@pytest.mark.parametrize("start", [0, 2])
def test_the_messages_are_the_events_of_the_stream(
    door: Door, http: httpx.Client, submit: Submit, worker: FakeWorker, start: int
) -> None:
    task_id = submit()
    path = f"/v1/tasks/{task_id}/events?from={start}"
    with opened(door, path) as ws:
        worker.serve(task_id, ["a", '"\u2028', "c"])
        messages, code = read(ws)
    assert (messages, code) == (events_of(http, path), 1000)
    assert [message["event"] for message in messages] == ["token"] * (3 - start) + ["end"]
    with opened(door, f"/v1/tasks/{task_id}/events?from=4") as ws:
        assert read(ws) == ([], 1000)


def test_a_reader_of_a_gateway_that_stops_goes_on_at_another_one(
    open_door: Open, model: str, submit: Submit, worker: FakeWorker
) -> None:
    task_id, first = submit(), open_door()
    worker.claim(task_id)
    worker.append(task_id, 0, ["a", "b"])
    with opened(first, f"/v1/tasks/{task_id}/events") as ws:
        seen = [json.loads(ws.recv(60)) for _ in range(2)]
        first.drain()
        worker.append(task_id, 2, ["c"])
        seen.append(json.loads(ws.recv(60)))
        first.end_streams()
        assert read(ws) == ([], 1001)
    position = seen[-1]["data"]["position"]
    with opened(open_door(), f"/v1/tasks/{task_id}/events?from={position + 1}") as ws:
        worker.append(task_id, 3, ["d"])
        worker.finish(task_id, [4])
        messages, code = read(ws)
    seen += messages
    assert ("".join(message["data"].get("text", "") for message in seen), code) == ("abcd", 1000)


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/v1/tasks/nobody/events", {}, 404, "task_not_found"),
        ("/v1/tasks/{}/events?from=x", {}, 400, "invalid_value"),
        (f"/v1/tasks/{{}}/events?from={MAX_POSITION + 1}", {}, 400, "invalid_value"),
        ("/v1/tasks/{}/events", {"origin": "https://evil.example"}, 403, "origin_not_allowed"),
        ("/v1/tasks/{}", {}, 404, "not_found"),
    ],
)
def test_what_is_refused_gets_an_error_in_place_of_the_handshake(
    door: Door,
    submit: Submit,
    caplog: pytest.LogCaptureFixture,
    path: str,
    headers: dict[str, str],
    status: int,
    code: str,
) -> None:
    with pytest.raises(InvalidStatus) as refused:
        opened(door, path.format(submit()), additional_headers=headers)
    response = refused.value.response
    assert response.body is not None
    assert (response.status_code, json.loads(response.body)["error"]["code"]) == (status, code)
    assert response.headers["x-request-id"]
    assert not caplog.records, "nothing for an operator to see"


def test_pages_of_its_own_and_of_allowed_origins_may_read(open_door: Open, submit: Submit, worker: FakeWorker) -> None:
    task_id = submit()
    worker.serve(task_id, ["a"])
    door = open_door(cors_origins=("https://chat.example",))
    for origin in ("https://chat.example", f"http://127.0.0.1:{door.port}"):
        with opened(door, f"/v1/tasks/{task_id}/events", additional_headers={"origin": origin}) as ws:
            assert read(ws)[1] == 1000


def frames_of(kind: bytes, number: int) -> bytes:
    """So many empty frames of a client (RFC 6455, 5.2), masked with zeros. `kind`: their first byte."""
    return (kind + b"\x80\0\0\0\0") * number


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        (frames_of(b"\x89", FRAMES), True),  # pings
        (frames_of(b"\x8a", FRAMES), True),  # pongs
        (frames_of(b"\x89", FRAMES + 64), False),
        (frames_of(b"\x8a", FRAMES + 64), False),
        (frames_of(b"\x01", 1) + frames_of(b"\x00", FRAMES + 64), False),  # a message of empty pieces, without an end
        (frames_of(b"\x89", 100_000), False),  # would keep the event loop for seconds
    ],
)
def test_a_client_that_says_much_is_cut_off(
    open_door: Open, submit: Submit, worker: FakeWorker, said: bytes, taken: bool
) -> None:
    door, task_id = open_door(), submit()
    with shaken(door, task_id) as link:
        with suppress(ConnectionError):  # it is cut off before it has said all
            link.sendall(said)
        if taken:
            worker.serve(task_id, ["heard"])
            assert b"heard" in until_closed(link)
        else:
            until_closed(link)
            assert until(lambda: not door.connections)


@contextmanager
def shaken(door: Door, task_id: str) -> Iterator[socket.socket]:
    """A WebSocket of a task's events, by hand."""
    key = b64encode(os.urandom(16)).decode()
    lines = ["Host: x", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    head = "\r\n".join([f"GET /v1/tasks/{task_id}/events HTTP/1.1", *lines, f"Sec-WebSocket-Key: {key}", "", ""])
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as link:
        link.sendall(head.encode())
        answered = b""
        while not answered.endswith(b"\r\n\r\n"):
            answered += link.recv(1)
        assert answered.startswith(b"HTTP/1.1 101")
        yield link


def until_closed(link: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionError):
        while part := link.recv(1 << 16):
            received += part
    return received


@pytest.mark.parametrize(("message", "code"), [("hello", 1003), ("x" * 5000, 1009)])
def test_a_client_that_says_something_is_closed(door: Door, submit: Submit, message: str, code: int) -> None:
    with opened(door, f"/v1/tasks/{submit()}/events") as ws:
        ws.send(message)
        assert read(ws) == ([], code)
    until(lambda: not len(door.app.state.streams))


def test_it_counts_as_a_connection(open_door: Open, submit: Submit, model: str) -> None:
    task_id, door = submit(), open_door(connections=1)
    with opened(door, f"/v1/tasks/{task_id}/events"):
        assert httpx.get(f"{door.url}/livez", timeout=PATIENCE_S).json()["error"]["code"] == "too_many_connections"
    until(lambda: door.connections == 0)


def handshake(door: Door, path: str) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", door.port), 60)
    key = b64encode(os.urandom(16)).decode()
    head = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key}",
    )
    raw.sendall("\r\n".join((f"GET {path} HTTP/1.1", "Host: x", *head, "", "")).encode())
    return raw


def rest(raw: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    data = b""
    while True:
        try:
            part = raw.recv(1 << 16)
        except ConnectionResetError:
            return data
        if not part:
            return data
        data += part


def test_a_client_that_answers_no_ping_is_closed(open_door: Open, submit: Submit) -> None:
    door = open_door(heartbeat=0.05, stall=0.1)
    with handshake(door, f"/v1/tasks/{submit()}/events") as raw:
        data = rest(raw)
    assert data.startswith(b"HTTP/1.1 101 ")
    ping, close = data.index(b"\x89\x04"), data.index((1011).to_bytes(2, "big"))
    assert ping < close
    until(lambda: not len(door.app.state.streams))


def test_a_reader_that_takes_nothing_is_cut_off(open_door: Open, submit: Submit, worker: FakeWorker) -> None:
    task_id, door = submit(), open_door(stall=0.2)
    worker.claim(task_id)
    worker.append(task_id, 0, ["x" * (1 << 20)] * 16)
    with handshake(door, f"/v1/tasks/{task_id}/events"):
        until(lambda: door.connections == 1 and len(door.app.state.streams) == 1)
        until(lambda: door.connections == 0 and not len(door.app.state.streams))


@pytest.mark.parametrize("more", [{"sec-websocket-version": "8"}, {"sec-websocket-key": "short"}, {"upgrade": "h2c"}])
def test_an_upgrade_that_cannot_be_granted_is_a_plain_request(
    http: httpx.Client, submit: Submit, worker: FakeWorker, more: dict[str, str]
) -> None:
    task_id = submit()
    worker.serve(task_id, ["a"])
    key = b64encode(bytes(16)).decode()
    head = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": key}
    answer = http.get(f"/v1/tasks/{task_id}/events", headers=head | more)
    assert (answer.status_code, "event: end" in answer.text) == (200, True)
