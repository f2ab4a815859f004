"""Child processes of this one.

supervisor keeps a child running and stops it, and ends its leases with it; guard ends it with its parent; by notify it
tells that it serves, and its leases. standby keeps a process (standby_process) that has imported all that a worker
needs, and becomes the next one; ahead starts the first one before its supervisor's own imports. The workers of
`penstock up`, of `penstock worker --gpus` and of the autoscaler's local actuator run by it.

proc reads which processes of this machine are Penstock's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

GUARD: Final = str(Path(__file__).with_name("guard.py"))

#: The umask of `penstock up` and its processes: what they write, callers' data too, is this user's alone.
UMASK: Final = 0o077

#: The `penstock` command. -P keeps a folder named `workers` in the current directory from being imported instead of
#: ours.
PENSTOCK: Final = (sys.executable, "-P", "-m", "workers.cli")


def guarded(argv: Sequence[str], last: int = signal.SIGKILL) -> list[str]:
    """The command line of a child that gets the signal `last` when this process dies (`guard`)."""
    return [sys.executable, "-I", "-S", GUARD, str(os.getpid()), str(int(last)), *argv]
