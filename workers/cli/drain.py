"""`penstock drain`: tells the worker on this machine, or in this container, to drain, and waits until it exits."""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from workers.cli.commands import Commands
from workers.cli.exits import Exit, Failure
from workers.cli.options import finite
from workers.runtime.host import proc

STATUS: Final = "Exit status: 0 the worker has ended, 2 refused, 4 timed out (it goes on draining), 130 interrupted."


app = Commands("Operations", STATUS)


@app.shown("penstock drain --timeout 60")
def drain(
    pid: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=proc.LAST,
            help="The worker's process id. Unset: the only worker here, which runs in this folder.",
        ),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Hand running tasks back at once.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="Longest wait (s). Unset: until the worker exits.")
    ] = None,
) -> None:
    """Tell the worker on this machine to drain, and wait until it exits. Made for preStop hooks in Kubernetes."""
    if sys.platform != "linux":
        raise Failure("penstock drain needs Linux; elsewhere send the worker SIGTERM")
    found = workers_here()
    if pid is None:
        if len(found) != 1:
            several = f"there are {len(found)} ({', '.join(map(str, found))}): choose one with --pid"
            raise Failure(several if found else "no worker runs here (in a container, run this in the worker's own)")
        pid = found[0]
        if (folder := proc.folder_of(pid)) != Path.cwd():  # it may be another system's
            raise Failure(
                f"the only worker here, {pid}, runs in {folder or 'another folder'}: name it with --pid {pid}"
            )
    try:
        handle = os.pidfd_open(pid)
        # The handle pins the process: the number cannot pass to another one between the check and the signal.
        if not _is_worker(pid):
            raise Failure(f"process {pid} is no worker; there {_are(found)}")
        signal.pidfd_send_signal(handle, signal.SIGQUIT if now else signal.SIGTERM)
    except ProcessLookupError:
        raise Failure(f"there is no process {pid}; there {_are(found)}") from None
    except PermissionError:
        raise Failure(f"process {pid} is another user's: run this as that user") from None
    try:
        ended, _, _ = select.select([handle], [], [], timeout)
    except KeyboardInterrupt:
        raise Failure(f"interrupted; process {pid} goes on draining", Exit.INTERRUPTED) from None
    if not ended:
        raise Failure(f"process {pid} has not ended after {timeout:g} s; it goes on draining", Exit.TIMEOUT)
    typer.echo(f"worker {pid} has ended")


def workers_here() -> list[int]:
    """Process ids of the workers here. A worker with `--gpus` counts once, with its parent process."""
    found = [int(entry.name) for entry in proc.PROC.iterdir() if entry.name.isdigit() and _is_worker(int(entry.name))]
    return sorted(pid for pid in found if proc.parent_of(pid) not in found)


def _is_worker(pid: int) -> bool:
    return proc.command_of(proc.argv_of(pid)) == "worker"


def _are(found: list[int]) -> str:
    return f"are workers {', '.join(map(str, found))}" if found else "is no worker"
