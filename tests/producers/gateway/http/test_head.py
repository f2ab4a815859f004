"""A connection's bytes are the requests that a proxy reads in them, wherever they are cut into segments."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from itertools import combinations
from typing import Any

import pytest
import uvicorn
from redis import Redis
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from producers.contract import keys
from producers.gateway.fair_share import FairShare
from producers.gateway.http.connection import MAX_PIPELINED, Connection, limited
from producers.gateway.http.peers import Peers
from tests.exhaustive import few
from tests.fuzz.answers import Answer, take
from tests.producers.gateway.conftest import Door
from tests.waiting import PATIENCE_S

#: An answer's status.
STATUS = rb"HTTP/1\.1 (\d+) "
#: Headers that offer another protocol, in a form that parsers take for an offer.
OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n",
    "websocket": b"Connection: upgrade\r\nUpgrade: websocket\r\n",
    "the handshake of a POST": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
    "unknown": b"UPGRADE: what-ever/1.0\r\ncONNECTION:keep-alive , uPGRADE\t\r\n",
    "two lines": b"Connection: keep-alive\r\nUpgrade: h2c\r\nConnection: upgrade\r\nUpgrade: websocket\r\n",
    "empty elements": b"Connection: , ,upgrade\r\nUpgrade: h2c\r\n",
    "Proxy-Connection": b"Proxy-Connection: upgrade\r\nUpgrade: h2c\r\n",
}
#: A WebSocket's handshake, if nothing is added to it.
HANDSHAKE = (
    b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n%s\r\n"
)
#: A request that would run if it were read as one, and stands in the body of another.
INNER = b"GET /inner HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 127.0.0.1\r\n\r\n"
FRAMINGS = {
    "Content-Length": lambda body: b"Content-Length: %d\r\n\r\n%s" % (len(body), body),
    "chunked": lambda body: (
        b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in (body[:1], body[1:]))
        + b"0\r\nX: trailer\r\n\r\n"
    ),
}


class Wire(asyncio.Transport):
    """A connection's other end, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None: ...


