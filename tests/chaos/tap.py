"""A TCP proxy between one worker and its server, which counts the worker's calls and strikes at one of them.

    before  the worker is killed before the server hears of the call
    after   the server has done what was asked; the worker is killed before it hears the answer
    drop    the server has done what was asked; the answer is lost with its connection, and the worker lives on

All connections are served by one thread, so that the calls have one order. From a kill on, nothing more of the worker
reaches the server.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Self, get_args

from tests.chaos.calls import LISTENS, MANNERS, Call, kind
from tests.chaos.resp import arguments, frame_end
from tests.waiting import PATIENCE_S

Mode = Literal["before", "after", "drop"]
MODES: tuple[Mode, ...] = get_args(Mode)

#: Says of a call, given the one before it, whether and how to strike. Asked until it has struck once.
Aim = Callable[[Call | None, Call], Mode | None]


@dataclass(eq=False, slots=True)
class _Pair:
    """One of the worker's connections, and its other half."""

    near: socket.socket
    far: socket.socket
    asked: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)
    pending: deque[bool] = field(default_factory=deque)
    """For each request on its way, whether its answer is the one to lose."""
    multi: list[list[bytes]] | None = None
    listens: bool = False
    doomed: bool = False
    """What the worker says here is not passed on any more."""


class Tap:
    """`kill` ends the worker at once; `watch` is told of every call before it is passed on."""

    def __init__(self, port: int, aim: Aim, kill: Callable[[], None], watch: Callable[[Call], None]) -> None:
        self._server = ("127.0.0.1", port)
        self._aim = aim
        self._kill = kill
        self._watch = watch
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.calls: list[Call] = []
        self.struck: tuple[Mode, Call] | None = None
        self.hit = threading.Event()
        """The strike has had its effect."""
        self._pairs: dict[socket.socket, _Pair] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._bell = socket.socketpair()
        self._selector.register(self._bell[0], selectors.EVENT_READ)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._bell[1].close()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    # ---- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except BaseException as failure:
            self.failure = failure
        finally:
            self._shut()
            self._selector.close()
            self._bell[0].close()

    def _serve(self) -> bool:
        for key, _ in self._selector.select():
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._bell[0]:
                return False
            if sock is self._listener:
                if sock.fileno() >= 0:
                    self._accept()
            elif sock in self._pairs:  # else closed by the event before
                pair = self._pairs[sock]
                with contextlib.suppress(OSError):
                    if data := sock.recv(1 << 16):
                        self._relay(pair, sock, data)
                        continue
                self._part(pair)
        return True

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._server)
        pair = _Pair(near, far)
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs[sock] = pair
            self._selector.register(sock, selectors.EVENT_READ)

    def _relay(self, pair: _Pair, sock: socket.socket, data: bytes) -> None:
        if sock is pair.near:
            pair.asked += data
            self._requests(pair)
        elif pair.listens:
            pair.near.sendall(data)
        else:
            pair.answered += data
            self._replies(pair)

    def _requests(self, pair: _Pair) -> None:
        while not pair.doomed and pair.near in self._pairs and (end := frame_end(pair.asked)) is not None:
            request = bytes(pair.asked[:end])
            del pair.asked[:end]
            words = arguments(request)
            name = words[0].upper()
            if name in LISTENS or (name == b"CLIENT" and words[1].upper() == b"TRACKING"):
                pair.listens = True
                pair.near.sendall(pair.answered)
                pair.answered.clear()
            call = self._counted(pair, name, words)
            mode = self._judged(call) if call else None
            if mode == "before":
                self._dies()
                return
            pair.far.sendall(request)
            pair.pending.append(mode is not None)
            pair.doomed = mode is not None

    def _counted(self, pair: _Pair, name: bytes, words: list[bytes]) -> Call | None:
        """The call that this request is, or that it completes: a transaction counts once, at its EXEC."""
        if pair.listens:
            return None
        if name == b"MULTI":
            pair.multi = []
        if name in MANNERS:
            return None
        if pair.multi is not None:
            if name != b"EXEC":
                pair.multi.append(words)
                return None
            inside, pair.multi = pair.multi, None
        else:
            inside = [words]
        return Call(len(self.calls) + 1, kind(inside), tuple(itertools.chain(*inside)))

    def _judged(self, call: Call) -> Mode | None:
        previous = self.calls[-1] if self.calls else None
        self.calls.append(call)
        self._watch(call)
        if self.struck is not None:
            return None
        mode = self._aim(previous, call)
        if mode is not None:
            self.struck = mode, call
        return mode

    def _replies(self, pair: _Pair) -> None:
        while pair.near in self._pairs and (end := frame_end(pair.answered)) is not None:
            if pair.pending.popleft():
                assert self.struck is not None
                if self.struck[0] == "after":
                    self._dies()
                else:
                    self._part(pair)
                    self.hit.set()
                return
            pair.near.sendall(pair.answered[:end])
            del pair.answered[:end]

    def _dies(self) -> None:
        self._kill()
        self._shut()
        self.hit.set()

    def _shut(self) -> None:
        """Nobody comes through any more."""
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
        for pair in set(self._pairs.values()):
            self._part(pair)

    def _part(self, pair: _Pair) -> None:
        for sock in (pair.near, pair.far):
            if self._pairs.pop(sock, None) is not None:
                self._selector.unregister(sock)
                sock.close()


class Killer(Tap):
    """Kills the process whose `pid` it is told. Closed at the end of its context."""

    def __init__(self, port: int, aim: Aim) -> None:
        self.pid: Future[int] = Future()
        super().__init__(port, aim, lambda: os.kill(self.pid.result(PATIENCE_S), signal.SIGKILL), lambda call: None)
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def at(kind: str, mode: Mode | None) -> Aim:
    """Strikes at the first call of this kind."""
    return lambda _, call: mode if call.kind == kind else None
