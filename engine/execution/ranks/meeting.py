"""Connections between the machines of a group, authenticated by a shared secret.

    listener (Meeting) -> caller (join): a nonce of 32 bytes
    caller -> listener: its own nonce; an HMAC-SHA256 of both nonces and the hello; the hello, JSON after its length
    listener -> caller: its own HMAC of the same; from then on the connection belongs to the users of both ends

A caller that does not know the secret is turned away before its hello is parsed. What follows is neither encrypted nor
signed: it is for a private network. No torch: a command's options are checked by it.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from engine.config import EngineConfig
from engine.errors import EngineError, ErrorText, FieldName

logger = logging.getLogger("penstock.engine")

#: Seconds that a machine has, after its hello, for its further connections.
CONNECT_S: Final = 30.0
#: Seconds that a caller may take to prove that it knows the secret.
GREET_S: Final = 5.0
#: The minimum length of a secret, in bytes.
_MIN_SECRET: Final = 16
_NONCE, _PROOF = 32, 32
#: The bytes before a caller's hello: its nonce, its proof, and the hello's length.
_HEAD: Final = _NONCE + _PROOF + 4
#: The maximum number of callers greeted at one time; one more, and the first of them is turned away.
_MAX_CALLERS: Final = 64
#: Seconds after which Meeting.next returns without a caller.
_LOOK_S: Final = 0.5
#: The maximum length of a hello, in bytes.
MAX_HELLO: Final = 1 << 16
#: Seconds after which a connection whose other machine is gone has failed, by the purpose in its hello: those with the
#: lead, which carry little and are always read. Others may be full for longer while the other end computes.
_GONE_S: Final = {"node": 5, "rank": 5}
_GONE_OTHERS_S: Final = 15


def read_secret(path: str) -> bytes:
    """The secret in the file `path`, without white space around it. Raises EngineError: unreadable or too short."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise EngineError(ErrorText.of("{ranks_secret}: {}", error)) from error
    if len(secret) < _MIN_SECRET:
        raise EngineError(
            ErrorText.of("{ranks_secret}: {} has {} bytes; {} is the least", path, len(secret), _MIN_SECRET)
        )
    return secret


