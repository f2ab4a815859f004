"""Stages on several machines, the nodes: how these meet, and the links between them.

    node K -> lead: authenticates (meeting.py) with its release, files and clock; the lead checks these (`differing`)
                    and sends its part: numbers of ranks, stages and nodes, and where the nodes before it listen
           -> lead: one connection for each of its ranks; from the last node, also the link back from the last stage
           -> the first node of the stage before, or the lead: the link into its first stage
           -> of a stage that spans several nodes: to each earlier node of it one connection for the sums of each rank

A node has whole stages; or a stage spans several nodes, each with as many of its ranks, and with a copy of the memory
of its sums (Mirror); the first of them has the stage's links. Node 0 is the lead's machine (`gather`, called by Group);
on each other machine a `Node` starts the ranks and watches them.
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
from engine.execution.ranks.meeting import CONNECT_S, GREET_S, MAX_HELLO, Meeting, join, shut
from engine.execution.threads import threads_of_each
from engine.kernels.native import load_library
from engine.kernels.native.exchange import MAX_MESSAGE, Exchange, Share, check_length, shared_memory
from engine.kernels.native.library import VERSION
from engine.models.shares import files_of
from engine.text.checkpoint import model_version
from engine.text.gguf import absolute

logger = logging.getLogger("penstock.engine")

#: Seconds that the lead waits for all nodes to connect.
JOIN_S: Final = 300.0
#: Seconds after which a node that was turned away for now calls again.
_AGAIN_S: Final = 3.0
#: The maximum difference between the clocks of two nodes, in seconds.
_CLOCKS_S: Final = 5.0
_LENGTH = struct.Struct("=q")


class Mirror:
    """Two threads that keep alike the copies of an exchange's memory on two machines: what rank `local` writes is sent,
    and what rank `remote` of the other machine writes is received. If the connection is lost, both copies fail."""

    def __init__(self, exchange: Exchange, local: int, remote: int, connection: socket.socket) -> None:
        """`exchange`: the end of any rank of this machine; the threads use it too."""
        self._threads = [
            threading.Thread(target=transfer, args=(rank, connection), name=f"penstock-rank-{rank}", daemon=True)
            for transfer, rank in ((exchange.carry, local), (exchange.deliver, remote))
        ]
        self._connection = connection
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait until both threads have ended, as they do once the exchange has failed."""
        for thread in self._threads:
            thread.join()
        self._connection.close()


