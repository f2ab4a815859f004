"""The standby process: `python -P -m workers.processes.standby.process FD MODULE...`; FD is its end of a socket pair.

    imports -> stamps them -> "ready" -> waits -> "taken" -> becomes `penstock worker ...`
                                               -> "REASON" -> exits

Nothing here opens a connection, initialises a GPU, or starts a thread that computes: what a worker is told by its
options and environment comes later. NumPy starts threads of its own, which nothing here uses.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import socket
import struct
import sys
from importlib import import_module
from typing import Any, Final

from setproctitle import setproctitle

TITLE: Final = "penstock: standby"
#: The worker's clock. By its name, as all that is imported here: these are rooms above this one.
COLD_START: Final = "workers.runtime.cold_start"
#: Memory (bytes) that a standby may take. One that takes more is not kept.
MOST_BYTES: Final = 400 << 20


def main() -> None:
    """Wait for a program and run it."""
    setproctitle(TITLE)
    started_with = dict(os.environ)
    ours = socket.socket(fileno=int(sys.argv[1]))
    ours.set_inheritable(False)
    gc.disable()
    from workers.processes.standby.preload import preload
    from workers.processes.standby.stamp import stamp

    preload(sys.argv[2:])
    read = stamp()
    gc.collect()
    gc.freeze()  # later collections need not go through all of this
    gc.enable()
    taken = resident()
    if taken > MOST_BYTES:
        sys.exit(f"takes {taken >> 20} MiB, more than {MOST_BYTES >> 20}: none is kept")
    ours.sendall(b"ready\n")
    message, output = _received(ours)
    import_module(COLD_START).COLD_START.begin()
    reason = _changed(read, started_with, message["env"])
    if reason:
        ours.sendall(f"{reason}\n".encode())
        sys.exit()
    _become(message, output)
    ours.sendall(b"taken\n")
    ours.close()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _received(ours: socket.socket) -> tuple[dict[str, Any], int]:
    """The program and the file descriptor of its output. Exits where the supervisor is gone."""
    head, fds, _, _ = socket.recv_fds(ours, 4, 1)
    if not head:
        sys.exit()
    data = bytearray()
    (length,) = struct.unpack("!I", head)
    while len(data) < length:
        more = ours.recv(length - len(data))
        if not more:
            sys.exit()
        data += more
    return json.loads(data.decode("utf-8", "surrogateescape")), fds[0]


def _changed(read: dict[str, Any], started_with: dict[str, str], env: dict[str, str]) -> str:
    """The reason why a worker has to start anew; empty where there is none."""
    from workers.processes.standby.stamp import changed, other_variable, stamp

    if file := changed(read, stamp()):
        return f"{file} has changed since the standby read it"
    if name := other_variable(started_with, env):
        return f"{name} has another value than the standby started with"
    return ""


def _become(message: dict[str, Any], output: int) -> None:
    os.environ.clear()
    os.environ.update(message["env"])
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    argv = message["argv"]  # python -P -m MODULE ARGUMENT...
    setproctitle(" ".join(argv))
    sys.argv = argv[argv.index("-m") + 1 :]


def resident() -> int:
    """The memory (bytes) of this process that is in RAM; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    main()
