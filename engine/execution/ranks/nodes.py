"""Stages on several machines, the nodes: how these meet, and the links between them.

    node K -> the lead, which listens: proves that it knows the secret, says what it has; is checked, and told its part
           -> the lead: a socket for each of its ranks; the last node: the link back from the last stage
           -> node K - 1, or the lead: the link into its first stage

Who does not know the secret is turned away before anything that it says is read. What follows is neither encrypted nor
signed: it is for a network of one's own. A node has whole stages: sums over ranks stay within a machine.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from engine.errors import DeviceLostError, EngineError, ErrorText, message_of
from engine.execution.threads import threads_of_each
from engine.kernels.native import load_library
from engine.kernels.native.exchange import shared_memory
from engine.kernels.native.library import VERSION
from engine.models.shares import files_of
from engine.text.checkpoint import model_version
from engine.text.gguf import absolute

logger = logging.getLogger("penstock.engine")

#: Seconds in which all nodes are to come, and in which the sockets between them are to be there after that.
JOIN_S: Final = 300.0
CONNECT_S: Final = 30.0
#: Seconds that a caller may take to prove that it knows the secret.
_GREET_S: Final = 5.0
#: The most seconds between the clocks of two nodes.
_CLOCKS_S: Final = 5.0
#: The least bytes of a secret.
_LEAST_SECRET: Final = 16
_NONCE, _PROOF = 32, 32
#: The bytes before what a caller says: its nonce, its proof, and how many follow.
_HEAD: Final = _NONCE + _PROOF + 4
#: The most callers that are greeted at one time; one more, and the first of them is turned away.
_MOST_CALLERS: Final = 64
#: Seconds after which a Meeting lets its user look at other things.
_LOOK_S: Final = 0.5
#: The most bytes of what a caller says, and of a message.
_MOST_SAID, _MOST_MESSAGE = 1 << 16, 1 << 36
_LENGTH = struct.Struct("=q")


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


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises EngineError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        raise EngineError(f"{address!r} is not HOST:PORT, such as 10.0.0.5:29500")
    return host.removeprefix("[").removesuffix("]"), int(port)


class SocketLink:
    """A Link between machines."""

    def __init__(self, end: socket.socket) -> None:
        #: Raises DeviceLostError with the reason why the link has failed, if that can be known.
        self.explain: Callable[[], None] = lambda: None
        self.failed = False
        self._end = end

    def send(self, message: bytes | memoryview) -> None:
        try:
            self._end.sendall(_LENGTH.pack(len(message)))
            self._end.sendall(message)
        except OSError as error:
            self._lost(error)

    def receive(self) -> memoryview:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if not 0 <= length <= _MOST_MESSAGE:
            self._lost(OSError(f"a message of {length} bytes"))
        return self._read(length)

    def fail(self) -> None:
        self.failed = True
        shut(self._end)

    def _read(self, length: int) -> memoryview:
        content = memoryview(bytearray(length))
        done = 0
        while done < length:
            try:
                read = self._end.recv_into(content[done:])
            except OSError as error:
                self._lost(error)
            if not read:
                self._lost(OSError("it is closed"))
            done += read
        return content

    def _lost(self, error: OSError) -> NoReturn:
        self.fail()
        self.explain()
        raise DeviceLostError(f"the link to another machine is lost: {error}") from error


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
            now = time.monotonic()
            for caller in [each for each in self._callers.values() if now > each.until]:
                self._turn_away(caller, "it says nothing, or too little")
            for key, _ in self._selector.select(max(0.0, until - now)):
                if key.fileobj is self._listener:
                    self._accept()
                elif (caller := key.data) in self._callers.values() and (said := self._heard(caller)) is not None:
                    return caller.end, said
            if time.monotonic() >= until:
                return None

    def _accept(self) -> None:
        try:
            end, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it is gone again
            return
        if len(self._callers) >= _MOST_CALLERS:
            self._turn_away(next(iter(self._callers.values())), "too many others call")
        end.setblocking(False)
        caller = _Caller(end, address[0], time.monotonic() + _GREET_S)
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
            more = end.recv(caller.lacking)
            if not more:
                raise OSError("the connection is closed")
            caller.content += more
            if caller.size > _MOST_SAID:
                raise OSError(f"it says {caller.size} bytes")
            if caller.lacking:
                return None
            theirs, proof, said = caller.parts()
            if not hmac.compare_digest(proof, _proof(self._secret, b"node", caller.nonce, theirs, said)):
                raise OSError("it does not know the secret")
            end.sendall(_proof(self._secret, b"lead", theirs, caller.nonce, said))
            _keep_alive(end)
            told: dict[str, Any] = json.loads(said)
        except BlockingIOError:
            return None
        except (OSError, ValueError) as error:
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


def join(address: tuple[str, int], secret: bytes, said: Mapping[str, Any], seconds: float, who: str) -> socket.socket:
    """Connect to a Meeting, and tell it `said`; try for so long. Raises EngineError naming `who` is not reached."""
    end, content = _connected(address, seconds, who), json.dumps(said).encode()
    try:
        # Who listens may still be busy with others, or with what comes before.
        until = time.monotonic() + max(_GREET_S, min(seconds, CONNECT_S))
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
            return socket.create_connection(address, timeout=max(0.1, min(_GREET_S, deadline - time.monotonic())))
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


def traits_of(folder: Path) -> dict[str, Any]:
    """What is to be the same on all nodes, by name; the clock within some seconds."""
    library = load_library()
    return {
        "release": f"kernels {VERSION}, torch {torch.__version__}",
        "instruction set": "" if library is None else library.isa,
        "model's files": f"{model_version(absolute(folder))} {files_of(folder, dates=False)[:12]}",
        "clock": time.time(),
    }


def differing(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first trait in which a node differs from the lead, in words. Empty if there is none."""
    for name, value in own.items():
        other = theirs.get(name)
        if name == "clock":
            off = abs(other - value) if isinstance(other, float) else _CLOCKS_S + 1
            if not off <= _CLOCKS_S:
                return f"its clock is {off:.0f} s off the lead's; at most {_CLOCKS_S:.0f} s are served"
        elif other != value:
            return f"its {name} is {other!r}, and the lead's {value!r}"
    return ""


