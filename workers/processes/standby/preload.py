"""Imports what a worker imports until its first token, in a thread of a priority of its own.

Priority on Linux belongs to a thread, and only root may raise it again: so the thread is nice, and the process is not.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Final

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


def preload(modules: Sequence[str], niceness: int) -> None:
    """Import these. `niceness`: what the thread adds to that of the process. Raises whatever an import raises."""
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
