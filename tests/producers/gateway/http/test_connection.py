"""What a connection may not do: stay open for nothing."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import Any

import httpx
import pytest

from producers.gateway.http import connection as connections
from producers.gateway.http import peers
from producers.gateway.http.connection import MAX_HEAD, MAX_HEADERS, PIECE, PIECES, TURN, Connection
from tests.producers.gateway.conftest import Door, Open, until
from tests.waiting import PATIENCE_S

#: What may come in at once, or never will (s).
MOMENT = 0.2
POST = b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
ALIVE = b'{"status":"ok"}'


@contextmanager
def hurried(door: Door) -> Iterator[socket.socket]:
    """A connection whose requests have to come in at once, from their first byte on; its test may be held up before."""
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        until(lambda: door.connections)
        door.receive_within(MOMENT)
        yield connection


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The response to be read before the connection ends: status, error."""
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def is_alive(connection: socket.socket) -> bool:
    """Whether the next response, which may come in pieces, is /livez's."""
    received = b""
    while not received.endswith(ALIVE):
        if not (part := connection.recv(1 << 16)):
            return False
        received += part
    return received.startswith(b"HTTP/1.1 200")


def test_who_sends_nothing_is_given_up(open_door: Open) -> None:
    door = open_door(receive=MOMENT)
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        status, error = answer(connection)
        assert (status, error["code"]) == (408, "request_timeout")


@pytest.mark.parametrize("sent", [b"GET /livez HTTP/1.1\r\nHost: x\r\n", b"GET"])
@pytest.mark.parametrize("before", [b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_request_that_does_not_come_in_is_given_up(open_door: Open, before: bytes, sent: bytes) -> None:
    """Whatever came before it."""
    door = open_door()
    with hurried(door) as connection:
        if before:
            connection.sendall(before)
            assert is_alive(connection)
        connection.sendall(sent)
        status, error = answer(connection)
        assert (status, error["code"]) == (408, "request_timeout")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"Content-Length: 9\r\n\r\n{", 408, "request_timeout"),
        (b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", 408, "request_timeout"),
        (b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\nzz\r\n", 400, "invalid_http"),
    ],
)
def test_a_body_that_does_not_come_in_whole_is_answered(open_door: Open, body: bytes, status: int, code: str) -> None:
    with hurried(open_door()) as connection:
        connection.sendall(b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + body)
        found, error = answer(connection)
        assert (found, error["code"]) == (status, code)
        assert connection.recv(1 << 16) == b""


def test_an_answer_that_is_being_sent_is_not_mixed_with_another(open_door: Open, model: str) -> None:
    """Nor is one sent for a later request before that of an earlier one."""
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": 1, "stream": True})
    with hurried(open_door(heartbeat=2 * MOMENT)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}NO HTTP\r\n\r\n".encode())
        received = b""
        while part := connection.recv(1 << 16):
            received += part
        assert b"invalid_http" not in received


def test_a_whole_request_is_waited_for_no_more(open_door: Open, model: str) -> None:
    """Its answer may take as long as it likes."""
    with hurried(open_door(heartbeat=2 * MOMENT)) as connection:
        body = json.dumps({"model": model, "prompt": "x", "max_tokens": 1, "stream": True})
        request = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{request}Content-Type: application/json\r\n\r\n{body}".encode())
        received = b""
        while b"\n: " not in received:  # a comment
            part = connection.recv(1 << 16)
            assert part, received
            received += part


def test_more_connections_than_are_taken_are_told_so(open_door: Open) -> None:
    """Where a request is under way on all."""
    door = open_door(connections=1)
    with busy(door), socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as second:
        status, error = answer(second)
        assert (status, error["code"], error["type"]) == (503, "too_many_connections", "server_error")
    assert until(lambda: httpx.get(f"{door.url}/livez", timeout=PATIENCE_S).is_success)


def test_idle_connections_make_room_for_newcomers_and_busy_ones_do_not(open_door: Open) -> None:
    """One after the other, those that have been idle for longest: without a request, after one, or amidst a head."""
    door = open_door(connections=4)
    address = ("127.0.0.1", door.port)
    with ExitStack() as stack:
        under_way = stack.enter_context(busy(door))
        idle = []
        for sent in (b"", LIVEZ, LIVEZ[:20]):
            idle.append(stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S)))
            idle[-1].sendall(sent)
            if sent == LIVEZ:
                assert is_alive(idle[-1])
            until(lambda: len(door.peers) == 1 + len(idle))
        for oldest in idle:
            newcomer = stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
            newcomer.sendall(LIVEZ)
            assert is_alive(newcomer)
            assert oldest.recv(1 << 16) == b""
        under_way.sendall(b"}" + b" " * 7)
        assert under_way.recv(1 << 16).startswith(b"HTTP/1.1 400")
    closed = door.app.state.metrics.registry.get_sample_value("penstock_gateway_idle_connections_closed_total")
    assert closed == 3


