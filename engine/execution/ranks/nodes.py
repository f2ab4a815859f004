"""Stages on several machines, the nodes: how these meet, and the links between them.

    node K -> the lead, which listens: proves that it knows the secret, says what it has; is checked, and told its part
           -> the lead: a socket for each of its ranks; the last node: the link back from the last stage
           -> node K - 1, or the lead: the link into its first stage
           -> where there is one stage: to each node before it, and the lead, a socket for each of its ranks' sums

A node has whole stages; or all nodes have parts of a single one, and each has a copy of the memory of its sums.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from engine.errors import DeviceLostError, EngineError, ErrorText, message_of
from engine.execution.ranks.meeting import CONNECT_S, GREET_S, MOST_SAID, Meeting, join, shut
from engine.execution.threads import threads_of_each
from engine.kernels.native import load_library
from engine.kernels.native.exchange import Exchange, Share, shared_memory
from engine.kernels.native.library import VERSION
from engine.models.shares import files_of
from engine.text.checkpoint import model_version
from engine.text.gguf import absolute

logger = logging.getLogger("penstock.engine")

#: Seconds in which all nodes are to come.
JOIN_S: Final = 300.0
#: The most seconds between the clocks of two nodes.
_CLOCKS_S: Final = 5.0
#: The most bytes of a message.
_MOST_MESSAGE = 1 << 36
_LENGTH = struct.Struct("=q")


class Mirror:
    """Keeps the copies alike that two machines have of the memory of an exchange: what rank `own`, of this machine,
    writes goes to the other, and what rank `other` writes there comes here. If the connection is lost, both fail."""

    def __init__(self, exchange: Exchange, own: int, other: int, end: socket.socket) -> None:
        """`exchange`: any rank's end, which then belongs to its threads, too."""
        self._threads = [
            threading.Thread(target=way, args=(rank, end), name=f"penstock-rank-{rank}", daemon=True)
            for way, rank in ((exchange.carry, own), (exchange.deliver, other))
        ]
        self._end = end
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait until both ways have ended, as they do once the exchange has failed."""
        for thread in self._threads:
            thread.join()
        self._end.close()


class SocketLink:
    """A Link between machines. From the first `receive` on, messages are read as they come: a connection whose other
    end reads nothing for 15 s is cut off (meeting.py), and a step may take longer. The lead bounds how many come."""

    def __init__(self, end: socket.socket) -> None:
        #: Raises DeviceLostError with the reason why the link has failed, if that can be known.
        self.explain: Callable[[], None] = lambda: None
        self.failed = False
        self._end = end
        self._arrived: queue.SimpleQueue[memoryview | Exception] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def send(self, message: bytes | memoryview) -> None:
        try:
            self._end.sendall(_LENGTH.pack(len(message)))
            self._end.sendall(message)
        except OSError as error:
            self._lost(error)

    def receive(self) -> memoryview:
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_all, name="penstock-link", daemon=True)
            self._reader.start()
        arrived = self._arrived.get()
        if isinstance(arrived, Exception):
            self._arrived.put(arrived)
            self._lost(arrived)
        return arrived

    def fail(self) -> None:
        self.failed = True
        shut(self._end)

    def _read_all(self) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
                if not 0 <= length <= _MOST_MESSAGE:
                    raise OSError(f"a message of {length} bytes")
                self._arrived.put(self._read(length))
        except (OSError, MemoryError) as error:
            self._arrived.put(error)

    def _read(self, length: int) -> memoryview:
        content = memoryview(bytearray(length))
        done = 0
        while done < length:
            read = self._end.recv_into(content[done:])
            if not read:
                raise OSError("it is closed")
            done += read
        return content

    def _lost(self, error: Exception) -> NoReturn:
        self.fail()
        self.explain()
        raise DeviceLostError(f"the link to another machine is lost: {error}") from error


@cache
def _release() -> str:
    """The package's version, with a digest of the engine's code: a checkout's version stays while its code changes."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes() + b"\0")
    try:
        number = version("penstock")
    except PackageNotFoundError:  # copied into another program, say
        number = "unknown"
    return f"{number} (code {digest.hexdigest()[:8]})"


