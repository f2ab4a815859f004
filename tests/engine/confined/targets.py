"""What the children of test_confined.py run."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ErrorText, ModelError, RequestError

_PTRACE_ATTACH = 16


def echo(setup: Any) -> Callable[[Any], Any]:
    """Answers setup and request."""
    return lambda request: [setup, request]


def refusing(setup: Any) -> Callable[[Any], Any]:
    """Does to its process what a request asks for; answers others."""
    if setup == "bad":
        raise ModelError("this setup is bad")

    def refuse(request: Any) -> Any:
        match request:
            case "spin":
                while True:
                    pass
            case "eat":
                return len(bytes(1 << 30))
            case "shout":
                return "x" * 3_000_000
            case "fail":
                raise LookupError("what a target does not expect")
            case "deep":
                return refuse("deep")
            case "refused":
                raise RequestError(ErrorText.of("{that} is not this"), param="that", code="no_such_thing")
        return request

    return refuse


def deep(setup: int) -> Callable[[int], int]:
    """Answers how deep it went, on a stack for that."""
    sys.setrecursionlimit(setup)

    def down(depth: int) -> int:
        return sorted([depth], key=lambda left: 0 if left == 0 else down(left - 1))[0]

    return down


def escaping(parent: int) -> Callable[[Any], dict[str, str]]:
    """Answers attempt -> the name of the error that it met, or "" if it succeeded."""
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), "refused")

    def executable() -> None:
        mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)

    attempts: dict[str, Callable[[], object]] = {
        "read a file": lambda: Path("/etc/passwd").read_bytes(),
        "read its parent's environment": lambda: Path(f"/proc/{parent}/environ").read_bytes(),
        "write a file": lambda: Path("/tmp/penstock-escaped").write_text("x"),
        "list a folder": lambda: os.listdir("/"),
        "open a socket": lambda: socket.socket().connect(("127.0.0.1", 9)),
        "fork": os.fork,
        "start a thread": lambda: threading.Thread(target=print).start(),
        "run a program": lambda: subprocess.run(["/bin/true"], check=True),
        "become a program": lambda: os.execv("/bin/true", ["true"]),
        "trace its parent": lambda: checked(libc.ptrace(_PTRACE_ATTACH, parent, 0, 0)),
        "end its parent": lambda: os.kill(parent, signal.SIGKILL),
        "make memory executable": executable,
        "import what is not imported": lambda: __import__("sqlite3"),
        "copy a descriptor": lambda: os.dup(1),
        "write to standard error": lambda: os.write(2, b"x"),
    }

    def attempt(_: Any) -> dict[str, str]:
        met = {}
        for name, work in attempts.items():
            try:
                work()
                met[name] = ""
            except BaseException as error:
                met[name] = type(error).__name__
        return met

    return attempt
