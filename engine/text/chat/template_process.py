"""The child process in which `engine.text.chat.confined` renders a chat template.

   python -m engine.text.chat.template_process CPU MEMORY OUTPUT     the limits of one render, see `Limits`

Frames (frames.py) arrive on standard input: the template, then messages. Each frame of messages is answered on
standard output. The kernel enforces the limits. A timer ends the process when its processor time is spent, even within
one long call. A limit of address space makes allocations fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO, NoReturn

from engine.errors import ModelError, RequestError
from engine.text.chat.frames import HEADER, LONGEST, REASON, TEXT, framed
from engine.text.chat.template import ChatTemplate


def main() -> NoReturn:
    cpu, memory, output = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    _confine(memory)
    source = _read(asked)
    template: ChatTemplate | None = None
    while True:
        data = _read(asked)
        # The timer's signal has no handler, so the kernel ends the process.
        signal.setitimer(signal.ITIMER_PROF, cpu)
        try:
            if template is None:
                fields = json.loads(source)
                template = ChatTemplate(**{"source": fields.pop("text"), **fields})
            answer = _render(template, json.loads(data), output)
        except ModelError as error:
            answer = _reason(model=str(error))
        except RequestError as error:
            answer = _reason(request=str(error), code=error.code)
        except RecursionError:
            answer = _reason(request="the messages or the template's variables are nested too deep", code="too_deep")
        except MemoryError:
            answer = _reason(stopped=f"it took more than {memory >> 20} MiB of memory")
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(framed(answer))
        answers.flush()


def _render(template: ChatTemplate, asked: dict[str, Any], output: int) -> bytes:
    variables = asked.pop("variables")
    text = template.render(asked.pop("messages"), **asked, **variables).encode("utf-8", "surrogatepass")
    if len(text) > output:
        return _reason(stopped=f"it made {len(text)} bytes of text; at most {output} are taken")
    return TEXT + text


def _reason(**fields: str) -> bytes:
    return REASON + json.dumps({name: text[:LONGEST] for name, text in fields.items()}).encode()


def _confine(memory: int) -> None:
    """Set the process's limits. All modules must be imported before."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # not every kernel has this limit; the timer works everywhere
        with open("/proc/self/statm", "rb") as statm:
            pages = int(statm.read().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read(stream: BinaryIO) -> bytes:
    """Read a frame's content. Ends the process at the end of input, because the parent has gone."""
    header = stream.read(HEADER)
    data = stream.read(int.from_bytes(header, "big"))
    if not data:
        sys.exit(0)
    return data


if __name__ == "__main__":
    main()