def traits_of(folder: Path) -> dict[str, Any]:
    """What is to be the same on all nodes, by name; the clock within some seconds."""
    library = load_library()
    return {
        "release": f"penstock {_release()}, kernels {VERSION}, torch {torch.__version__}",
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
    sums: dict[int, dict[int, socket.socket]] = field(default_factory=dict)
    """Of each node, by the index of a rank among those of its machine: to the sums of the rank of this index there."""

    def close(self, *, lost: bool) -> None:
        """End the nodes. Unless the group is `lost`, tell them that all is done."""
        for end in self.nodes.values():
            if not lost:
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
    *,
    staged: bool = True,
) -> Joined:
    """Wait for the other nodes, with `ranks` ranks each, and all their sockets. `part`: what each is told. `ended`:
    whether to give up. `staged`: they have stages; else all have ranks of a single one. Raises EngineError naming who
    has not come, or differs."""
    joined, ports = Joined(), dict[int, int]()
    deadline = time.monotonic() + JOIN_S
    try:
        while len(joined.nodes) < nodes - 1:
            if (arrived := _next(meeting, deadline, ended)) is None:
                _forget_lost(joined)
                raise EngineError(
                    f"node {_missing(joined, nodes)} of {nodes} has not come to port {meeting.port} in {JOIN_S:.0f} s: "
                    "does it run, and is there a firewall between the machines?"
                )
            end, said = arrived
            _forget_lost(joined)
            if said.get("purpose") != "node":  # of a group that has ended meanwhile
                _refuse(end, "it comes before its machine")
                continue
            node = said.get("node")
            why = differing({**traits, "clock": time.time()}, said.get("traits") or {})
            if not isinstance(node, int) or not 0 < node < nodes:
                why = f"it is node {node!r}; there are 1 to {nodes - 1}"
            elif node in joined.nodes:
                # Of two machines one has a wrong number, or the other one's end is not noticed yet: it may call again.
                why = f"another machine, {_peer(joined.nodes[node])}, is node {node} already"
                logger.warning("A machine that calls itself node %s, %s, is turned away: %s", node, _peer(end), why)
                _refuse(end, why)
                continue
            elif not why:
                joined.nodes[node], ports[node] = end, said.get("port", 0)
                lacking = _missing(joined, nodes) or "none"
                logger.info("Node %s of %s (%s) has come; to come: %s", node, nodes, _peer(end), lacking)
                continue
            address = _peer(end)
            _refuse(end, why)
            raise EngineError(f"node {node!r} of {nodes} ({address}) does not fit: {why}")
        for node, end in joined.nodes.items():
            link = None if node == 1 else (_peer(joined.nodes[node - 1]), ports[node - 1])
            peers = [(_peer(joined.nodes[other]), ports[other]) for other in range(1, node)]
            end.sendall(json.dumps({**part, "link": link, "peers": peers}).encode() + b"\n")
        deadline = time.monotonic() + CONNECT_S + GREET_S
        wanted = set(range(ranks, nodes * ranks))
        sums: set[tuple[Any, Any]] = set() if staged else {(node, own) for node in joined.nodes for own in range(ranks)}
        while wanted or sums or (staged and (joined.after is None or joined.back is None)):
            _look_for_errors(joined)
            if (arrived := _next(meeting, deadline, ended)) is None:
                lacks = [f"rank {rank}" for rank in sorted(wanted)] or ["a link"]
                raise EngineError(
                    f"{', '.join(lacks)}: not connected in {CONNECT_S + GREET_S:.0f} s though its machine has come"
                )
            end, said = arrived
            purpose, node, rank = said.get("purpose"), said.get("node"), said.get("rank")
            if purpose == "rank" and isinstance(rank, int) and rank in wanted:
                wanted.discard(rank)
                joined.ranks[rank] = end
            elif purpose == "sums" and isinstance(node, int) and isinstance(rank, int) and (node, rank) in sums:
                sums.discard((node, rank))
                joined.sums.setdefault(node, {})[rank] = end
            elif purpose == "link" and joined.after is None:
                joined.after = end
            elif purpose == "back" and joined.back is None:
                joined.back = end
            else:
                end.close()
    except BaseException:
        of_sums = (end for ends in joined.sums.values() for end in ends.values())
        for each in (*joined.nodes.values(), *joined.ranks.values(), *of_sums, joined.after, joined.back):
            if each is not None:
                each.close()
        raise
    return joined


def _missing(joined: Joined, nodes: int) -> str:
    return " and ".join(str(node) for node in range(1, nodes) if node not in joined.nodes)


def _refuse(end: socket.socket, why: str) -> None:
    with suppress(OSError):
        end.sendall(json.dumps({"refused": why}).encode() + b"\n")
    end.close()


def _forget_lost(joined: Joined) -> None:
    """Forget nodes that have ended: until all are there, each may come again."""
    for node, end in list(joined.nodes.items()):
        if _ends(end):
            logger.warning("Node %s (%s) has ended before all have come; it is waited for again", node, _peer(end))
            end.close()
            del joined.nodes[node]