class Requests:
    """What an application behind `Connection` is asked, with the bodies, and what is answered."""

    def __init__(self) -> None:
        self.read: list[tuple[str, str, bytes]] = []
        protocol = limited(60, Peers(100, 0, (), lambda: None), FairShare(), lambda code: None)
        config = uvicorn.Config(self._app, interface="asgi3", http=protocol, log_config=None)
        config.load()
        self._config = config

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.read.append((scope["method"], scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def of(self, *segments: bytes) -> tuple[list[tuple[str, str, bytes]], bytes, bool]:
        """The requests that are read in a connection's segments; what is answered; whether the connection is closed."""
        self.read.clear()
        wire = Wire()
        connection: Connection = self._config.http_protocol_class(self._config, ServerState(), {})
        connection.connection_made(wire)
        for segment in segments:
            connection.data_received(segment)
            for _ in range(8):  # requests of one connection run one behind the other
                await asyncio.sleep(0)
        closed = wire.closed
        connection.connection_lost(None)
        return list(self.read), wire.written, closed


def two_requests(offer: bytes, framing: str) -> bytes:
    first = b"POST /outer HTTP/1.1\r\nHost: x\r\n" + offer + FRAMINGS[framing](INNER)
    return first + b"POST /next HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("offer", OFFERS)
def test_a_request_that_offers_another_protocol_keeps_its_body_wherever_it_is_cut(offer: str, framing: str) -> None:
    data = two_requests(OFFERS[offer], framing)
    expected = [("POST", "/outer", INNER), ("POST", "/next", b"ab")]

    async def check() -> None:
        requests = Requests()
        for cut in range(len(data)):
            read, answers, closed = await requests.of(data[:cut], data[cut:])
            assert (read, re.findall(STATUS, answers), closed) == (expected, [b"200"] * 2, False), cut
        assert (await requests.of(*(bytes([byte]) for byte in data)))[0] == expected

    asyncio.run(check())


@pytest.mark.parametrize("framing", few(FRAMINGS, "chunked"))
def test_two_cuts_change_nothing_either(framing: str) -> None:
    data = two_requests(b"Connection: upgrade\r\nUpgrade: q\r\n", framing)

    async def check() -> None:
        requests = Requests()
        for first, second in combinations(range(1, len(data), 3), 2):
            read, *_ = await requests.of(data[:first], data[first:second], data[second:])
            assert read == [("POST", "/outer", INNER), ("POST", "/next", b"ab")], (first, second)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("head", "read"),
    [
        (b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", ["/a", "/next"]),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: upgrade, close\r\nUpgrade: h2c\r\n\r\n", ["/a"]),
        (HANDSHAKE % b"Content-Length: 2\r\n" + b"ab", ["/a", "/next"]),
        (HANDSHAKE % b"Upgrade: h2c\r\n", ["/a", "/next"]),
        (HANDSHAKE % b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n", ["/a", "/next"]),
        (b"GET /a HTTP/1.0\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", ["/a"]),
        (b"HEAD /a HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", ["/a", "/next"]),
    ],
)
def test_without_a_body_the_next_request_follows_where_the_connection_goes_on(head: bytes, read: list[str]) -> None:
    data = head + b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"

    async def check() -> None:
        requests = Requests()
        for cut in range(len(data)):
            found, _, closed = await requests.of(data[:cut], data[cut:])
            assert ([path for _, path, _ in found], closed) == (read, "/next" not in read), cut

    asyncio.run(check())


@pytest.mark.parametrize("early", [b"x", INNER])
def test_nothing_that_comes_with_a_handshake_is_a_request(early: bytes) -> None:
    """A client waits for its answer: what comes with it may be another one's request, to who sees no handshake."""
    read, answers, closed = asyncio.run(Requests().of(HANDSHAKE % b"Content-Length: 0\r\n" + early))
    assert (read, re.findall(STATUS, answers), b"invalid_http" in answers, closed) == ([], [b"400"], True, True)


#: Heads that others may read otherwise.
DOUBTFUL = {
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
    "two Hosts in HTTP/1.0": b"GET / HTTP/1.0\r\nHost: x\r\nhost: y\r\n\r\n",
    "a Host with a path": b"GET / HTTP/1.1\r\nHost: x/y\r\n\r\n",
    "a Host with a user": b"GET / HTTP/1.1\r\nHost: a@x\r\n\r\n",
    "a list of Hosts": b"GET / HTTP/1.1\r\nHost: x, y\r\n\r\n",
    "a Host with a space": b"GET / HTTP/1.1\r\nHost: x y\r\n\r\n",
    "a Host beyond ASCII": b"GET / HTTP/1.1\r\nHost: x\xff\r\n\r\n",
    "a Host's port that is none": b"GET / HTTP/1.1\r\nHost: x:y\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: x\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "CONNECT": b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\nContent-Length: 2\r\n\r\nab",
    "CONNECT to a path": b"CONNECT / HTTP/1.1\r\nHost: x\r\n\r\n",
    "another host's target": b"GET http://y/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "a target with a user": b"GET http://x@x/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "a target without a path": b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n",
    "another scheme": b"GET ftp://x/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "a fragment": b"GET /a#b HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET *": b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL in the target": b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL in a value": b"GET / HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n",
    "a control character": b"GET / HTTP/1.1\r\nHost: x\r\nX: a\x0bb\r\n\r\n",
    "a bare LF": b"GET / HTTP/1.1\r\nHost: x\nX: y\r\n\r\n",
    "a bare CR": b"GET / HTTP/1.1\r\nHost: x\rX: y\r\n\r\n",
    "a head's end without CR": b"GET / HTTP/1.1\r\nHost: x\r\n\n",
    "a space before the colon": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length : 2\r\n\r\nab",
    "a line without colon": b"GET / HTTP/1.1\r\nHost: x\r\nX\r\n\r\n",
    "a folded line": b"GET / HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n",
    "a folded Upgrade": b"POST / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade:\r\n h2c\r\n\r\n",
    "a first line with a space": b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    **{
        f"{name}": b"POST / HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n0\r\n\r\n" % headers
        for name, headers in {
            "both lengths": b"Content-Length: 5\r\nTransfer-Encoding: chunked",
            "both, the other first": b"Transfer-Encoding: chunked\r\nContent-Length: 5",
            "both, with an offer": OFFERS["h2c"] + b"Transfer-Encoding: chunked\r\nContent-Length: 5",
            "two lengths": b"Content-Length: 5\r\nContent-Length: 5",
            "a list of lengths": b"Content-Length: 5, 5",
            "a signed length": b"Content-Length: +5",
            "a length beyond 64 bits": b"Content-Length: 18446744073709551621",
            "another coding": b"Transfer-Encoding: gzip",
            "another coding first": b"Transfer-Encoding: gzip, chunked",
            "chunked and identity": b"Transfer-Encoding: chunked, identity",
            "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            "chunked, quoted": b'Transfer-Encoding: "chunked"',
            "chunked behind a control character": b"Transfer-Encoding: \x0bchunked",
        }.items()
    },
    "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}
#: Chunked bodies that others may read otherwise.
DOUBTFUL_CHUNKS = {
    "too many digits": b"10000000000000002\r\nab\r\n0\r\n\r\n",
    "0x": b"0x2\r\nab\r\n0\r\n\r\n",
    "a space behind the size": b"2 \r\nab\r\n0\r\n\r\n",
    "a size that ends by LF": b"2\nab\r\n0\r\n\r\n",
    "an extension that ends by LF": b"2;a\nab\r\n0\r\n\r\n",
    "an extension with a CR": b"2;a\rb\r\nab\r\n0\r\n\r\n",
    "a quoted extension without end": b'2;a="x\r\nab\r\n0\r\n\r\n',
    "data that ends by LF": b"2\r\nab\n0\r\n\r\n",
    "data longer than its size": b"2\r\nabc\r\n0\r\n\r\n",
    "a trailer with a length": b"0\r\nContent-Length: 5\r\n\r\n",
    "a trailer with a coding": b"0\r\nTransfer-Encoding: chunked\r\n\r\n",
}


async def check_refused(data: bytes) -> None:
    """It is answered 400 and its connection closed, wherever it is cut; no request is read in it or behind it."""
    requests = Requests()
    for cut in range(len(data)):
        read, answers, closed = await requests.of(data[:cut], data[cut:], INNER)
        assert (read, re.findall(STATUS, answers), closed) == ([], [b"400"], True), cut
        assert json.loads(answers.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("kind", DOUBTFUL)
def test_a_doubtful_head_is_refused_with_all_that_follows(kind: str) -> None:
    asyncio.run(check_refused(DOUBTFUL[kind] + INNER))


@pytest.mark.parametrize("offer", [b"", b"Connection: upgrade\r\nUpgrade: h2c\r\n"], ids=["plain", "offer"])
@pytest.mark.parametrize("kind", DOUBTFUL_CHUNKS)
def test_a_doubtful_chunk_is_refused_with_all_that_follows(kind: str, offer: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n" % offer
    asyncio.run(check_refused(head + DOUBTFUL_CHUNKS[kind] + INNER))


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: api_1.example:8000 \r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n",
        b"GET http://X:80/ HTTP/1.1\r\nHost: x:80\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"\r\nGET / HTTP/1.1\r\nHost: x\r\nX: \xff\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\ntransfer-encoding: CHUNKED\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_the_standard_allows_is_taken(head: bytes) -> None:
    read, answers, _ = asyncio.run(Requests().of(head))
    assert (len(read), answers[:12]) == (1, b"HTTP/1.1 200")


def test_only_so_many_requests_of_a_connection_wait_for_their_answers() -> None:
    """Each is kept whole: what came at once is refused from there on."""
    read, _, closed = asyncio.run(Requests().of(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * (MAX_PIPELINED + 2)))
    assert (len(read), closed) == (1, True)  # the first one was begun


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_gateway_reads_one_task_wherever_its_request_is_cut(
    door: Door, valkey: Redis, model: str, framing: str
) -> None:
    """On real sockets: its body holds another request, which is not answered."""
    body = {"model": model, "prompt": "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"}
    head = b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + OFFERS["websocket"]
    data = head + FRAMINGS[framing](json.dumps(body).encode())
    last = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    for cut in range(1, len(data)):
        answers = answered(door, data[:cut], data[cut:] + last)
        assert [answer.status for answer in answers] == [202, 200], cut
    assert len(list(valkey.scan_iter(keys.task("*")))) == len(data) - 1


def answered(door: Door, *segments: bytes) -> list[Answer]:
    """What is answered on a connection until it is closed. The gateway has read each segment before the next one."""
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for segment in segments:
            connection.sendall(segment)
            for _ in range(2):
                door.run(asyncio.sleep(0))
        data = b""
        while part := connection.recv(1 << 16):
            data += part
    answers = []
    while data:
        answer, data = take(data, closed=True)
        assert answer is not None
        answers.append(answer)
    return answers
