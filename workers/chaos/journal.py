"""A file of JSON lines that survives its writer's death: a written line is in the kernel's page cache.

`workers.chaos.checker.history` defines the lines.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def journal_path(folder: Path, name: str, number: int) -> Path:
    """The journal's path for the `number`th process of that name, from 1. Paths sort by time."""
    return folder / f"{name}.{number:04d}.jsonl"


class Journal:
    """The journal of one process. A restarted process begins the next file of its name."""

    def __init__(self, folder: Path, name: str, number: int = 1) -> None:
        self.path = journal_path(folder, name, number)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        """Write one line with the event, the time and `fields`."""
        line = json.dumps({"t": round(time.monotonic(), 4), "e": event, **fields}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)
