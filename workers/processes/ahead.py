"""A standby that begins with the first line of a command, whose own imports then run beside those of its first worker.

    main -> begin -> imports of this process ... -> System: take -> Standby, which keeps it from then on
                  -> imports of that process ... -> it waits, or takes over what it was handed meanwhile

Imports nothing that takes time. What happens when a process dies is a table in `workers.processes.standby`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from workers.processes import UMASK, guarded

STANDBY: Final = (sys.executable, "-P", "-m", "workers.processes.standby_process")


@dataclass(frozen=True, slots=True)
class Ahead:
    """The process, and our end of its socket. Its output goes to our stderr until it is handed a program."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def end(self) -> None:
        """Kill it, and wait for its end. It has its socket until then: it would say that it lost it."""
        self.process.kill()
        self.process.wait()
        self.socket.close()


_begun: Ahead | None = None


def begin(*imports: str) -> None:
    """Starts the process. `imports`: its modules; none for all that a worker needs. If it cannot be started, there is
    none: a start without it is slower, not broken."""
    global _begun
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        try:
            process = subprocess.Popen(
                guarded((*STANDBY, str(number), "0", *imports)),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=(number,),
                start_new_session=True,
                umask=UMASK,  # as `penstock up` has it by the time when it starts others
            )
        except (OSError, ValueError):  # nothing left to start it with; or our stderr is closed
            ours.close()
            return
    ours.setblocking(False)
    _begun = Ahead(process, ours)


def take() -> Ahead | None:
    """Takes the process, which the caller ends from now on; None if there is none."""
    global _begun
    begun, _begun = _begun, None
    return begun


def end() -> None:
    """End the process if nobody has taken it."""
    if begun := take():
        begun.end()
