"""Celery's side of a worker, which boots on a thread of its own while the model is being loaded.

    beside the load       Celery's modules, the application, its worker with pool and consumer: all that needs no model
    after it              the queues, whose names hold the engine's fingerprint; batch and link; the connection

So what fails for want of a server or a model still fails on the main thread, before or in the load. Imports nothing
that takes time: Celery is imported on that thread.
"""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from celery import Celery

    from workers.flow.celery_side import CelerySide
    from workers.pool.transport import Link
    from workers.settings import WorkerSettings

#: Longest time (s) for which imports keep the load, which needs the interpreter often and for short, from going on.
TURN_S: Final = 0.0005


class Boot:
    """Begins at once, and is over where its context is left: nothing is imported behind whoever goes on, or fails.
    `app()` raises what it raised. `imports`: modules to import after Celery's."""

    def __init__(self, settings: WorkerSettings, loglevel: str, imports: tuple[str, ...] = ()) -> None:
        self._thread = ThreadPoolExecutor(1, "boot")
        self._made = self._thread.submit(_make, settings, loglevel, imports)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def app(self, queues: list[str]) -> Celery:
        """The application, which consumes these queues."""
        app, _ = self._made.result()
        from workers.pool.app import consume

        consume(app, queues)
        return app

    def worker(self, batch: CelerySide, link: Link) -> Any:
        """Celery's worker around the batch, to be started on the main thread."""
        app, worker = self._made.result()
        from celery.exceptions import CPendingDeprecationWarning

        from workers.pool.app import attach

        attach(app, batch, link)
        # Each time that the broker was away, Celery warns of tasks that cannot be acknowledged afterwards: these can.
        # Only here, since its worker shows all such warnings from when it is made.
        warnings.filterwarnings("ignore", category=CPendingDeprecationWarning, module="celery.worker.consumer")
        return worker


def _make(settings: WorkerSettings, loglevel: str, imports: tuple[str, ...]) -> tuple[Celery, Any]:
    turn = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        made = _made(settings, loglevel)
        for name in imports:
            import_module(name)
    finally:
        sys.setswitchinterval(turn)
    return made


def _made(settings: WorkerSettings, loglevel: str) -> tuple[Celery, Any]:
    from celery.exceptions import SecurityWarning

    from workers.pool.app import make_app

    # Celery warns of running as root because pickled messages could take it over: this worker accepts JSON alone.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    app = make_app(settings)
    worker = _quiet(app.Worker)(
        hostname=f"penstock@{settings.name}",
        loglevel=loglevel,
        concurrency=1,  # nobody asks: EnginePool knows its slots, the intake how much it may fetch
        without_mingle=True,
        without_gossip=True,
        quiet=True,
    )
    return app, worker


def _quiet(worker: Any) -> Any:
    """Celery's worker, without its handlers of signals: those run on the main thread, which may wait for a broker.

    It keeps the name that its command line gave it, too: operators look for `penstock worker`, not for `celeryd`.
    """
    from celery.apps.worker import install_cry_handler

    def only_ours(self: Any, worker: Any) -> None:
        install_cry_handler()  # SIGUSR1 shows where every thread is

    def keep_title(self: Any, info: Any) -> None:
        """Do nothing."""

    return type("Worker", (worker,), {"install_platform_tweaks": only_ours, "set_process_status": keep_title})
