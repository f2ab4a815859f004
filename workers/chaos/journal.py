"""A file of JSON lines that outlives whoever writes it: each line is in the kernel's hands once it was written.

What the lines say: `workers.chaos.checker.history`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def journal_path(folder: Path, name: str, number: int) -> Path:
    """Of the process of that name that is the `number`th, from 1: in order of time where sorted."""
    return folder / f"{name}.{number:04d}.jsonl"


class Journal:
    """Of one process; a process that is started anew begins the next file of its name."""

    def __init__(self, folder: Path, name: str, number: int = 1) -> None:
        self.path = journal_path(folder, name, number)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        """One line, with the time."""
        line = json.dumps({"t": round(time.monotonic(), 4), "e": event, **fields}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)
