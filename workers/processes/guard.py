"""Runs a program that dies with the process that started it, whatever kills that process.

    python -I -S guard.py PARENT SIGNAL PROGRAM ARGUMENT...

On Linux the kernel sends SIGNAL when the parent dies (prctl(2), PR_SET_PDEATHSIG; kept by exec). On other systems the
program runs without this. Imports nothing of Penstock, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process with the program."""
    parent, number, *argv = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
            sys.exit(f"guard: prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # the parent died before prctl
        sys.exit("guard: the process that started this is gone")
    os.execvp(argv[0], argv)  # noqa: S606 - the arguments are a list, no shell sees them


if __name__ == "__main__":
    main()
