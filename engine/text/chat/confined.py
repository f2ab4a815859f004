"""Renders a chat template in a child process, so that it cannot take this process's time or memory.

render -> frame -> child (`engine.text.chat.template_process`): timer on, render, timer off -> frame -> text
                                         over its limits: the child ends, and the next call starts another

                   A child renders one template only, so it cannot affect the templates of other models. Its
                   environment has none of this process's settings, which may contain passwords.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from engine.errors import ModelError, RequestError
from engine.text.chat.frames import HEADER, LONGEST_REASON, REASON, TEXT, framed
from engine.text.chat.template import TemplateSource

#: The child's interpreter arguments, before the limits.
CHILD: Final = ("-P", "-m", "engine.text.chat.template_process")
#: The environment variables that a child's interpreter may need to start, and for the template's clock.
ENVIRONMENT: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one render. The first render includes compiling the template."""

    cpu: float = 1.0
    """Processor seconds."""
    wall: float = 15.0
    """Seconds of wall-clock time. This is more than `cpu`, because the machine may be busy."""
    memory: int = 256 << 20
    """Bytes of address space in addition to the idle child's."""
    output: int = 4 << 20
    """Bytes of UTF-8."""


class ConfinedTemplate:
    """A template in a child process. Blocking and thread-safe: renders take turns. The first one starts the child.
    Close it after use."""

    def __init__(self, source: TemplateSource, limits: Limits | None = None) -> None:
        self.source = source
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        now: float | None = None,
        **variables: Any,
    ) -> str:
        """Render as ChatTemplate.render does. If the template does not mention the `developer` role, it gets `system`.

        Raises RequestError with the code "template_stopped" if the template exceeded its limits.
        """
        if "developer" not in self.source.text:
            # `developer` is OpenAI's newer name of the role. Nearly all templates know only the older one.
            messages = [{**one, "role": "system"} if one.get("role") == "developer" else one for one in messages]
        asked = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "now": now,
            "variables": variables,
        }
        frame = _frame(asked)
        with self._lock:
            answer = self._exchange(frame)
        match answer:
            case str(text):
                return text
            case {"request": str(message)}:
                raise RequestError(message, param="messages", code=str(answer["code"]))
            case {"model": str(message)}:
                raise ModelError(message)
            case _:
                raise self._stopped(str(answer.get("stopped", "its process gave no answer")))

    def close(self) -> None:
        """End the child, after the current render. A later render starts another."""
        with self._lock:
            self._end()

    # ---- the child, under the lock --------------------------------------------------------------------------------

    def _exchange(self, frame: bytes) -> str | dict[str, Any]:
        """Send a frame to the child. Returns the rendered text, or a dict with the reason why there is none."""
        deadline = time.monotonic() + self._limits.wall
        if self._child is None or self._child.poll() is not None:
            self._end()
            self._child = self._start()
            frame = _frame(asdict(self.source)) + frame
        try:
            self._send(self._child, frame, deadline)
            size = int.from_bytes(self._receive(self._child, HEADER, deadline), "big")
            answer = self._receive(self._child, size, deadline)
        except TimeoutError:
            self._end()
            return {"stopped": f"it did not end within {self._limits.wall:g} s"}
        except (OSError, EOFError):
            status = self._end()
            if status == -signal.SIGPROF:
                return {"stopped": f"it took more than {self._limits.cpu:g} s of processor time"}
            return {"stopped": f"its process ended with status {status}"}
        except BaseException:  # interrupted: the next answer on the pipe would not belong to the next frame
            self._end()
            raise
        if answer.startswith(TEXT):
            return answer[len(TEXT) :].decode("utf-8", "surrogatepass")
        reply: dict[str, Any] = json.loads(answer[len(REASON) :])
        if "stopped" in reply:
            self._end()
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        env = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
        limits = self._limits
        arguments = [f"{limits.cpu:g}", str(limits.memory), str(limits.output)]
        child = subprocess.Popen(
            [sys.executable, *CHILD, *arguments],
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
        rest = memoryview(data)
        while rest:
            _wait(child.stdin.fileno(), select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(child.stdin.fileno(), rest) :]

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

    def _stopped(self, why: str) -> RequestError:
        return RequestError(
            f"the model's chat template was stopped on these messages: {why}", param="messages", code="template_stopped"
        )


def _frame(value: Mapping[str, Any]) -> bytes:
    try:
        data = json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"messages and template variables must be JSON data: {error}", param="messages", code="invalid_type"
        ) from error
    return framed(data)


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
