"""Folders that appear under their name when they are whole, and what killed processes left of such."""

from __future__ import annotations

import fcntl
import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.cli.exits import Failure


@contextmanager
def unfinished(out: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """A folder beside `out` that becomes it at the end, or goes: there is never half of one by that name.

    It is locked for as long as the process lives, also one that is killed: the next for the same target takes away
    those that are not. Raises Failure where `out` was made meanwhile.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in sorted(out.parent.glob(f".{glob.escape(out.name)}.*.partial")):
        if re.fullmatch(rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.partial", left.name):
            _sweep(left, say)
    while (begun := _begun(out)) is None:
        pass  # whoever sweeps saw the folder before it was locked
    work, lock = begun
    try:
        yield work
        if os.path.lexists(out):
            raise Failure(f"{out} was made meanwhile; it is left as it is")
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def _begun(out: Path) -> tuple[Path, int] | None:
    """A new folder and the file that holds its lock; None where it was, or is being, swept before it had one."""
    work = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    work.mkdir()
    try:
        lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink > 0:
            return work, lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None


def _sweep(left: Path, say: Callable[[str], None]) -> None:
    """Take the folder away, unless the process that makes it is alive."""
    try:
        lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # gone meanwhile, or no folder of ours
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(left, ignore_errors=True)
        say(f"removed {left}, which a run that was killed had left")
    except BlockingIOError:
        say(f"{left} is being made by another process; it is left alone")
    finally:
        os.close(lock)
