"""The child of a ConfinedProcess.

   python -m engine.confined.child TARGET CPU MEMORY OUTPUT STACK NICE     see `Limits`

Frames (process.py) arrive on standard input: what the target is set up with, then requests. Each is answered on
standard output. The target's module is imported before the process is sealed; the target runs after. The kernel
enforces the
limits: a timer ends the process when a request's processor time is spent, even within one long call, and a limit of
address space makes allocations fail.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, BinaryIO

from engine.confined.process import HEADER, TEXT, VALUE, framed, reason
from engine.confined.seal import seal
from engine.errors import ModelError, RequestError, fields_of


def main() -> None:
    target, cpu, memory, output, stack, nice = sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:])
    module, _, name = target.partition(":")
    make: Callable[[Any], Callable[[Any], Any]] = getattr(import_module(module), name)
    if nice:
        os.nice(nice)
    if not stack:
        _serve(make, cpu, memory, output)
        return
    threading.stack_size(stack)
    thread = threading.Thread(target=_serve, args=(make, cpu, memory, output))
    thread.start()
    thread.join()


def _serve(make: Callable[[Any], Callable[[Any], Any]], cpu: float, memory: int, output: int) -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sealed = seal(memory)

    def answered(work: Callable[[], bytes]) -> bytes:
        # The timer's signal has no handler, so the kernel ends the process.
        signal.setitimer(signal.ITIMER_PROF, cpu)
        try:
            return work()
        except ModelError as error:
            return reason(model=str(error))
        except RequestError as error:
            return reason(fields_of(error.message), request=error.message, code=error.code, param=error.param)
        except RecursionError:
            return reason(request="the request is nested too deep", code="too_deep", param=None)
        except MemoryError:
            return reason(stopped=f"it took more than {memory >> 20} MiB of memory")
        except BaseException as error:  # noqa: BLE001 - a fault of the target, or a panic of a native library
            return reason(stopped=f"it failed: {type(error).__name__}: {error}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    handler: Callable[[Any], Any] | None = None

    def set_up(data: bytes) -> bytes:
        nonlocal handler
        handler = make(json.loads(data))
        return VALUE + json.dumps({"sealed": sealed}).encode()

    def handle(data: bytes) -> bytes:
        assert handler is not None
        answer = handler(json.loads(data))
        if isinstance(answer, str):
            content = TEXT + answer.encode("utf-8", "surrogatepass")
        else:
            content = VALUE + json.dumps(answer, separators=(",", ":")).encode()
        if len(content) - 1 > output:
            return reason(stopped=f"it made {len(content) - 1} bytes of output; at most {output} are taken")
        return content

    while (frame := _read(requests)) is not None:
        data = frame
        work = set_up if handler is None else handle
        answers.write(framed(answered(lambda: work(data))))  # noqa: B023 - it is called at once
        answers.flush()


def _read(stream: BinaryIO) -> bytes | None:
    """A frame's content. None at the end of input, because the parent has gone."""
    header = stream.read(HEADER)
    return stream.read(int.from_bytes(header, "big")) or None


if __name__ == "__main__":
    main()
