"""Builds a folder under a temporary name, renames it when it is complete, and removes killed processes' leftovers."""

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
    """Makes a folder beside `out`, and renames it to `out` at the end or removes it after an error.

    The folder is locked while its process lives. The next call for the same target removes unlocked ones, which killed
    processes left. Raises Failure if `out` was made meanwhile.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in sorted(out.parent.glob(f".{glob.escape(out.name)}.*.partial")):
        if re.fullmatch(rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.partial", left.name):
            _sweep(left, say)
    while (begun := _begun(out)) is None:
        pass  # another process removed the folder before it was locked
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
    """A new folder and the descriptor that locks it; None if another process removed it before it was locked."""
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
    """Remove the folder, unless its process is alive."""
    try:
        lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # removed meanwhile, or not a folder
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(left, ignore_errors=True)
        say(f"removed {left}, which a killed run had left")
    except BlockingIOError:
        say(f"{left} is being made by another process; it is left alone")
    finally:
        os.close(lock)
