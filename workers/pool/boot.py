"""Celery's side of a worker, which boots on a thread of its own while the model is being loaded.

    beside the load       Celery's modules, the application, its worker with pool and consumer: all that needs no model
    after it              the queues, whose names hold the engine's fingerprint; the runtime; the connection

So what fails for want of a server or a model still fails on the main thread, before or in the load.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import Celery
from celery.apps.worker import install_cry_handler
from celery.exceptions import CPendingDeprecationWarning

from workers.pool.app import attach, consume, make_app
from workers.settings import WorkerSettings


class Boot:
    """Begins at once. `app()` waits for its end, and raises what it raised."""

    def __init__(self, settings: WorkerSettings, loglevel: str) -> None:
        with_one_thread = ThreadPoolExecutor(1, "boot")
        self._made = with_one_thread.submit(_make, settings, loglevel)
        with_one_thread.shutdown(wait=False)  # its thread ends with that work

    def app(self, queues: list[str]) -> Celery:
        """The application, which consumes these queues."""
        app, _ = self._made.result()
        consume(app, queues)
        return app

    def worker(self, runtime: Any) -> Any:
        """Celery's worker around the runtime, to be started on the main thread."""
        app, worker = self._made.result()
        attach(app, runtime)
        # Each time that the broker was away, Celery warns of tasks that cannot be acknowledged afterwards: these can.
        # Only here, since its worker shows all such warnings from when it is made.
        warnings.filterwarnings("ignore", category=CPendingDeprecationWarning, module="celery.worker.consumer")
        return worker


def _make(settings: WorkerSettings, loglevel: str) -> tuple[Celery, Any]:
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

    def only_ours(self: Any, worker: Any) -> None:
        install_cry_handler()  # SIGUSR1 shows where every thread is

    def keep_title(self: Any, info: Any) -> None:
        """Do nothing."""

    return type("Worker", (worker,), {"install_platform_tweaks": only_ours, "set_process_status": keep_title})