@contextmanager
def unread(door: Door, path: str) -> Iterator[socket.socket]:
    """A connection that has asked for this and takes nothing beyond the beginning of the answer."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE_S)
        connection.connect(("127.0.0.1", door.port))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        yield connection


def test_files_of_a_page_that_nobody_takes_make_room(open_door: Open) -> None:
    """They need no key, and had held connections and open files for as long as a byte was taken now and then."""
    door = open_door(connections=4)
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(unread(door, "/docs/assets/swagger-ui-bundle.js"))
        assert httpx.get(f"{door.url}/livez", timeout=PATIENCE_S).status_code == 200
        assert len(door.peers) <= 4


def test_of_answers_that_nobody_takes_some_are_kept_in_memory(open_door: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    path, most = "/docs/assets/swagger-ui-bundle.js", 4 << 20
    monkeypatch.setattr(peers, "UNSENT", most)
    door = open_door()
    with ExitStack() as stack:
        links = [stack.enter_context(unread(door, path)) for _ in range(8)]
        assert until(lambda: len(door.peers) < len(links))
        assert 0 < door.peers._unsent_bytes <= most
        assert until(lambda: len(door.peers) * 1_000_000 <= most)
        for link in links[:-1]:
            link.close()
        assert until(lambda: len(door.peers) == 1)
        while door.peers._unsent_bytes:  # of the last one, whose reader takes it now
            assert links[-1].recv(1 << 16)


def test_bytes_of_an_answer_that_are_sent_later_count_for_its_caller(
    open_door: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step of the request sends them: a flood of large answers held up the others, and counted as little."""
    monkeypatch.setattr(connections, "SENT_S", 1.0)
    door = open_door()
    with unread(door, "/docs/assets/swagger-ui-bundle.js"):
        assert until(lambda: door.app.state.fair_share.of("127.0.0.1").used > 1_000_000)


def test_one_caller_has_requests_under_way_on_half_of_the_connections(open_door: Open) -> None:
    """Bodies that come slowly, from behind a proxy, which may have any number of connections."""
    door = open_door(connections=8)
    with ExitStack() as stack:
        for _ in range(4):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S))
            slow.sendall(POST + b"Content-Length: 9\r\n\r\n{")
        until(lambda: len(door.peers._idle) == 0 and len(door.peers) == 4)
        with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as further:
            further.sendall(POST + b"Content-Length: 9\r\n\r\n{")
            assert answer(further)[1]["code"] == "too_many_open_requests"
        assert httpx.get(f"{door.url}/livez", timeout=PATIENCE_S).status_code == 200  # a probe is none of them
        slow.close()
        until(lambda: len(door.peers) == 3)
        assert httpx.get(f"{door.url}/v1/models", timeout=PATIENCE_S).status_code == 200


@contextmanager
def busy(door: Door) -> Iterator[socket.socket]:
    """A connection with a request under way: its body does not come."""
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        connection.sendall(POST + b"Content-Length: 9\r\n\r\n{")
        until(lambda: any(opened not in door.peers._idle for opened in door.peers._of))
        yield connection


def test_what_is_no_http_is_told_so_as_any_error_is(open_door: Open) -> None:
    door = open_door()
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"\x16\x03\x01 who is there\r\n\r\n")
        status, error = answer(connection)
        assert (status, error["code"], error["type"]) == (400, "invalid_http", "invalid_request_error")