class SocketLink:
    """A Link between machines: a message is its length, int64, and its bytes.

    From the first `receive` on, a thread reads messages as they come, because a connection whose other end reads
    nothing for 15 s is cut off (meeting.py), and a step may take longer. The lead bounds how many are under way."""

    def __init__(self, connection: socket.socket) -> None:
        #: Raises DeviceLostError with the reason why the link has failed, if that can be known.
        self.explain: Callable[[], None] = lambda: None
        self.failed = False
        #: The bytes of the longest message that `receive` accepts.
        self.max_message = MAX_MESSAGE
        self._connection = connection
        self._arrived: queue.SimpleQueue[memoryview | Exception] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def send(self, message: bytes | memoryview) -> None:
        try:
            self._connection.sendall(_LENGTH.pack(len(message)))
            self._connection.sendall(message)
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
        shut(self._connection)

    def _read_all(self) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
                check_length(length, self.max_message)
                self._arrived.put(self._read(length))
        except (OSError, MemoryError, DeviceLostError) as error:
            self._arrived.put(error)

    def _read(self, length: int) -> memoryview:
        content = memoryview(bytearray(length))
        done = 0
        while done < length:
            read = self._connection.recv_into(content[done:])
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
    """The package's version, with a digest of the engine's code, because a checkout keeps its version while its code
    changes."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes() + b"\0")
    try:
        number = version("penstock")
    except PackageNotFoundError:  # copied into another program, say
        number = "unknown"
    return f"{number} (code {digest.hexdigest()[:8]})"


def traits_of(folder: Path, *, native: bool = True) -> dict[str, str]:
    """Values that must be the same on all nodes, by name. Raises ModelError if the folder's files cannot be read.

    `native`: whether native kernels compute, for which the CPUs' instruction sets must be equal. A node, which does not
    know it, tells its own; the lead leaves it out where others compute, on GPUs say."""
    library = load_library()
    instructions = {"instruction set": "" if library is None else library.isa}
    return {
        "release": f"penstock {_release()}, kernels {VERSION}, torch {torch.__version__}",
        **(instructions if native else {}),
        "model's files": f"{model_version(absolute(folder))} {files_of(folder, dates=False)[:12]}",
    }


def differing(lead: Mapping[str, Any], node: Mapping[str, Any]) -> str:
    """The first of the lead's traits that a node has not, in words; empty if there is none. Their clocks, in seconds,
    may differ by `_CLOCKS_S`."""
    for name, here in lead.items():
        there = node.get(name)
        if name == "clock":
            off = abs(there - here) if isinstance(there, float) else _CLOCKS_S + 1
            if not off <= _CLOCKS_S:
                return f"its clock is {off:.0f} s off the lead's; at most {_CLOCKS_S:.0f} s are served"
        elif there != here:
            return f"its {name} is {there!r}, and the lead's {here!r}"
    return ""


@dataclass(slots=True)
class Joined:
    """The lead's connections to the other nodes."""

    nodes: dict[int, socket.socket] = field(default_factory=dict)
    """The connection to each node, which receives its part on it, and reports how its ranks end."""
    ranks: dict[int, socket.socket] = field(default_factory=dict)
    """The control connection of each rank's process, by rank."""
    after: socket.socket | None = None
    """The link from this node's last stage to the next."""
    back: socket.socket | None = None
    sums: dict[int, dict[int, socket.socket]] = field(default_factory=dict)
    """The connections between the sums of this machine's rank i and of a node's, by node and by i."""

    def close(self, *, lost: bool) -> None:
        """Close the connections to all nodes, which ends these. Unless the group is `lost`, they are told that it has
        been closed."""
        for connection in self.nodes.values():
            if not lost:
                with suppress(OSError):
                    connection.sendall(b'{"closed": true}\n')
            shut(connection)


