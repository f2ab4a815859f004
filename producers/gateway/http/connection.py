"""A uvicorn protocol with limits, so that idle or slow clients cannot hold connections, and doubtful heads are refused.

- A request has to come in whole within a time, its first byte included. Of a large one, LEAST bytes have to come in
  each such time.
- A request's line and headers may have MAX_HEAD bytes and MAX_HEADERS headers: they are kept before anybody knows who
  asks. A body may not come in small chunks alone, each of which takes as long as kilobytes.
- Who sends much lets others have their turn after each read.
- Of more connections than are taken, in all or of one address, idle ones are closed (`peers`), or the new one is told
  503 or 429.
- A reader that takes nothing is cut off (`abort`): closed, a socket would wait for it, with all that it was sent.
- A caller who speaks HTTP/1.0 is sent no chunks.
- When the gateway stops, a request that has begun to come in, or is about to on a new connection, is still answered.
- A request may be sent before the answer to the one before; MAX_PIPELINED may wait for theirs.
- A head that a proxy may read otherwise is refused, so that a proxy before the gateway reads no other requests in a
  connection's bytes. llhttp refuses most of what is doubtful: Content-Length beside Transfer-Encoding or twice, a bare
  CR or LF, a space before a colon, a folded line, a control character. `check_head` refuses the rest. A refused request
  ends its connection: where the next one would begin is not known then.
- An offer of another protocol than WebSocket is ignored (RFC 9110, 7.8). llhttp takes the bytes behind a request that
  offers one (`Upgrade: h2c`, as Java's client sends it) for that protocol's. So another parser goes on with the body:
  `BehindHead` keeps the head to itself from which that one knows how long the body is (`same_body`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, Final, Protocol

import httptools
from starlette.types import Message, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from producers.connection.addresses import network_of
from producers.errors import shown
from producers.gateway.fair_share import FairShare, Share
from producers.gateway.http.errors import Problem, body_of, too_many_waiting
from producers.gateway.http.peers import Peers

Headers = Iterable[tuple[bytes, bytes]]
#: A name, an IPv4 or an IPv6 address, and perhaps a port (RFC 9112, 3.2). Spaces behind a value are the parser's.
_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._~%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?[ \t]*")
#: A target in absolute form, as a client sends it to a proxy (RFC 9112, 3.2.2): its host and port.
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#@]+)/[^#]*", re.IGNORECASE)
#: A WebSocket handshake's key: 16 bytes (RFC 6455, 4.1).
_KEY: Final = re.compile(rb"[A-Za-z0-9+/]{22}==")
#: Headers that `check_head` looks at.
_CHECKED: Final = frozenset({b"host", b"transfer-encoding"})
#: Headers that say how long a body is.
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
#: Headers that `is_handshake` looks at: each may come once.
_HANDSHAKE: Final = (
    b"upgrade",
    b"sec-websocket-version",
    b"sec-websocket-key",
    b"content-length",
    b"transfer-encoding",
)
_SLASH: Final = ord("/")
#: The ASGI extensions with which a response finds its connection's `cut`, and the connection, unless it is a WebSocket.
CUT: Final = "penstock.cut"
CONNECTION: Final = "penstock.connection"
#: Bytes of a body that have to come in each `receive` seconds, where it does not come whole.
LEAST: Final = 1 << 20
#: Bytes that a request's line and headers may have, and what comes between two parts of its body or after them.
MAX_HEAD: Final = 1 << 16
#: Headers of a request, and fields behind a body in chunks.
MAX_HEADERS: Final = 256
#: Pieces of a body, each a chunk or what one read has, from which on they must have so many bytes on average.
PIECES, PIECE = 256, 64
#: Bytes of a read after which others have a turn: of who sends on, uvloop reads 8 MiB at once otherwise.
TURN: Final = 1 << 17
#: Headers of answers: what they say of their type holds; and nobody keeps them, since they may be a caller's alone.
STATIC: Final = ((b"x-content-type-options", b"nosniff"),)
PRIVATE: Final = (*STATIC, (b"cache-control", b"no-store"))
#: Seconds that a connection takes to be made and closed, beside its requests.
CONNECTED_S: Final = 2e-4
#: Seconds for which what comes first on a connection is put off: longer than a pass of the event loop.
MOMENT_S: Final = 1e-3
#: Seconds that the kernel takes to hand over a byte, of which the event loop's clock tells nothing.
COPIED_S: Final = 5e-10
#: Seconds that it takes to send a byte of an answer that is complete, of which no step of a request tells.
SENT_S: Final = 4e-9
#: The SO_LINGER value that makes close discard unsent data.
_NOW: Final = struct.pack("ii", 1, 0)
#: Seconds for which a connection that was just made is waited for when the gateway stops: its request is under way.
FIRST_S: Final = 2.0
#: Requests of a connection that may wait for their answers: one read of 256 KiB could hold 8,000, each kept whole.
MAX_PIPELINED: Final = 64
_LARGE_HEAD: Final = Problem(
    431, f"The request's line and headers have more than {MAX_HEAD} bytes.", code="head_too_large"
)


class Callbacks(Protocol):
    """The callbacks of a parser (httptools)."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


