"""Limits of other processes."""

from __future__ import annotations

import resource
from pathlib import Path


def bound_memory(pid: int, more: int) -> None:
    """Let a process have only `more` bytes of memory beyond what it has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