def gather(
    meeting: Meeting,
    nodes: int,
    ranks: int,
    traits: Mapping[str, Any],
    part: Mapping[str, Any],
    ended: Callable[[], bool],
    *,
    stages: int,
) -> Joined:
    """Wait for the other nodes, of `ranks` ranks each, and accept all their connections.

    `traits`: of the lead. `part`: the settings that each is sent. `ended`: whether to give up. Raises
    EngineError naming the node that has not come, or how it differs from the lead.
    """
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
            connection, hello = arrived
            _forget_lost(joined)
            if hello.get("purpose") != "node":  # of a group that has ended meanwhile
                _refuse(connection, "it comes before its machine")
                continue
            node = hello.get("node")
            reason = differing({**traits, "clock": time.time()}, hello.get("traits") or {})
            if not isinstance(node, int) or not 0 < node < nodes:
                reason = f"it is node {node!r}; there are 1 to {nodes - 1}"
            elif node in joined.nodes:
                # One of the two has a wrong number, or the first was cut off, which is noticed in 5 s.
                reason = f"another machine, {_peer(joined.nodes[node])}, is node {node} already"
                logger.warning(
                    "A machine that calls itself node %s, %s, is turned away: %s", node, _peer(connection), reason
                )
                _refuse(connection, reason, again=True)
                continue
            elif not reason:
                joined.nodes[node], ports[node] = connection, hello.get("port", 0)
                lacking = _missing(joined, nodes) or "none"
                logger.info("Node %s of %s (%s) has come; to come: %s", node, nodes, _peer(connection), lacking)
                continue
            address = _peer(connection)
            _refuse(connection, reason)
            raise EngineError(f"node {node!r} of {nodes} ({address}) does not fit: {reason}")
        span = max(1, nodes // stages)
        for node, connection in joined.nodes.items():
            first = node // span * span  # of the node's stage
            link = None if first <= span else (_peer(joined.nodes[first - span]), ports[first - span])
            peers = [(_peer(joined.nodes[other]), ports[other]) for other in range(max(1, first), node)]
            try:
                connection.sendall(json.dumps({**part, "link": link, "peers": peers}).encode() + b"\n")
            except OSError as error:
                raise EngineError(f"node {node} is lost: {error}") from error
        deadline = time.monotonic() + CONNECT_S + GREET_S
        missing = set(range(ranks, nodes * ranks))
        sums: set[tuple[Any, Any]] = {(node, i) for node in range(1, span) for i in range(ranks)}
        while missing or sums or (stages > 1 and (joined.after is None or joined.back is None)):
            _look_for_errors(joined)
            if (arrived := _next(meeting, deadline, ended)) is None:
                lacks = [f"rank {rank}" for rank in sorted(missing)] or ["a link"]
                raise EngineError(
                    f"{', '.join(lacks)}: not connected in {CONNECT_S + GREET_S:.0f} s though its machine has come"
                )
            connection, hello = arrived
            purpose, node, rank = hello.get("purpose"), hello.get("node"), hello.get("rank")
            if purpose == "rank" and isinstance(rank, int) and rank in missing:
                missing.discard(rank)
                joined.ranks[rank] = connection
            elif purpose == "sums" and isinstance(node, int) and isinstance(rank, int) and (node, rank) in sums:
                sums.discard((node, rank))
                joined.sums.setdefault(node, {})[rank] = connection
            elif purpose == "link" and joined.after is None:
                joined.after = connection
            elif purpose == "back" and joined.back is None:
                joined.back = connection
            else:
                connection.close()
    except BaseException:
        of_sums = (connection for connections in joined.sums.values() for connection in connections.values())
        for each in (*joined.nodes.values(), *joined.ranks.values(), *of_sums, joined.after, joined.back):
            if each is not None:
                each.close()
        raise
    return joined


def _missing(joined: Joined, nodes: int) -> str:
    return " and ".join(str(node) for node in range(1, nodes) if node not in joined.nodes)


def _refuse(connection: socket.socket, why: str, *, again: bool = False) -> None:
    """`again`: the node may be accepted later."""
    with suppress(OSError):
        connection.sendall(json.dumps({"refused": why, "again": again}).encode() + b"\n")
    connection.close()


def _forget_lost(joined: Joined) -> None:
    """Forget nodes that have ended: until all have connected, each may come again."""
    for node, connection in list(joined.nodes.items()):
        if _is_closed(connection):
            logger.warning(
                "Node %s (%s) has ended before all have come; it is waited for again", node, _peer(connection)
            )
            connection.close()
            del joined.nodes[node]


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end is closed or lost. A node sends nothing before it has received its part."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.setblocking(True)


def _next(meeting: Meeting, deadline: float, ended: Callable[[], bool]) -> tuple[socket.socket, dict[str, Any]] | None:
    while time.monotonic() < deadline:
        if ended():
            raise EngineError("the engine is closed")
        if (arrived := meeting.next()) is not None:
            return arrived
    return None


def _look_for_errors(joined: Joined) -> None:
    """Raise EngineError with the error that a node has reported, if one has."""
    for node, connection in joined.nodes.items():
        connection.setblocking(False)
        try:
            received = connection.recv(MAX_HELLO)
        except BlockingIOError:
            continue
        except OSError as error:
            raise EngineError(f"node {node} is lost: {error}") from error
        finally:
            connection.setblocking(True)
        text = received.decode(errors="replace").strip()
        raise EngineError(f"node {node}: {text or 'it has ended'}")


def _peer(connection: socket.socket) -> str:
    try:
        host: str = connection.getpeername()[0]
    except OSError:
        return "gone"
    return host


def start_follower(control: socket.socket, local: Mapping[str, Any], descriptors: list[int]) -> subprocess.Popen[bytes]:
    """Start the process of a rank of this machine, which inherits the socket `control` and `descriptors`. `local`: see
    follower.py. Raises OSError."""
    arguments = json.dumps({**local, "socket": control.fileno(), "parent": os.getpid()})
    command = [sys.executable, "-P", "-m", "engine.execution.ranks.follower", arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(control.fileno(), *descriptors))


class Node:
    """The ranks of a machine other than the lead's: started, watched, and ended with the group."""

    def __init__(
        self,
        folder: Path,
        lead: tuple[str, int],
        node: int,
        secret: bytes,
        *,
        listen: str = "",
        threads: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`lead`: its host and port. `node`: from 1. `listen`: HOST:PORT at which later nodes connect to this one.
        `threads`: of all ranks together; None: one for each core. `clock`: compared with the lead's, in seconds. Raises
        EngineError if it cannot listen."""
        self._folder, self._lead, self._secret, self._node = folder, lead, secret, node
        self._threads, self._clock = threads, clock
        self._meeting = Meeting(listen, secret) if listen else None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._exchange: Exchange | None = None
        self._mirrors: list[Mirror] = []
        self._control: socket.socket | None = None
        self._signals = 0

    def run(self) -> bool:
        """Connect to the lead, compute until the group ends, and end all processes. Returns True if the lead closed the
        group; False if a rank or a machine was lost. Raises EngineError if the group is not formed."""
        part = self._call()
        for ignored in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError):  # not the main thread
                signal.signal(ignored, self._on_signal)
        try:
            self._start(part)
        except (EngineError, OSError) as error:
            assert self._control is not None
            with suppress(OSError):
                self._control.sendall(
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

    def _call(self) -> dict[str, Any]:
        """Connect to the lead. Returns the settings that it sends once all nodes have connected."""
        traits, deadline = traits_of(self._folder), time.monotonic() + JOIN_S
        port = 0 if self._meeting is None else self._meeting.port

        def hello() -> dict[str, Any]:  # made once it is connected: the lead may start long after this node
            return {"purpose": "node", "node": self._node, "traits": {**traits, "clock": self._clock()}, "port": port}

        while True:
            self._control = join(self._lead, self._secret, hello, max(0.0, deadline - time.monotonic()), "the lead")
            part: dict[str, Any] = {}
            # Else the lead is gone, perhaps in the middle of the line.
            with self._control.makefile("rb") as lines, suppress(OSError, ValueError):
                part = json.loads(lines.readline(MAX_HELLO))
            if part and "refused" not in part:
                return part
            self._control.close()
            reason = part.get("refused", "it has closed the connection")
            if not part.get("again", not part) or time.monotonic() + _AGAIN_S > deadline:
                raise EngineError(f"the lead refuses this machine: {reason}")
            logger.warning("The lead turns this machine away, which calls again in %.0f s: %s", _AGAIN_S, reason)
            time.sleep(_AGAIN_S)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        if self._signals > 1 and self._control is not None:
            shut(self._control)
            return
        logger.warning("%s: the lead ends its group; a second signal ends this part now", signal.Signals(number).name)

    def _start(self, part: Mapping[str, Any]) -> None:
        assert self._control is not None
        ranks, stages, nodes = part["ranks"], part["stages"], part["nodes"]
        stages_here = max(1, stages // nodes)
        count = ranks * stages // nodes
        gpus = torch.cuda.device_count() if part["device"] == "cuda" else count
        if gpus < (count if part["backend"] == "nccl" else 1):
            raise EngineError(f"node {self._node} has {gpus} GPUs, and {count} ranks of the model, which need one each")
        ranks_here = range(self._node * count, (self._node + 1) * count)
        controls = {rank: self._join("rank", self._lead, rank=rank) for rank in ranks_here}
        memories = [shared_memory(ranks) for _ in range(stages_here)]
        inner = [shared_memory(2) for _ in range(stages_here - 1)]
        ends, sums = self._connect(part, count)
        links: list[tuple[str, int]] = []
        if ends:
            before, after = ends
            links = [("socket", before.fileno()), *(("memory", each) for each in inner), ("socket", after.fileno())]
        if sums:
            self._mirror(memories[0], ranks, count, sums)
        threads = max(1, (self._threads or threads_of_each(1)) // len(ranks_here))
        local = {"folder": str(absolute(self._folder)), "files": files_of(self._folder), "threads": threads}
        local |= {"address": self._control.getsockname()[0], "tells": True}
        for i, rank in enumerate(ranks_here):
            stage, of_stage = divmod(i, ranks)
            used = links[stage : stage + 2] if not of_stage else []
            mine = {**local, "index": i, "processes": len(ranks_here), "memory": memories[stage], "links": used}
            descriptors = [memories[stage], *(number for _, number in used)]
            self._processes[rank] = start_follower(controls[rank], mine, descriptors)
        for connection in (*controls.values(), *ends):
            connection.close()
        for descriptor in memories + inner:
            os.close(descriptor)
        logger.info("Ranks %d to %d of %d compute", ranks_here[0], ranks_here[-1], ranks * stages)

    def _connect(self, part: Mapping[str, Any], count: int) -> tuple[list[socket.socket], dict[int, socket.socket]]:
        """Connect this node, of `count` ranks, to others. Returns its links, into its first stage and from its last
        one, none where an earlier node of the stage has them; and of a stage that spans several nodes, the connections
        for sums, by the other node's rank in the stage."""
        stages, nodes = part["stages"], part["nodes"]
        span = max(1, nodes // stages)
        first = self._node // span * span  # the first node of this one's stage
        addresses: dict[int, tuple[str, int]] = {} if first else {0: self._lead}
        addresses |= {node: (host, port) for node, (host, port) in enumerate(part["peers"], max(1, first))}
        sums = {
            (node - first) * count + i: self._join("sums", address, node, rank=i)
            for node, address in addresses.items()
            for i in range(count)
        }
        links: list[socket.socket] = []
        following = False
        if stages > 1 and self._node == first:
            host, port = part["link"] or self._lead
            links.append(self._join("link", (host, port), first - span))
            following = first + span < nodes
            if not following:
                links.append(self._join("back", self._lead))
        later = {(node, i) for node in range(self._node + 1, first + span) for i in range(count)}
        while later or following:
            connection, hello = self._arrival("another machine" if later else f"node {first + span}")
            purpose, node, i = hello.get("purpose"), hello.get("node"), hello.get("rank")
            if purpose == "link" and following:
                following = False
                links.append(connection)
            elif purpose == "sums" and isinstance(node, int) and isinstance(i, int) and (node, i) in later:
                later.discard((node, i))
                sums[(node - first) * count + i] = connection
            else:
                connection.close()
        if self._meeting is not None:
            self._meeting.close()
        return links, sums

    def _mirror(self, memory: int, ranks: int, count: int, sums: Mapping[int, socket.socket]) -> None:
        """Keep this machine's copy of the memory of a stage's sums like those of the stage's other machines. `ranks`:
        of the stage. `count`: of each machine. `sums`: see _connect."""
        library = load_library()
        if library is None:
            raise EngineError("native kernels are not built on this machine")
        first = self._node * count % ranks
        self._exchange = Exchange(library, memory, Share(first, ranks), count)
        self._mirrors = [Mirror(self._exchange, first + rank % count, rank, end) for rank, end in sums.items()]

    def _join(self, purpose: str, address: tuple[str, int], node: int = 0, **more: Any) -> socket.socket:
        """Connect to `node`, at `address`."""
        peer = f"node {node}" if node else "the lead"
        return join(address, self._secret, {"purpose": purpose, "node": self._node, **more}, CONNECT_S, peer)

    def _arrival(self, peer: str) -> tuple[socket.socket, dict[str, Any]]:
        """The next connection to this node, and its hello. Raises EngineError naming `peer` if there is none in
        time."""
        if self._meeting is None:
            raise EngineError(ErrorText.of("node {} needs {ranks_address}, for the nodes after it", self._node))
        arrived = _next(self._meeting, time.monotonic() + CONNECT_S, lambda: False)
        if arrived is None:
            raise EngineError(f"{peer} has not come to node {self._node} in {CONNECT_S:.0f} s")
        return arrived

    def _wait(self) -> bool:
        control = self._control
        assert control is not None
        received, reported = b"", set[int]()
        with selectors.DefaultSelector() as selector:
            selector.register(control, selectors.EVENT_READ)
            while True:
                if selector.select(0.2):
                    try:
                        more = control.recv(MAX_HELLO)
                    except OSError:
                        more = b""
                    received = (received + more)[-MAX_HELLO:]
                    if not more:
                        return b'"closed"' in received
                for rank, process in self._processes.items():
                    if rank not in reported and (status := process.poll()) is not None:
                        reported.add(rank)
                        with suppress(OSError):
                            control.sendall(json.dumps({"rank": rank, "end": end_of(status)}).encode() + b"\n")


def end_of(status: int | None) -> str:
    """Describes how a process ended. `status`: as of Popen; None: it is not known."""
    if status is None:
        return "its socket is closed"
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was killed by signal {-status}"