@dataclass(slots=True)
class Joined:
    """The sockets to the other nodes."""

    nodes: dict[int, socket.socket] = field(default_factory=dict)
    """On which each node is told its part, and tells how its ranks end."""
    ranks: dict[int, socket.socket] = field(default_factory=dict)
    after: socket.socket | None = None
    """The link from this node's last stage to the next."""
    back: socket.socket | None = None

    def close(self) -> None:
        """Tell the nodes that all is done."""
        for end in self.nodes.values():
            with suppress(OSError):
                end.sendall(b'{"closed": true}\n')
            shut(end)


def gather(
    meeting: Meeting,
    nodes: int,
    ranks: int,
    traits: Mapping[str, Any],
    part: Mapping[str, Any],
    ended: Callable[[], bool],
) -> Joined:
    """Wait for the other nodes, with `ranks` ranks each, and all their sockets. `part`: what each is told. `ended`:
    whether to give up. Raises EngineError naming who has not come, or differs."""
    joined, ports = Joined(), dict[int, int]()
    deadline = time.monotonic() + JOIN_S
    try:
        while len(joined.nodes) < nodes - 1:
            if (arrived := _next(meeting, deadline, ended)) is None:
                missing = [str(node) for node in range(1, nodes) if node not in joined.nodes]
                raise EngineError(
                    f"node {' and '.join(missing)} of {nodes} has not come to port {meeting.port} in {JOIN_S:.0f} s: "
                    "does it run, and is there a firewall between the machines?"
                )
            end, said = arrived
            node = said.get("node")
            why = differing({**traits, "clock": time.time()}, said.get("traits") or {})
            if said.get("purpose") != "node" or not isinstance(node, int) or not 0 < node < nodes:
                why = f"it is node {node!r}; there are 1 to {nodes - 1}"
            elif node in joined.nodes:
                why = f"another machine is node {node} already"
            elif not why:
                joined.nodes[node], ports[node] = end, said.get("port", 0)
                continue
            with suppress(OSError):
                end.sendall(json.dumps({"refused": why}).encode() + b"\n")
            address = _peer(end)
            end.close()
            raise EngineError(f"node {node!r} of {nodes} ({address}) does not fit: {why}")
        for node, end in joined.nodes.items():
            link = None if node == 1 else (_peer(joined.nodes[node - 1]), ports[node - 1])
            end.sendall(json.dumps({**part, "link": link}).encode() + b"\n")
        deadline = time.monotonic() + CONNECT_S + _GREET_S
        wanted = set(range(ranks, nodes * ranks))
        while wanted or joined.after is None or joined.back is None:
            _look_for_errors(joined)
            if (arrived := _next(meeting, deadline, ended)) is None:
                lacks = [f"rank {rank}" for rank in sorted(wanted)] or ["a link"]
                raise EngineError(
                    f"{', '.join(lacks)}: not connected in {CONNECT_S + _GREET_S:.0f} s though its machine has come"
                )
            end, said = arrived
            purpose, rank = said.get("purpose"), said.get("rank")
            if purpose == "rank" and rank in wanted:
                wanted.discard(rank)
                joined.ranks[rank] = end
            elif purpose == "link" and joined.after is None:
                joined.after = end
            elif purpose == "back" and joined.back is None:
                joined.back = end
            else:
                end.close()
    except BaseException:
        for each in (*joined.nodes.values(), *joined.ranks.values(), joined.after, joined.back):
            if each is not None:
                each.close()
        raise
    return joined


