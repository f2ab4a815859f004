"""The standby process: `python -P -m workers.processes.standby_process FD NICENESS MODULE...`.

    imports -> stamps them -> "ready" -> waits -> "taken" -> becomes `penstock worker ...`
            -> "ready": it was handed a program meanwhile  -> "REASON" -> exits

FD is its end of a socket pair, NICENESS that of its imports; with no MODULE it imports all that a worker does, or, with
a program to run, what that needs until it loads its model: the rest is imported beside the load (`Boot` in
`workers.runtime.worker`).

Nothing here opens a connection, initialises a GPU, or starts a thread that computes: what a worker is told by its
options and environment comes later. NumPy starts threads of its own, which nothing here uses.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from setproctitle import setproctitle

TITLE: Final = "penstock: standby"
#: The worker's clock. By its name, as all that is imported here: these are rooms above this one.
COLD_START: Final = "workers.runtime.cold_start"
#: Memory (bytes) that a standby may take. One that takes more is not kept.
MOST_BYTES: Final = 400 << 20
#: Read when a process starts, whoever imports it: also scripts and modules that are imported later.
OURS: Final = ("engine", "producers", "workers")
#: Environment variables that are read when a worker starts, and not before by what it imports.
LATE: Final = frozenset(
    {"BROKER_URL", "STORE_URL", "CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET", "PENSTOCK_SECRETS_KEY_FILE"}
)

#: All that a worker with a CPU engine imports until it loads its model, by the last module of each chain.
FIRST: Final = (
    "workers.cli.commands",
    "workers.cli.worker",
    "engine.engine",
    "workers.runtime.worker",
)
#: What it imports beside that.
MODULES: Final = (
    *FIRST,
    "workers.runtime.assembly",
    # What Celery imports by name when its worker is made.
    "billiard.dummy",
    "celery.app.control",
    "celery.app.events",
    "celery.app.log",
    "celery.fixups.django",
    "celery.utils.timer2",
    "celery.worker.autoscale",
    "celery.worker.consumer",
    "celery.worker.control",
    "celery.worker.heartbeat",
    "celery.worker.loops",
    "celery.worker.pidbox",
    "celery.worker.request",
    "kombu.matcher",
    "producers.broker.redis.broker",
    "workers.pool.consumer",
    "workers.pool.engine_pool",
    "encodings.ascii",
    "encodings.idna",
    "encodings.unicode_escape",
)

Stamp = dict[str, tuple[int, int] | None]


def main() -> None:
    """Wait for a program and run it."""
    setproctitle(TITLE)
    started_with = dict(os.environ)
    ours = socket.socket(fileno=int(sys.argv[1]))
    ours.set_inheritable(False)
    gc.disable()
    clock = import_module(COLD_START).COLD_START
    clock.mark("process")
    niceness, modules = int(sys.argv[2]), sys.argv[3:]
    preload(modules or FIRST, niceness)
    if not modules and not _program_came(ours):
        preload(MODULES, niceness)
    clock.mark("imports")
    # With a program to run already, this is a start as any: no time for a file to change, and no memory held for long.
    read = None if _program_came(ours) else _settled()
    ours.sendall(b"ready\n")
    message, output = _received(ours)
    if read is not None:
        clock.begin()
    reason = _changed(read, started_with, message["env"])
    if reason:
        ours.sendall(f"{reason}\n".encode())
        sys.exit()
    _become(message, output)
    ours.sendall(b"taken\n")
    ours.close()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def preload(modules: Sequence[str], niceness: int) -> None:
    """Imports these, in a thread of a priority of its own. Raises whatever an import raises.

    `niceness`: what the thread adds to that of the process. Priority on Linux belongs to a thread, and only root may
    raise it again: so the thread is nice, and the process is not.
    """
    failed: list[BaseException] = []

    def run() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + niceness)
        try:
            for name in modules:
                import_module(name)
        except BaseException as error:  # noqa: BLE001 - told to the main thread
            failed.append(error)

    thread = threading.Thread(target=run, name="penstock-preload")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _program_came(ours: socket.socket) -> bool:
    """Returns whether a program has come."""
    return bool(select.select([ours], [], [], 0)[0])


def _settled() -> Stamp:
    """Prepares to wait for long. Returns the state of the imported code."""
    read = stamp()
    gc.collect()
    gc.freeze()  # later collections need not go through all of this
    gc.enable()
    used = resident()
    if used > MOST_BYTES:
        sys.exit(f"takes {used >> 20} MiB, more than {MOST_BYTES >> 20}: none is kept")
    return read


def _received(ours: socket.socket) -> tuple[dict[str, Any], int]:
    """Receives the program and the file descriptor of its output. Exits if the supervisor is gone."""
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


def _changed(read: Stamp | None, started_with: dict[str, str], env: dict[str, str]) -> str:
    """Returns why a worker has to be started normally; empty if this process can become it. `read`: None if it has not
    waited."""
    if read is not None and (file := changed(read, stamp())):
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
    """Returns the memory (bytes) of this process that is in RAM; 0 if the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def stamp() -> Stamp:
    """Every imported file, and every source file of our packages, with its time (ns) and size (bytes)."""
    files = {module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    return {str(file): _state(str(file)) for file in (*files, *_sources())}


def changed(before: Stamp, now: Stamp) -> str:
    """Returns a file that was changed, added or removed; empty if there is none."""
    return next((file for file in sorted(before.keys() | now.keys()) if before.get(file) != now.get(file)), "")


def other_variable(before: dict[str, str], now: dict[str, str]) -> str:
    """Returns a variable with another value that the process may have read already; empty if there is none."""
    names = sorted((before.keys() | now.keys()) - LATE)
    return next((name for name in names if before.get(name) != now.get(name)), "")


def _state(file: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _sources() -> Iterator[str]:
    for package in OURS:
        for folder in sys.modules[package].__path__ if package in sys.modules else ():
            yield from _files(Path(folder))


def _files(folder: Path) -> Iterator[str]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("__pycache__", "models") or where != str(folder)]
        yield from (os.path.join(where, name) for name in names if name.endswith((".py", ".lua", ".so")))


if __name__ == "__main__":
    main()