def invalid_http(message: str) -> Problem:
    """Returns the error for bytes that are no request in HTTP/1.1, or a doubtful one."""
    return Problem(400, message, code="invalid_http")


def check_head(method: bytes, target: bytes, version: str, headers: Headers) -> None:
    """Raise Problem for a head that others may read otherwise. `headers`: names in lower case."""
    hosts: list[bytes] = []
    codings: list[bytes] = []
    for name, value in headers:
        if name in _CHECKED:
            (hosts if name == b"host" else codings).append(value)
    if version not in ("1.1", "1.0"):
        raise invalid_http(f"The request is in HTTP/{version}; HTTP/1.1 and HTTP/1.0 are spoken here.")
    if len(hosts) != 1 and (hosts or version == "1.1"):
        raise invalid_http(f"The request has {len(hosts) or 'no'} Host headers; it must have one.")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise invalid_http(f"Host is {_shown(hosts[0])}, which is neither a name nor an address.")
    if codings and (version == "1.0" or codings[0].strip(b" \t").lower() != b"chunked"):
        raise invalid_http(f"Transfer-Encoding is {_shown(codings[0])}; `chunked` alone is taken, in HTTP/1.1.")
    if method == b"CONNECT":
        raise invalid_http("CONNECT is for proxies, which this gateway is not.")
    if target[0] != _SLASH or b"#" in target:
        _check_target(method, target, hosts)


def _check_target(method: bytes, target: bytes, hosts: Sequence[bytes]) -> None:
    """Check a target that is not simply a path."""
    if target == b"*" and method == b"OPTIONS":
        return
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise invalid_http(f"The request's target is {_shown(target)}; it must be a path, or begin with http://.")
    if hosts and absolute[1].lower() != hosts[0].strip(b" \t").lower():
        raise invalid_http(f"The request's target names {_shown(absolute[1])}, and Host {_shown(hosts[0])}.")


def is_handshake(method: bytes, version: str, headers: Headers) -> bool:
    """Whether a request asks for a WebSocket in a way that can be granted (RFC 6455, 4.2.1). Others that offer
    another protocol are answered as plain HTTP, with their body."""
    if (method, version) != (b"GET", "1.1"):
        return False
    values: dict[bytes, list[bytes]] = {name: [] for name in _HANDSHAKE}
    tokens: set[bytes] = set()
    for name, value in headers:
        if name in values:
            values[name].append(value.strip(b" \t"))
        elif name == b"connection":
            tokens.update(token.strip(b" \t") for token in value.lower().split(b","))
    upgrade, protocol, key, length, coding = values.values()
    return (
        b"upgrade" in tokens
        and [name.lower() for name in upgrade] == [b"websocket"]
        and protocol == [b"13"]
        and len(key) == 1
        and _KEY.fullmatch(key[0]) is not None
        and length in ([], [b"0"])  # the JDK's client says so
        and not coding
    )


def request_parser(callbacks: Callbacks) -> Any:
    """A parser of requests. Behind one that ends its connection it takes what comes, and says nothing of it."""
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def same_body(headers: Headers, keep_alive: bool) -> bytes:
    """A head that says of its body what a checked one with these headers does, and offers no other protocol."""
    lines = [b"POST / HTTP/1.1", b"host: x"]
    lines += [name + b": " + value for name, value in headers if name in _FRAMING]
    if not keep_alive:
        lines.append(b"connection: close")
    return b"\r\n".join([*lines, b"", b""])