@pytest.mark.parametrize("begins", [b"GET /", b"GET /livez HTTP/1.1\r\nAuthorization: Bearer "])
def test_a_head_without_end_is_refused_before_it_fills_the_memory(open_door: Open, begins: bytes) -> None:
    door = open_door()
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        connection.sendall(begins.ljust(MAX_HEAD + 1, b"a"))
        status, error = answer(connection)
        assert (status, error["code"], error["type"]) == (431, "head_too_large", "invalid_request_error")


@pytest.mark.parametrize("behind", [False, True], ids=["headers", "trailers"])
@pytest.mark.parametrize("number", [MAX_HEADERS - 20, MAX_HEADERS + 20])
def test_a_request_has_no_thousands_of_headers(open_door: Open, behind: bool, number: int) -> None:
    fields = b"a: b\r\n" * number
    sent = LIVEZ[:-2] + fields + b"\r\n"
    if behind:
        sent = LIVEZ[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + fields
    with socket.create_connection(("127.0.0.1", open_door().port), timeout=PATIENCE_S) as connection:
        connection.sendall(sent)
        assert int(connection.recv(1 << 16).split()[1]) == (200 if number < MAX_HEADERS else 431)


@pytest.mark.parametrize("path", [b"/v1/tasks", b"/v1/none"], ids=["read", "answered before"])
def test_a_body_in_tiny_chunks_alone_is_refused(open_door: Open, path: bytes) -> None:
    """Whoever reads it. Each of these chunks costs the event loop as much as kilobytes."""
    door = open_door()
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        connection.sendall(POST.replace(b"/v1/tasks", path) + b"Transfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):  # it is closed before all is sent
            connection.sendall(b"1\r\n1\r\n" * 40 * PIECES)
        until(lambda: not door.connections)


def test_a_body_in_thousands_of_chunks_is_read(open_door: Open, model: str) -> None:
    text = json.dumps({"model": model, "prompt": "x", "metadata": {}}).encode() + b" " * PIECES * PIECE * 3
    pieces = [text[at : at + 2 * PIECE] for at in range(0, len(text), 2 * PIECE)]
    assert len(pieces) > PIECES
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{open_door().url}/v1/tasks", content=iter(pieces), headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 202


def test_others_have_their_turn_while_one_sends_on(open_door: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of much is the last one until what else is to be done was done."""
    door, order = open_door(), list[str]()
    received, read_on = Connection.data_received, Connection._read_on

    def noted(connection: Connection, data: bytes) -> None:
        received(connection, data)
        if len(data) >= TURN:
            order.append("read")

    def noted_turn(connection: Connection) -> None:
        order.append("turn")
        read_on(connection)

    monkeypatch.setattr(Connection, "data_received", noted)
    monkeypatch.setattr(Connection, "_read_on", noted_turn)
    size = 64 << 20
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        connection.sendall(POST.replace(b"/v1/tasks", b"/v1/none") + b"Content-Length: %d\r\n\r\n" % size)
        connection.sendall(bytes(size))
        connection.sendall(LIVEZ)
        answers = b""
        while answers.count(b"HTTP/1.1") < 2:
            answers += connection.recv(1 << 16)
    assert order[:2] == ["read", "turn"]
    assert all(pair != ("read", "read") for pair in pairwise(order))


def test_no_refusal_stands_in_the_middle_of_an_answer(open_door: Open, model: str) -> None:
    door = open_door(heartbeat=0.1)
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        connection.sendall(chat(model))
        received = b""
        while b"\n: " not in received:  # a comment
            received += connection.recv(1 << 16)
        connection.sendall(b"\x00 no request")
        while part := connection.recv(1 << 16):
            received += part
        assert b"invalid_http" not in received


def test_requests_that_came_at_once_all_end_with_their_connection(
    open_door: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """The first is being answered when the third turns out to be none: its answer is not taken for a fault of ours."""
    door = open_door()
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 2 + b"\x00 no request")
        while connection.recv(1 << 16):
            pass
    httpx.get(f"{door.url}/v1/models", timeout=PATIENCE_S)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def chat(model: str) -> bytes:
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": 1, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()