def parse_address(address: str, field: str = "ranks_address") -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises EngineError naming `field`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        raise EngineError(
            ErrorText.of("{} is {}; it must be HOST:PORT, such as 10.0.0.5:29500", FieldName(field), repr(address))
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_meeting(config: EngineConfig) -> None:
    """Check the address and the secret of a configuration of several machines. Raises EngineError."""
    if config.nodes > 1:
        parse_address(config.ranks_address)
        read_secret(str(config.ranks_secret))


class Meeting:
    """A port at which this node accepts callers that know the secret. Used by one thread. Callers are greeted side by
    side, so that a silent caller keeps no other waiting."""

    def __init__(self, address: str, secret: bytes, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`address`: HOST:PORT to listen at. `clock`: in seconds. Raises EngineError if the address is malformed or in
        use."""
        host, port = parse_address(address)
        self._secret, self._clock = secret, clock
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=_MAX_CALLERS)
        except OSError as error:
            raise EngineError(ErrorText.of("{ranks_address}={}: {}", repr(address), error)) from error
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        #: The callers that have not yet proved that they know the secret, the oldest first.
        self._callers: dict[socket.socket, _Caller] = {}

    @property
    def port(self) -> int:
        """The port that it listens at."""
        port: int = self._listener.getsockname()[1]
        return port

    def next(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """The next caller that knows the secret, and its hello. None if none has come within half a second."""
        until = self._clock() + _LOOK_S
        while True:
            for key, _ in self._selector.select(max(0.0, until - self._clock())):
                if key.fileobj is self._listener:
                    self._accept()
                elif (caller := key.data) in self._callers.values() and (hello := self._hello_of(caller)) is not None:
                    return caller.connection, hello
            # Only after their bytes were read, because this thread may itself have been kept waiting.
            now = self._clock()
            for caller in [each for each in self._callers.values() if now > each.until]:
                self._turn_away(caller, "it says nothing, or too little")
            if now >= until:
                return None

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it is gone again
            return
        if len(self._callers) >= _MAX_CALLERS:
            self._turn_away(next(iter(self._callers.values())), "too many others call")
        connection.setblocking(False)
        caller = _Caller(connection, address[0], self._clock() + GREET_S)
        self._callers[connection] = caller
        self._selector.register(connection, selectors.EVENT_READ, caller)
        try:
            connection.sendall(caller.nonce)  # a new connection has room for it
        except OSError as error:
            self._turn_away(caller, str(error))

    def _hello_of(self, caller: _Caller) -> dict[str, Any] | None:
        """The caller's hello, once all of it has come and the caller has proved that it knows the secret."""
        connection = caller.connection
        try:
            while caller.lacking:
                more = connection.recv(caller.lacking)
                if not more:
                    raise OSError("the connection is closed")
                caller.content += more
                if caller.size > MAX_HELLO:
                    raise OSError(f"it says {caller.size} bytes")
            theirs, proof, content = caller.parts()
            if not hmac.compare_digest(proof, _proof(self._secret, b"node", caller.nonce, theirs, content)):
                raise OSError("it does not know the secret")
            connection.sendall(_proof(self._secret, b"lead", theirs, caller.nonce, content))
            hello = json.loads(content)
            if not isinstance(hello, dict):
                raise OSError(f"it sent {hello!r:.100} in place of a JSON object")
            _keep_alive(connection, hello)
        except BlockingIOError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._turn_away(caller, str(error))
            return None
        self._forget(caller)
        return hello

    def _turn_away(self, caller: _Caller, why: str) -> None:
        logger.warning("A caller at the ranks' port, %s, is turned away: %s", caller.host, why)
        self._forget(caller)
        caller.connection.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        del self._callers[caller.connection]

    def close(self) -> None:
        for connection in self._callers:
            connection.close()
        self._selector.close()
        self._listener.close()


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection whose other end is still to prove that it knows the secret."""

    connection: socket.socket
    host: str
    until: float
    """When it is turned away."""
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE))
    content: bytes = b""

    @property
    def size(self) -> int:
        """The length of its hello in bytes; 0 until that has come."""
        return int.from_bytes(self.content[_NONCE + _PROOF : _HEAD], "big") if len(self.content) >= _HEAD else 0

    @property
    def lacking(self) -> int:
        """The number of bytes still to come, as far as that is known."""
        return (_HEAD if len(self.content) < _HEAD else _HEAD + self.size) - len(self.content)

    def parts(self) -> tuple[bytes, bytes, bytes]:
        """Its nonce, its proof, and its hello."""
        return self.content[:_NONCE], self.content[_NONCE : _NONCE + _PROOF], self.content[_HEAD:]


def join(
    address: tuple[str, int],
    secret: bytes,
    hello: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    timeout_s: float,
    peer: str,
) -> socket.socket:
    """Connect to a Meeting at `address` within `timeout_s` seconds, and send it `hello`, or what that returns once it
    is connected. Raises EngineError naming `peer` if it is not reached or does not know the secret."""
    connection = _connected(address, timeout_s, peer)
    told = hello() if callable(hello) else hello
    content = json.dumps(told).encode()
    try:
        # The listener may still be busy with others, or with its own start.
        until = time.monotonic() + max(GREET_S, min(timeout_s, CONNECT_S))
        theirs, nonce = _exactly(connection, _NONCE, until), secrets.token_bytes(_NONCE)
        proof = _proof(secret, b"node", theirs, nonce, content)
        connection.sendall(nonce + proof + len(content).to_bytes(4, "big") + content)
        expected = _proof(secret, b"lead", nonce, theirs, content)
        if not hmac.compare_digest(_exactly(connection, _PROOF, until), expected):
            raise OSError("it does not know the secret")
        _keep_alive(connection, told)
    except OSError as error:
        connection.close()
        raise EngineError(
            f"{peer} at {address[0]}:{address[1]} turns this machine away, or is something else: {error}; have both "
            "the same secret?"
        ) from error
    return connection


def _connected(address: tuple[str, int], timeout_s: float, peer: str) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection(address, timeout=max(0.1, min(GREET_S, deadline - time.monotonic())))
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{peer} at {address[0]}:{address[1]} is not reached in {timeout_s:.0f} s ({error}): does it run, "
                    "and is there a firewall between the machines?"
                ) from error
            time.sleep(0.2)


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


def _exactly(connection: socket.socket, length: int, until: float) -> bytes:
    content = b""
    while len(content) < length:
        connection.settimeout(max(0.001, until - time.monotonic()))
        more = connection.recv(length - len(content))
        if not more:
            raise OSError("the connection is closed")
        content += more
    return content


def _keep_alive(connection: socket.socket, hello: Mapping[str, Any]) -> None:
    """Make a connection fail some seconds after its other machine has gone without a word: `_GONE_S`."""
    limit = _GONE_S.get(str(hello.get("purpose")), _GONE_OTHERS_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The last bounds, on Linux, probes of an idle connection as well as data that nobody acknowledges.
    probes = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", limit - 2))
    for option, value in (*probes, ("TCP_USER_TIMEOUT", limit * 1000)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def shut(connection: socket.socket) -> None:
    """End a connection at both ends, and all waiting for it; it is still to be closed."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
