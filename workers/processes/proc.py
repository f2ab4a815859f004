"""Processes of this machine by their command lines: which are Penstock's, and what they are.

pid -> argv_of -> command_of -> "worker", "gateway", "sweeper", "up", ...; "server" for a Redis or Valkey
"""

from __future__ import annotations

import os
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
#: No process id is greater: to the kernel it is a signed integer of 32 bits.
LAST: Final = (1 << 31) - 1
#: The clock of a process's processor time, in the last bits of a clock's id (clock_getcpuclockid(3), Linux).
PROCESS_CLOCK: Final = 2
SERVER: Final = "server"
#: Names of the servers' programs.
SERVERS: Final = ("redis-server", "valkey-server")


def argv_of(pid: int) -> list[str]:
    """Returns the command line of a process; empty if it has ended. Without /proc (macOS), `ps` is used, which joins
    words by blanks, as a process does that gave itself a title: a worker that was a standby."""
    if PROC.is_dir():
        try:
            line = (PROC / str(pid) / "cmdline").read_bytes()
        except OSError:
            return []
        argv = line.decode(errors="replace").rstrip("\0").split("\0")
        return argv[0].split() if len(argv) == 1 else argv
    completed = subprocess.run(
        ["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return completed.stdout.split()


def command_of(argv: list[str]) -> str:
    """`worker` for `penstock worker ...` and `python -m workers.cli worker ...`; SERVER for a server; else empty."""
    for name, command in pairwise(argv):
        if name == "workers.cli" or os.path.basename(name) == "penstock":
            return command
    # A server writes its address where its arguments were, behind a blank.
    program = os.path.basename(argv[0].partition(" ")[0]) if argv else ""
    return SERVER if program in SERVERS else ""


def option(argv: list[str], name: str) -> str | None:
    """Returns the value in `--name VALUE` or `--name=VALUE`; None if there is none."""
    for word, value in pairwise([*argv, ""]):
        if word == name:
            return value
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def processor_time_of(pid: int) -> float:
    """The processor time (s) of a process, of all its threads. Raises OSError if it has ended; Linux alone."""
    return time.clock_gettime(~pid << 3 | PROCESS_CLOCK)


def folder_of(pid: int) -> Path | None:
    """Returns the folder that a process runs in; None if it has ended, or is another user's. Linux alone."""
    try:
        return (PROC / str(pid) / "cwd").readlink()
    except OSError:
        return None


def parent_of(pid: int) -> int:
    """Returns the parent's process id; 0 if it is not known. Linux alone."""
    try:
        # The name, in brackets, may hold anything.
        return int((PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0