class BehindHead:
    """Passes a parser's calls on, except those for the head that it is fed first."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._in_head = True
        self.on_body = callbacks.on_body
        self.on_message_complete = callbacks.on_message_complete

    def on_message_begin(self) -> None:
        if not self._in_head:
            self._callbacks.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._in_head:
            self._callbacks.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            self._callbacks.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._in_head:
            self._in_head = False
        else:
            self._callbacks.on_headers_complete()


def _shown(value: bytes) -> str:
    return shown(value.decode("latin-1"))


_NO_HTTP: Final = invalid_http("This is no request in HTTP/1.1, as far as it can be read.")


def cut(scope: Scope) -> None:
    """Close a request's connection now; does nothing under a server without this extension."""
    end: Callable[[], None] | None = (scope.get("extensions") or {}).get(CUT)
    if end is not None:
        end()


def connection_of(scope: Scope) -> Connection | None:
    """A request's connection; None under another server, and for a WebSocket."""
    connection: Connection | None = (scope.get("extensions") or {}).get(CONNECTION)
    return connection


class LiveBody:
    """The body of an answer that is being sent in chunks: others than its request's task can add to it."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def writable(self) -> bool:
        """Whether `write` may be called now: the client takes what it is sent, and the answer has not ended."""
        cycle = self._cycle
        return bool(
            cycle.response_started
            and cycle.chunked_encoding
            and not (self._flow.write_paused or cycle.response_complete or cycle.disconnected)
        )

    def write(self, part: bytes) -> None:
        """Send a part, as `send` of the request would. uvloop sends all parts of one step in one system call."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def live_body(scope: Scope) -> LiveBody | None:
    """The body of a request's answer; None under another server, and for a WebSocket."""
    connection = connection_of(scope)
    # Middlewares may have copied the scope, but not what is in it.
    cycles = () if connection is None else connection.requests
    return next((LiveBody(cycle) for cycle in cycles if cycle.scope["extensions"] is scope["extensions"]), None)


def cut_off(transport: asyncio.Transport) -> None:
    """Close a connection now, and discard what was not sent."""
    fileno = transport.get_extra_info("socket").fileno()
    if fileno >= 0:
        with socket.socket(fileno=os.dup(fileno)) as same:  # uvloop's own gives no access to options
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOW)
    transport.abort()