def _next(meeting: Meeting, deadline: float, ended: Callable[[], bool]) -> tuple[socket.socket, dict[str, Any]] | None:
    while time.monotonic() < deadline:
        if ended():
            raise EngineError("the engine is closed")
        if (arrived := meeting.next()) is not None:
            return arrived
    return None


def _look_for_errors(joined: Joined) -> None:
    """Raise EngineError with what a node says that goes wrong there."""
    for node, end in joined.nodes.items():
        end.setblocking(False)
        try:
            said = end.recv(_MOST_SAID)
        except BlockingIOError:
            continue
        except OSError as error:
            raise EngineError(f"node {node} is lost: {error}") from error
        finally:
            end.setblocking(True)
        text = said.decode(errors="replace").strip()
        raise EngineError(f"node {node}: {text or 'it has ended'}")


def _peer(end: socket.socket) -> str:
    try:
        host: str = end.getpeername()[0]
    except OSError:
        return "gone"
    return host


def start_follower(control: socket.socket, local: Mapping[str, Any], descriptors: list[int]) -> subprocess.Popen[bytes]:
    """Start the process of a rank of this machine. `local`: see follower.py. Raises OSError."""
    told = json.dumps({**local, "socket": control.fileno(), "parent": os.getpid()})
    command = [sys.executable, "-P", "-m", "engine.execution.ranks.follower", told]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(control.fileno(), *descriptors))


