"""Clocks that can be set, for single processes: `clock.c`, preloaded. Needs a C compiler, and Linux."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path


def available() -> bool:
    """Whether clocks can be set on this machine."""
    return sys.platform == "linux" and _compiler() is not None


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


@cache
def _library() -> Path:
    """Compiled once a process, into a directory of its own that ends with the process."""
    folder = tempfile.TemporaryDirectory(prefix="penstock-clock-")
    _KEPT.append(folder)
    library = Path(folder.name) / "clock.so"
    compiler = _compiler()
    assert compiler is not None
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return library


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def preload() -> dict[str, str]:
    """The environment of a process that is forked later, and then calls `attend`. Its own clock is as it was."""
    return {"LD_PRELOAD": str(_library())}


def attend() -> None:
    """From here on this process, which was forked, has the clock that its environment names, if any."""
    if path := os.environ.get("CHAOS_CLOCK"):
        ctypes.CDLL(None).attend_clock(path.encode())


class Clock:
    """Of processes that are started with `env`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ahead = 0.0
        path.write_bytes(struct.pack("q", 0))
        self.env = {**preload(), "CHAOS_CLOCK": str(path)}

    def set(self, by: float) -> None:
        """Ahead by so many seconds, or back."""
        self._ahead += by
        with self._path.open("r+b") as file:
            file.write(struct.pack("q", int(self._ahead * 1e9)))
