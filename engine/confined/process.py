"""A child process for work whose time or memory its caller decides.

call -> frame -> child (`engine.confined.child`): timer on, work, timer off -> frame -> answer
                                     over its limits: the child ends, and the next call starts another

A child does one target's work with one setup, so what breaks into it reaches nothing of others' setups. Its environment
has none of this process's settings, which may contain passwords, and it is sealed (`engine.confined.seal`).

The frames between the two are a length (HEADER bytes, big-endian), then that many bytes. The bytes are JSON. In an
answer, the first byte says what follows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.errors import ErrorText, ModelError, RequestError

HEADER: Final = 4
#: UTF-8 text follows. A lone surrogate, which JSON may carry, is encoded as UTF-8 would encode it.
TEXT: Final = b"T"
#: JSON follows.
VALUE: Final = b"V"
#: JSON follows that says why there is no answer: {"stopped": why}, {"model": message} or {"request": message, "code":
#: code, "param": parameter or null, "fields": those of an ErrorText}.
REASON: Final = b"R"
#: The most characters of each text of a reason, because a template chooses the text of its errors.
LONGEST: Final = 1000
#: The most bytes of a reason. JSON may take 12 bytes for a character.
LONGEST_REASON: Final = 1 << 16


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(HEADER, "big") + data


def reason(named: Sequence[Sequence[int | str]] = (), **fields: str | None) -> bytes:
    """An answer's content that says why there is no answer. `named`: the fields that its message names."""
    texts = {name: text and text[:LONGEST] for name, text in fields.items()}
    return REASON + json.dumps(texts | ({"fields": named} if named else {})).encode()


def answer_of(data: bytes) -> tuple[bool, Any]:
    """Whether a frame's content is an answer, with the answer or the reason why there is none."""
    if data.startswith(TEXT):
        return True, data[len(TEXT) :].decode("utf-8", "surrogatepass")
    return data.startswith(VALUE), json.loads(data[1:])


logger = logging.getLogger(__name__)

#: The child's interpreter arguments, before its own.
CHILD: Final = ("-P", "-m", "engine.confined.child")
#: The environment variables that a child's interpreter may need to start, and for clocks.
ENVIRONMENT: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one request, and of the setup before the first."""

    cpu: float = 1.0
    """Processor seconds."""
    wall: float = 15.0
    """Seconds of wall-clock time, with the child's start. This is more than `cpu`, because the machine may be busy."""
    memory: int = 256 << 20
    """Bytes of address space in addition to the idle child's."""
    output: int = 4 << 20
    """Bytes of the answer, in UTF-8."""
    stack: int = 0
    """Bytes of the stack on which the work runs; 0: the system's usual one."""
    nice: int = 0
    """Niceness that the child adds to this process's, see nice(2)."""


class Stopped(Exception):
    """The work was ended: it exceeded a limit, or its process ended. The text says which."""

    def __init__(self, why: str, *, again: bool = False) -> None:
        """`again`: the same work would be ended again, however busy the machine is: it took too much processor time or
        memory, or it failed."""
        super().__init__(why)
        self.again = again


