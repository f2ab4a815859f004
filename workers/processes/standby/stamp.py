"""The state of the code that a process has imported: each file's time and size."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: Read when a process starts, whoever imports it: also scripts and modules that are imported later.
OURS: Final = ("engine", "producers", "workers")
#: Environment variables that are read when a worker starts, and not before by what it imports.
LATE: Final = frozenset({"BROKER_URL", "STORE_URL", "CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET"})

Stamp = dict[str, tuple[int, int] | None]


def stamp() -> Stamp:
    """Every imported file, and every source file of our packages, with its time (ns) and size (bytes)."""
    files = {module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    return {str(file): _state(str(file)) for file in (*files, *_sources())}


def changed(before: Stamp, now: Stamp) -> str:
    """A file that was changed, added or removed; empty where all is as it was."""
    return next((file for file in sorted(before.keys() | now.keys()) if before.get(file) != now.get(file)), "")


def other_variable(before: dict[str, str], now: dict[str, str]) -> str:
    """A variable with another value that the process may have read already; empty where there is none."""
    names = sorted((before.keys() | now.keys()) - LATE)
    return next((name for name in names if before.get(name) != now.get(name)), "")


def _state(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _sources() -> Iterator[str]:
    for package in OURS:
        for folder in sys.modules[package].__path__ if package in sys.modules else ():
            yield from _files(Path(folder))


def _files(folder: Path) -> Iterator[str]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("__pycache__", "models") or where != str(folder)]
        yield from (os.path.join(where, name) for name in names if name.endswith((".py", ".lua", ".so")))
