"""Run a program that ends when the process that started it does, however that ended.

    python -I -S guard.py PARENT SIGNAL PROGRAM ARGUMENT...

On Linux the kernel sends SIGNAL when the parent dies (prctl(2), PR_SET_PDEATHSIG; kept by exec). Elsewhere nothing
does, and the program is merely run. Imports nothing of Penstock, so that it is on its way in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the program."""
    parent, number, *argv = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
            sys.exit(f"guard: prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # it died before the kernel knew of us
        sys.exit("guard: the process that started this is gone")
    os.execvp(argv[0], argv)  # noqa: S606 - the arguments are a list, no shell sees them


if __name__ == "__main__":
    main()