class ConfinedProcess:
    """A target's work in a child process. Blocking and thread-safe: calls take turns. The first one starts the child.
    Close it after use.

    `target`: "module:function". The child imports the module, is sealed, and calls the function with `setup`; what the
    function returns is called with each request. Setup, requests and answers are JSON values; an answer that is a
    string may be of any letters.
    """

    def __init__(self, target: str, setup: Any = None, limits: Limits | None = None) -> None:
        self._target = target
        self._setup = setup
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        # Whether a call has its turn, and whether that one is to end. `kill` and the call agree on these by a lock that
        # nobody holds for long.
        self._calling = self._killed = False
        self._agreeing = threading.Lock()

    def call(self, request: Any) -> Any:
        """The target's answer.

        Raises RequestError and ModelError as the target does, RequestError for a request that is no JSON, and Stopped
        if the child was ended over it.
        """
        frame = _frame(request)
        with self._lock:
            with self._agreeing:
                self._calling, self._killed = True, False
            try:
                deadline = time.monotonic() + self._limits.wall
                if self._child is None or self._child.poll() is not None:
                    self._end()
                    self._set_up(deadline)
                if self._killed:  # before there was a child to be killed
                    self._end()
                    raise Stopped("it was killed")
                return self._exchange(frame, deadline)
            finally:
                with self._agreeing:
                    self._calling = False

    def kill(self) -> None:
        """End the call that has its turn, whatever its child does: it raises Stopped. A later call starts another."""
        with self._agreeing:
            if not self._calling:
                return
            self._killed, child = True, self._child
        if child is not None:
            with contextlib.suppress(OSError):
                child.kill()

    def close(self) -> None:
        """End the child, after the current call. A later call starts another."""
        with self._lock:
            self._end()

    # ---- the child, under the lock --------------------------------------------------------------------------------

    def _set_up(self, deadline: float) -> None:
        frame = _frame(self._setup)
        self._child = self._start()
        try:
            if self._exchange(frame, deadline) != {"sealed": True} and sys.platform == "linux":
                logger.warning("%s runs without seccomp, which this kernel does not offer", self._target)
        except BaseException:
            self._end()
            raise

    def _exchange(self, frame: bytes, deadline: float) -> Any:
        """Send a frame to the child. Returns its answer; raises as `call` does."""
        assert self._child is not None
        try:
            self._send(self._child, frame, deadline)
            size = int.from_bytes(self._receive(self._child, HEADER, deadline), "big")
            answered, answer = answer_of(self._receive(self._child, size, deadline))
        except TimeoutError:
            self._end()
            raise Stopped(f"it did not end within {self._limits.wall:g} s") from None
        except (OSError, EOFError):
            status = self._end()
            if status == -signal.SIGPROF:
                why = f"it took more than {self._limits.cpu:g} s of processor time"
                raise Stopped(why, again=True) from None
            raise Stopped(f"its process ended with status {status}") from None
        except BaseException:  # interrupted: the next answer on the pipe would not belong to the next frame
            self._end()
            raise
        if answered:
            return answer
        match answer:
            case {"request": str(message)}:
                text = ErrorText.read(message, answer.get("fields"))
                raise RequestError(text, param=answer["param"], code=answer["code"])
            case {"model": str(message)}:
                raise ModelError(message)
            case _:
                self._end()
                raise Stopped(str(answer.get("stopped")), again=True)

    def _start(self) -> subprocess.Popen[bytes]:
        env = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        env["TOKENIZERS_PARALLELISM"] = "false"  # a sealed process cannot start threads
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
        limits = self._limits
        numbers = (limits.memory, limits.output, limits.stack, limits.nice)
        child = subprocess.Popen(
            [sys.executable, *CHILD, self._target, f"{limits.cpu:g}", *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=env,
            cwd="/",  # no relative path reaches a file of ours
            start_new_session=True,  # only this process handles Ctrl-C at a terminal
        )
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        return child

    def _end(self) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        with contextlib.suppress(OSError):
            child.kill()  # has no effect if the child has ended; its status stays
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        child.stdout.close()
        return child.wait()

    def _send(self, child: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
        assert child.stdin is not None
        remaining = memoryview(data)
        while remaining:
            _wait(child.stdin.fileno(), select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                remaining = remaining[os.write(child.stdin.fileno(), remaining) :]

    def _receive(self, child: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
        assert child.stdout is not None
        if size > max(len(TEXT) + self._limits.output, LONGEST_REASON):
            raise EOFError("that is no frame")
        data = bytearray()
        while len(data) < size:
            _wait(child.stdout.fileno(), select.POLLIN, deadline)
            part = os.read(child.stdout.fileno(), size - len(data))
            if not part:
                # The child is ending. Its exit status tells the reason.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(1.0)
                raise EOFError("the child has ended")
            data += part
        return bytes(data)


def _frame(value: Any) -> bytes:
    try:
        return framed(json.dumps(value).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a confined process takes JSON data: {error}", code="invalid_type") from error


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
