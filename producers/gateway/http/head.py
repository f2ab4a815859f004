"""Checks a request's head, so that a proxy before the gateway reads no other requests in a connection's bytes.

llhttp refuses most of what is doubtful: Content-Length beside Transfer-Encoding or twice, a bare CR or LF, a space
before a colon, a folded line, a control character. `check` refuses the rest. A refused request ends its connection:
where the next one would begin is not known then.

llhttp takes the bytes behind a request that offers another protocol (`Upgrade: h2c`, as Java's client sends it) for
that protocol's. A server that does not switch ignores the offer (RFC 9110, 7.8). So another parser goes on with the
body: `BehindHead` keeps the head to itself from which that one knows how long the body is (`same_body`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import httptools

from producers.errors import shown
from producers.gateway.http.errors import Problem

Headers = Iterable[tuple[bytes, bytes]]

#: A name, an IPv4 or an IPv6 address, and perhaps a port (RFC 9112, 3.2). Spaces behind a value are the parser's.
_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._~%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?[ \t]*")
#: A target in absolute form, as a client sends it to a proxy (RFC 9112, 3.2.2): its host and port.
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#@]+)/[^#]*", re.IGNORECASE)
#: A WebSocket handshake's key: 16 bytes (RFC 6455, 4.1).
_KEY: Final = re.compile(rb"[A-Za-z0-9+/]{22}==")
#: Headers that `check` looks at.
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


class Callbacks(Protocol):
    """What a parser calls (httptools)."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


def invalid(message: str) -> Problem:
    """The error for what is no request in HTTP/1.1, or a doubtful one."""
    return Problem(400, message, code="invalid_http")


def check(method: bytes, target: bytes, version: str, headers: Headers) -> None:
    """Raise Problem for a head that others may read otherwise. `headers`: names in lower case."""
    hosts: list[bytes] = []
    codings: list[bytes] = []
    for name, value in headers:
        if name in _CHECKED:
            (hosts if name == b"host" else codings).append(value)
    if version not in ("1.1", "1.0"):
        raise invalid(f"The request is in HTTP/{version}; HTTP/1.1 and HTTP/1.0 are spoken here.")
    if len(hosts) != 1 and (hosts or version == "1.1"):
        raise invalid(f"The request has {len(hosts) or 'no'} Host headers; it must have one.")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise invalid(f"Host is {_shown(hosts[0])}, which is neither a name nor an address.")
    if codings and (version == "1.0" or codings[0].strip(b" \t").lower() != b"chunked"):
        raise invalid(f"Transfer-Encoding is {_shown(codings[0])}; `chunked` alone is taken, in HTTP/1.1.")
    if method == b"CONNECT":
        raise invalid("CONNECT is for proxies, which this gateway is not.")
    if target[0] != _SLASH or b"#" in target:
        _check_target(method, target, hosts)


def _check_target(method: bytes, target: bytes, hosts: Sequence[bytes]) -> None:
    """Check a target that is not simply a path."""
    if target == b"*" and method == b"OPTIONS":
        return
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise invalid(f"The request's target is {_shown(target)}; it must be a path, or begin with http://.")
    if hosts and absolute[1].lower() != hosts[0].strip(b" \t").lower():
        raise invalid(f"The request's target names {_shown(absolute[1])}, and Host {_shown(hosts[0])}.")


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
    """Passes on what a parser calls, but not for the head that it is fed first."""

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
