"""How machines meet: one listens, others connect, and each proves to the other that it knows the secret.

Who does not know it is turned away before anything that it says is read. What follows is neither encrypted nor signed:
it is for a network of one's own. No torch: a command's options are checked by it.
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

#: Seconds in which a machine that has come is to make its further connections.
CONNECT_S: Final = 30.0
#: Seconds that a caller may take to prove that it knows the secret.
GREET_S: Final = 5.0
#: The least bytes of a secret.
_LEAST_SECRET: Final = 16
_NONCE, _PROOF = 32, 32
#: The bytes before what a caller says: its nonce, its proof, and how many follow.
_HEAD: Final = _NONCE + _PROOF + 4
#: The most callers that are greeted at one time; one more, and the first of them is turned away.
_MOST_CALLERS: Final = 64
#: Seconds after which a Meeting lets its user look at other things.
_LOOK_S: Final = 0.5
#: The most bytes of what a caller says.
MOST_SAID: Final = 1 << 16


def read_secret(path: str) -> bytes:
    """The secret in a file. Raises EngineError."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise EngineError(ErrorText.of("{ranks_secret}: {}", error)) from error
    if len(secret) < _LEAST_SECRET:
        raise EngineError(
            ErrorText.of("{ranks_secret}: {} has {} bytes; {} is the least", path, len(secret), _LEAST_SECRET)
        )
    return secret


def parse_address(address: str, field: str = "ranks_address") -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises EngineError, which names the field."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        raise EngineError(
            ErrorText.of("{} is {}; it must be HOST:PORT, such as 10.0.0.5:29500", FieldName(field), repr(address))
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_meeting(config: EngineConfig) -> None:
    """Raise EngineError if the settings of several machines cannot be used."""
    if config.nodes > 1:
        parse_address(config.ranks_address)
        read_secret(str(config.ranks_secret))


class Meeting:
    """A port on which this node waits for others, who know the secret. Used by one thread. Callers are greeted side by
    side, so that one who says nothing keeps nobody waiting."""

    def __init__(self, address: str, secret: bytes) -> None:
        """Raises EngineError."""
        host, port = parse_address(address)
        self._secret = secret
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=_MOST_CALLERS)
        except OSError as error:
            raise EngineError(ErrorText.of("{ranks_address}={}: {}", repr(address), error)) from error
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        #: Who has not yet proved that it knows the secret, the oldest first.
        self._callers: dict[socket.socket, _Caller] = {}

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def next(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """The next caller who knows the secret, and what it says. None if there is none for half a second."""
        until = time.monotonic() + _LOOK_S
        while True:
            for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
                if key.fileobj is self._listener:
                    self._accept()
                elif (caller := key.data) in self._callers.values() and (said := self._heard(caller)) is not None:
                    return caller.end, said
            # After what they have said was read: this thread may have had to wait longer than they may.
            now = time.monotonic()
            for caller in [each for each in self._callers.values() if now > each.until]:
                self._turn_away(caller, "it says nothing, or too little")
            if now >= until:
                return None

    def _accept(self) -> None:
        try:
            end, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it is gone again
            return
        if len(self._callers) >= _MOST_CALLERS:
            self._turn_away(next(iter(self._callers.values())), "too many others call")
        end.setblocking(False)
        caller = _Caller(end, address[0], time.monotonic() + GREET_S)
        self._callers[end] = caller
        self._selector.register(end, selectors.EVENT_READ, caller)
        try:
            end.sendall(caller.nonce)  # a new connection has room for it
        except OSError as error:
            self._turn_away(caller, str(error))

    def _heard(self, caller: _Caller) -> dict[str, Any] | None:
        """What a caller says who has now said all of it and knows the secret."""
        end = caller.end
        try:
            while caller.lacking:
                more = end.recv(caller.lacking)
                if not more:
                    raise OSError("the connection is closed")
                caller.content += more
                if caller.size > MOST_SAID:
                    raise OSError(f"it says {caller.size} bytes")
            theirs, proof, said = caller.parts()
            if not hmac.compare_digest(proof, _proof(self._secret, b"node", caller.nonce, theirs, said)):
                raise OSError("it does not know the secret")
            end.sendall(_proof(self._secret, b"lead", theirs, caller.nonce, said))
            _keep_alive(end)
            told = json.loads(said)
            if not isinstance(told, dict):
                raise OSError(f"it says {told!r:.100}")
        except BlockingIOError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._turn_away(caller, str(error))
            return None
        self._forget(caller)
        return told

    def _turn_away(self, caller: _Caller, why: str) -> None:
        logger.warning("A caller at the ranks' port, %s, is turned away: %s", caller.host, why)
        self._forget(caller)
        caller.end.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.end)
        del self._callers[caller.end]

    def close(self) -> None:
        for end in self._callers:
            end.close()
        self._selector.close()
        self._listener.close()


@dataclass(slots=True, eq=False)
class _Caller:
    """Someone who is to prove that it knows the secret."""

    end: socket.socket
    host: str
    until: float
    """When it is turned away."""
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE))
    content: bytes = b""

    @property
    def size(self) -> int:
        """The bytes of what it says after its proof; 0 until that is known."""
        return int.from_bytes(self.content[_NONCE + _PROOF : _HEAD], "big") if len(self.content) >= _HEAD else 0

    @property
    def lacking(self) -> int:
        """The bytes that are still to come, as far as that is known."""
        return (_HEAD if len(self.content) < _HEAD else _HEAD + self.size) - len(self.content)

    def parts(self) -> tuple[bytes, bytes, bytes]:
        """Its nonce, its proof, and what it says."""
        return self.content[:_NONCE], self.content[_NONCE : _NONCE + _PROOF], self.content[_HEAD:]


def join(
    address: tuple[str, int],
    secret: bytes,
    said: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    seconds: float,
    who: str,
) -> socket.socket:
    """Connect to a Meeting, and tell it `said`, or what that returns then; try for so long. Raises EngineError naming
    `who` is not reached."""
    end = _connected(address, seconds, who)
    content = json.dumps(said() if callable(said) else said).encode()
    try:
        # Who listens may still be busy with others, or with what comes before.
        until = time.monotonic() + max(GREET_S, min(seconds, CONNECT_S))
        nonce, own = _exactly(end, _NONCE, until), secrets.token_bytes(_NONCE)
        end.sendall(own + _proof(secret, b"node", nonce, own, content) + len(content).to_bytes(4, "big") + content)
        if not hmac.compare_digest(_exactly(end, _PROOF, until), _proof(secret, b"lead", own, nonce, content)):
            raise OSError("it does not know the secret")
        _keep_alive(end)
    except OSError as error:
        end.close()
        raise EngineError(
            f"{who} at {address[0]}:{address[1]} turns this machine away, or is something else: {error}; have both the "
            "same secret?"
        ) from error
    return end


def _connected(address: tuple[str, int], seconds: float, who: str) -> socket.socket:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(address, timeout=max(0.1, min(GREET_S, deadline - time.monotonic())))
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{who} at {address[0]}:{address[1]} is not reached in {seconds:.0f} s ({error}): does it run, and "
                    "is there a firewall between the machines?"
                ) from error
            time.sleep(0.2)


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


def _exactly(end: socket.socket, length: int, until: float) -> bytes:
    content = b""
    while len(content) < length:
        end.settimeout(max(0.001, until - time.monotonic()))
        more = end.recv(length - len(content))
        if not more:
            raise OSError("the connection is closed")
        content += more
    return content


def _keep_alive(end: socket.socket) -> None:
    """A machine that is cut off is noticed within some 15 seconds."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 15_000)):
        if hasattr(socket, option):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