def _ends(end: socket.socket) -> bool:
    """Whether the other end is closed or lost. A node says nothing before it is told its part."""
    end.setblocking(False)
    try:
        return not end.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        end.setblocking(True)


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
            said = end.recv(MOST_SAID)
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
        self,
        folder: Path,
        lead: tuple[str, int],
        node: int,
        secret: bytes,
        *,
        listen: str = "",
        threads: int | None = None,
    ) -> None:
        """Raises EngineError. `lead`: its host and port. `listen`: HOST:PORT at which the node after this comes."""
        self._folder, self._lead, self._secret, self._node = folder, lead, secret, node
        self._threads = threads
        self._meeting = Meeting(listen, secret) if listen else None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._exchange: Exchange | None = None
        self._mirrors: list[Mirror] = []
        self._told: socket.socket | None = None
        self._signals = 0

    def run(self) -> bool:
        """Meet, compute until the lead closes the group, and end all processes. Returns whether the lead closed it;
        otherwise it, a rank or a node was lost. Raises EngineError if the group does not come about."""
        traits, began = traits_of(self._folder), time.monotonic()
        port = 0 if self._meeting is None else self._meeting.port

        def said() -> dict[str, Any]:
            clock = traits["clock"] + time.monotonic() - began  # the lead may start long after this
            return {"purpose": "node", "node": self._node, "traits": {**traits, "clock": clock}, "port": port}

        self._told = join(self._lead, self._secret, said, JOIN_S, "the lead")
        lines = self._told.makefile("rb")
        part = json.loads(lines.readline(MOST_SAID) or b"{}")
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
            if self._exchange is not None:
                self._exchange.fail()
            for mirror in self._mirrors:
                mirror.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        if self._signals > 1 and self._told is not None:
            shut(self._told)
            return
        logger.warning("%s: the lead ends its group; a second signal ends this part now", signal.Signals(number).name)

    def _start(self, part: Mapping[str, Any]) -> None:
        ranks, stages, nodes = part["ranks"], part["stages"], part["nodes"]
        own = max(1, stages // nodes)
        count = ranks * stages // nodes
        every = range(self._node * count, (self._node + 1) * count)
        controls = {rank: self._join("rank", self._lead, "the lead", rank=rank) for rank in every}
        memories = [shared_memory(ranks) for _ in range(own)]
        inner = [shared_memory(2) for _ in range(own - 1)]
        ends: list[socket.socket] = []
        links: list[tuple[str, int]] = []
        if stages > 1:
            if part["link"] is None:
                before = self._join("link", self._lead, "the lead")
            else:
                host, port = part["link"]
                before = self._join("link", (host, port), f"node {self._node - 1}")
            after = self._join("back", self._lead, "the lead") if self._node + 1 == nodes else self._following()
            ends = [before, after]
            links = [("socket", before.fileno()), *(("memory", each) for each in inner), ("socket", after.fileno())]
        else:
            self._mirror(memories[0], ranks, nodes, part["peers"])
        threads = max(1, (self._threads or threads_of_each(1)) // len(every))
        local = {"folder": str(absolute(self._folder)), "files": files_of(self._folder), "threads": threads}
        local["tells"] = True
        for i, rank in enumerate(every):
            stage, of_stage = divmod(i, ranks)
            used = links[stage : stage + 2] if not of_stage else []
            mine = {**local, "index": i, "processes": len(every), "memory": memories[stage], "links": used}
            descriptors = [memories[stage], *(number for _, number in used)]
            self._processes[rank] = start_follower(controls[rank], mine, descriptors)
        for end in (*controls.values(), *ends):
            end.close()
        for descriptor in memories + inner:
            os.close(descriptor)
        logger.info("Ranks %d to %d of %d compute", every[0], every[-1], ranks * stages)

    def _mirror(self, memory: int, ranks: int, nodes: int, peers: list[tuple[str, int]]) -> None:
        """Connect this machine's copy of the memory of sums with those of all others."""
        library = load_library()
        if library is None:
            raise EngineError("native kernels are not built on this machine")
        count = ranks // nodes
        self._exchange = Exchange(library, memory, Share(self._node * count, ranks), count)
        addresses = [
            (self._lead, "the lead"),
            *(((host, port), f"node {i}") for i, (host, port) in enumerate(peers, 1)),
        ]
        ends = {
            (node, i): self._join("sums", address, who, rank=i)
            for node, (address, who) in enumerate(addresses)
            for i in range(count)
        }
        later = {(node, i) for node in range(self._node + 1, nodes) for i in range(count)}
        while later:
            end, said = self._arrival("another machine")
            if (place := (said.get("node"), said.get("rank"))) in later:
                later.discard(place)
                ends[place] = end
            else:
                end.close()
        if self._meeting is not None:
            self._meeting.close()
        first = self._node * count
        self._mirrors = [Mirror(self._exchange, first + i, node * count + i, end) for (node, i), end in ends.items()]

    def _join(self, purpose: str, address: tuple[str, int], who: str, **more: Any) -> socket.socket:
        return join(address, self._secret, {"purpose": purpose, "node": self._node, **more}, CONNECT_S, who)

    def _following(self) -> socket.socket:
        end, _ = self._arrival(f"node {self._node + 1}")
        assert self._meeting is not None
        self._meeting.close()
        return end

    def _arrival(self, who: str) -> tuple[socket.socket, dict[str, Any]]:
        """The next who comes to this node, and what it says."""
        if self._meeting is None:
            raise EngineError(ErrorText.of("node {} needs {ranks_address}, for the nodes after it", self._node))
        arrived = _next(self._meeting, time.monotonic() + CONNECT_S, lambda: False)
        if arrived is None:
            raise EngineError(f"{who} has not come to node {self._node} in {CONNECT_S:.0f} s")
        return arrived

    def _wait(self) -> bool:
        told = self._told
        assert told is not None
        said, reported = b"", set[int]()
        with selectors.DefaultSelector() as selector:
            selector.register(told, selectors.EVENT_READ)
            while True:
                if selector.select(0.2):
                    try:
                        more = told.recv(MOST_SAID)
                    except OSError:
                        more = b""
                    said = (said + more)[-MOST_SAID:]
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