class Node:
    """A machine other than the lead's: the processes of its ranks, from the meeting to their end."""

    def __init__(
        self, folder: Path, lead: str, node: int, secret: bytes, *, address: str = "", threads: int | None = None
    ) -> None:
        """Raises EngineError. `lead`, `address`: HOST:PORT; of the lead, and to listen at for the node after this."""
        self._folder, self._lead, self._secret, self._node = folder, parse_address(lead), secret, node
        self._threads = threads
        self._meeting = Meeting(address, secret) if address else None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._told: socket.socket | None = None
        self._signals = 0

    def run(self) -> bool:
        """Meet, compute until the lead closes the group, and end all processes. Returns whether the lead closed it;
        otherwise it, a rank or a node was lost. Raises EngineError if the group does not come about."""
        said = {"purpose": "node", "node": self._node, "traits": traits_of(self._folder)}
        said["port"] = 0 if self._meeting is None else self._meeting.port
        self._told = join(self._lead, self._secret, said, JOIN_S, "the lead")
        lines = self._told.makefile("rb")
        part = json.loads(lines.readline(_MOST_SAID) or b"{}")
        if "refused" in part or not part:
            raise EngineError(f"the lead refuses this machine: {part.get('refused', 'it has closed the connection')}")
        for ignored in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError):  # not the main thread
                signal.signal(ignored, self._on_signal)
        try:
            self._start(part)
        except (EngineError, OSError) as error:
            with suppress(OSError):
                self._told.sendall(
                    message_of(error).encode() if isinstance(error, EngineError) else str(error).encode()
                )
            raise
        try:
            return self._wait()
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        if self._signals > 1 and self._told is not None:
            shut(self._told)
            return
        logger.warning("%s: the lead ends its group; a second signal ends this part now", signal.Signals(number).name)

    def _start(self, part: Mapping[str, Any]) -> None:
        ranks, stages, nodes = part["ranks"], part["stages"], part["nodes"]
        own = stages // nodes
        first = self._node * own
        every = range(first * ranks, (first + own) * ranks)
        controls = {rank: self._join("rank", self._lead, "the lead", rank=rank) for rank in every}
        if part["link"] is None:
            before = self._join("link", self._lead, "the lead")
        else:
            host, port = part["link"]
            before = self._join("link", (host, port), f"node {self._node - 1}")
        after = self._join("back", self._lead, "the lead") if self._node + 1 == nodes else self._following()
        memories = [shared_memory(ranks) for _ in range(own)]
        inner = [shared_memory(2) for _ in range(own - 1)]
        links = [("socket", before.fileno()), *(("memory", each) for each in inner), ("socket", after.fileno())]
        threads = max(1, (self._threads or threads_of_each(1)) // len(every))
        local = {"folder": str(absolute(self._folder)), "files": files_of(self._folder), "threads": threads}
        for i, rank in enumerate(every):
            stage, of_stage = divmod(i, ranks)
            used = [links[stage], links[stage + 1]] if not of_stage else []
            mine = {**local, "index": i, "processes": len(every), "memory": memories[stage], "links": used}
            descriptors = [memories[stage], *(number for _, number in used)]
            self._processes[rank] = start_follower(controls[rank], mine, descriptors)
        for end in (*controls.values(), before, after):
            end.close()
        for descriptor in memories + inner:
            os.close(descriptor)
        logger.info("Ranks %d to %d compute stages %d to %d", every[0], every[-1], first, first + own - 1)

    def _join(self, purpose: str, address: tuple[str, int], who: str, **more: Any) -> socket.socket:
        return join(address, self._secret, {"purpose": purpose, "node": self._node, **more}, CONNECT_S, who)

    def _following(self) -> socket.socket:
        if self._meeting is None:
            raise EngineError(ErrorText.of("node {} needs {ranks_address}, for the node after it", self._node))
        arrived = _next(self._meeting, time.monotonic() + CONNECT_S, lambda: False)
        if arrived is None:
            raise EngineError(f"node {self._node + 1} has not come to node {self._node} in {CONNECT_S:.0f} s")
        self._meeting.close()
        return arrived[0]

    def _wait(self) -> bool:
        told = self._told
        assert told is not None
        said, reported = b"", set[int]()
        with selectors.DefaultSelector() as selector:
            selector.register(told, selectors.EVENT_READ)
            while True:
                if selector.select(0.2):
                    try:
                        more = told.recv(_MOST_SAID)
                    except OSError:
                        more = b""
                    said = (said + more)[-_MOST_SAID:]
                    if not more:
                        return b'"closed"' in said
                for rank, process in self._processes.items():
                    if rank not in reported and (status := process.poll()) is not None:
                        reported.add(rank)
                        with suppress(OSError):
                            told.sendall(json.dumps({"rank": rank, "end": end_of(status)}).encode() + b"\n")


def end_of(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "its socket is closed"
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was killed by signal {-status}"