class _Flow(FlowControl):
    """A connection's flow. `waits`: whether a body waits in line, so that who reads it does not make it go on."""

    def __init__(self, transport: asyncio.Transport, waits: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._waits = waits

    def resume_reading(self) -> None:
        if self._waits():
            self.read_paused = False
        else:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """An HTTP connection with limits.

    `receive`: time limit (s) for receiving a request. `peers`: the open connections. `fair_share`: the callers' turns.
    `refused`: called with the error code for each connection that is not let in.
    """

    receive: ClassVar[float]
    peers: ClassVar[Peers]
    fair_share: ClassVar[FairShare]
    refused: ClassVar[Callable[[str], None]]
    stops: ClassVar[bool] = False
    """Whether the gateway stops: each connection ends with its next answer."""
    _late: asyncio.TimerHandle | None = None
    _received = 0
    """Bytes of the body since `_wait`."""
    _pieces = _size = 0
    """Pieces and bytes of the body."""
    _unread = 0
    """Bytes since the last whole head or part of a body."""
    _open: deque[RequestResponseCycle]
    """Unanswered requests, the oldest first. uvicorn reports a lost connection only to the last pipelined one."""
    _coming: RequestResponseCycle | None = None
    """The request whose body is still being received."""
    share: Share | None = None
    """The share to which the time for what comes in is charged: of its address, then of the latest request's caller."""
    _has_caller = False
    """Whether `share` is that of the latest request's caller: a proxy's connection carries those of many."""
    lost = False
    """Whether it is closed, so that nobody reads an answer."""
    turn: asyncio.Future[bool] | None = None
    """The place of a request that waits for its turn."""
    _reads: asyncio.Future[bool] | None = None
    """The place of a body that waits for its turn to be read."""
    _early: bytearray | None = None
    """What came first, while it is put off."""
    _begun = False
    """Whether anything that came was looked at."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._open = deque()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self.flow = _Flow(transport, lambda: self._waits_to_read)
        host = self.client[0] if self.client else None
        self.share = self.fair_share.of(network_of(host) if host else None)
        self.share.used += CONNECTED_S
        if (problem := self.peers.enter(self, host)) is not None:
            transport.write(_raw(problem))
            transport.close()
            type(self).refused(problem.code)
        else:
            self._wait()
            if self.stops:  # it was taken before, and made after
                self.shutdown()

    def shutdown(self) -> None:
        """End it once what it has begun is answered. uvicorn would close one whose first request is still coming."""
        if self.cycle is None and not self._unread:
            self.loop.call_later(FIRST_S, self._end_unused)
        elif not self._unread:
            super().shutdown()

    def _end_unused(self) -> None:
        if self.cycle is None and not self._unread:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._stop_timer()
        self.peers.leave(self)
        super().connection_lost(exc)
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()
        for turn in (self.turn, self._reads):
            if turn is not None and not turn.done():
                turn.set_result(False)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        began, share = time.perf_counter(), self.share
        if not self._begun and self._put_off(data):
            return
        self._begun = True
        self._take(data)
        if share is not None:
            share.used += time.perf_counter() - began + COPIED_S * len(data)
            reading = self._coming is not None and self._has_caller and not self._waits_to_read
            if reading and not self.fair_share.may(share, time.monotonic()):
                self._wait_to_read(share)

    def _put_off(self, data: bytes) -> bool:
        """Whether what came first is looked at a moment later, while the gateway is behind: of who connects and leaves
        at once, the end of the connection is seen before that, and what was sent is never looked at."""
        if self._early is None:
            if not self.fair_share.behind:
                return False
            self._early = bytearray()
            self.loop.call_later(MOMENT_S, self._begin)
        self._early += data
        if len(self._early) >= TURN:
            self.transport.pause_reading()
        return True

    def _begin(self) -> None:
        if self._early is not None and not self.transport.is_closing():
            early, self._early, self._begun = bytes(self._early), None, True
            self._read_on()
            self.data_received(early)

    @property
    def requests(self) -> Iterable[RequestResponseCycle]:
        """Its requests whose answers have not ended, and perhaps some before them; the oldest first."""
        return self._open

    def belongs_to(self, share: Share) -> None:
        """Take the share of the latest request's caller."""
        self.share, self._has_caller = share, True

    def _wait_to_read(self, share: Share) -> None:
        """Take more of a body when it is the turn of its caller."""
        self._reads = self.fair_share.wait(share)
        if self._reads is None:
            self._refuse(too_many_waiting())
        else:
            self.transport.pause_reading()
            self._reads.add_done_callback(lambda _: self._read_on())

    def _take(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unread += len(data)
        unparsed: bytes | memoryview = data
        try:
            while (offset := self._parse(unparsed)) is not None:  # up to a request that offers another protocol
                unparsed = memoryview(unparsed)[offset:]
                if self._should_upgrade():
                    self._open_socket(unparsed)
                    return
                self.parser = request_parser(BehindHead(self))
                self.parser.feed_data(same_body(self.scope["headers"], self.cycle.keep_alive))
        except httptools.HttpParserError as error:
            self._refuse(error.__context__ if isinstance(error.__context__, Problem) else _NO_HTTP)
            return
        if self.transport.is_closing():
            return
        if self._unread > MAX_HEAD or len(self.headers or ()) > MAX_HEADERS:  # None before the first request
            self._refuse(_LARGE_HEAD if self._unread > MAX_HEAD else _many_headers())
        elif len(data) >= TURN and not self.flow.read_paused:
            self.transport.pause_reading()
            self.loop.call_soon(self._read_on)

    @property
    def _waits_to_read(self) -> bool:
        return self._reads is not None and not self._reads.done()

    def _read_on(self) -> None:
        if not self._waits_to_read and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _parse(self, data: bytes | memoryview) -> int | None:
        """Parse data. Returns the offset behind the head of a request that offers another protocol; None: all is
        parsed. Raises HttpParserError; the Problem that a callback raised is its context."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            offset: int = upgrade.args[0]
            return offset
        return None

    def _open_socket(self, early: bytes | memoryview) -> None:
        """Make a `Socket` of the connection. `early`: what came with the handshake, for whose answer clients wait."""
        if early or any(not cycle.response_complete for cycle in self._open):  # or an earlier request waits for its own
            self._refuse(_NO_HTTP)
            return
        self.handle_websocket_upgrade()
        opened: Any = self.transport.get_protocol()
        opened.lost = partial(self.peers.leave, self)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extended: dict[str, Any] = dict(self.scope)
        extended["extensions"] = {CUT: self.cut, CONNECTION: self}
        self.scope.update(extended)  # type: ignore[typeddict-item]  # an extension of ours
        self._pieces = self._size = 0
        self._wait()

    def on_headers_complete(self) -> None:
        self._unread = 0
        if len(self.headers) > MAX_HEADERS:
            raise _many_headers()
        check_head(self.parser.get_method(), self.url, self.parser.get_http_version(), self.headers)
        while self._open and self._open[0].response_complete:
            self._open.popleft()
        if len(self._open) > MAX_PIPELINED:
            raise invalid_http(f"More than {MAX_PIPELINED} requests of this connection wait for their answers.")
        self.peers.busy(self)
        super().on_headers_complete()
        if self.parser.should_upgrade() and self._should_upgrade():
            return  # without a cycle: a `Socket` answers
        if self.stops:
            self.cycle.keep_alive = False
        if self.scope["http_version"] == "1.0":
            _end_by_closing(self.cycle)
        self.headers = []  # the scope has the request's; a trailer is none of them (RFC 9110, 6.5.1)
        self._has_caller = False
        self._coming = self.cycle
        self._open.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        size = len(body)
        self._received += size
        self._size += size
        self._pieces += 1
        self._unread = 0
        if self._pieces > PIECES and self._size < PIECE * self._pieces:
            raise invalid_http(f"The body comes in more than {PIECES} chunks of less than {PIECE} bytes.")
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and not self._should_upgrade():
            return  # llhttp says so behind the head; `data_received` goes on with the body
        self._stop_timer()
        self._coming = None
        self._unread = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.flow.write_paused:
            unsent_bytes = self.transport.get_write_buffer_size()
            self.peers.unsent(self, self.share, unsent_bytes)
            if self.share is not None:
                self.share.used += SENT_S * unsent_bytes
        super().on_response_complete()
        if self.cycle.response_complete:  # the latest
            self.peers.idle(self)

    def resume_writing(self) -> None:
        self.peers.sent(self)
        super().resume_writing()

    def close_idle(self) -> None:
        """Make room for another connection."""
        if self.transport.get_write_buffer_size():
            self.cut()  # its last answer is not read
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        """Whether the request asks for a WebSocket in a way that can be granted. Others are answered as plain HTTP."""
        return is_handshake(self.parser.get_method(), self.parser.get_http_version(), self.headers)

    def _wait(self) -> None:
        self._stop_timer()
        self._received = 0
        self._late = self.loop.call_later(self.receive, self._is_late)

    def _stop_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _is_late(self) -> None:
        coming = self._received >= LEAST and not self.cycle.response_complete
        # Nothing is read while a body waits for its turn, or an earlier request of this connection for its answer.
        if coming or self.flow.read_paused or not self.transport.is_reading():
            self._wait()
        elif not self.transport.is_closing():
            self._refuse(_slow(self.receive))

    def _refuse(self, problem: Problem) -> None:
        """Answer with an error, unless another answer is being sent or comes first, and close."""
        cycle = self._coming
        waiting = any(not request.response_complete for request in self._open if request is not cycle)
        if not waiting and (cycle is None or not cycle.response_started):
            self.transport.write(_raw(problem))
        if cycle is not None:  # who reads the body is told that no more comes, and answers nothing more
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def cut(self) -> None:
        cut_off(self.transport)


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """Answer an HTTP/1.0 request without chunked encoding: a body of unknown length ends with its connection.

    uvicorn would send chunks. With chunking switched off, it accepts each part at its own length.
    """
    send: Callable[[Any], Awaitable[None]] = cycle.send

    async def send_plain(message: Message) -> None:
        cycle.chunked_encoding = False
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign,assignment]  # it is made anew for each request


def limited(receive: float, peers: Peers, fair_share: FairShare, refused: Callable[[str], None]) -> type[Connection]:
    """A protocol class with these limits, for uvicorn's `http` setting."""
    limits = {"receive": receive, "peers": peers, "fair_share": fair_share, "refused": staticmethod(refused)}
    return type("Limited", (Connection,), limits)


def _many_headers() -> Problem:
    return Problem(431, f"The request has more than {MAX_HEADERS} headers.", code="head_too_large")


def _slow(seconds: float) -> Problem:
    return Problem(408, f"The request did not come in within {seconds:g} s.", code="request_timeout")


def _raw(problem: Problem) -> bytes:
    """A raw response for a connection without a request."""
    body = json.dumps(body_of(problem)).encode()
    headers = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
    headers |= {name.decode(): value.decode() for name, value in PRIVATE}
    lines = [
        f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}",
        *(f"{k}: {v}" for k, v in (headers | problem.headers).items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
