"""Worker processes that start in a tenth of a second: forked from a process that has imported everything."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

#: What a worker would import when it starts.
_IMPORTS = """
    billiard.dummy celery.app.control celery.app.events celery.app.log celery.apps.worker celery.backends.redis
    celery.events celery.fixups.django celery.worker.autoscale celery.worker.consumer celery.worker.control
    celery.worker.heartbeat celery.worker.loops celery.worker.request celery.worker.strategy encodings.idna
    tests.chaos.strike tests.stub_engine
    workers.consumer workers.pool.engine_pool workers.pool.request workers.worker
"""


@cache
def _template() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS.split())
    return context


class WarmWorker:
    """As `tests.processes.Worker`, with the stub engine; `env` are environment variables of its own."""

    def __init__(self, *, env: dict[str, str], **fields: Any) -> None:
        handle, name = tempfile.mkstemp(prefix="penstock-worker-", suffix=".log")
        os.close(handle)
        self.log = Path(name)
        settings = {"model": "stub", "engine_factory": "tests.stub_engine:load"} | fields
        self._process = _template().Process(target=_serve, args=(settings, env, name), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def wait(self, seconds: float) -> int | None:
        """The exit code (negative: the signal), or None where it still runs."""
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def close(self) -> None:
        """Kill it where it still runs, and forget its log."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.log.unlink(missing_ok=True)


def _serve(settings: dict[str, Any], env: dict[str, str], log: str) -> None:
    """In the new process."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    import workers.task
    import workers.transport.intake
    from workers.settings import WorkerSettings
    from workers.worker import run_worker

    # A retried task is ready again after these two.
    workers.task.RETRY_COUNTDOWN_S = 0.05
    workers.transport.intake.IDLE_S = 0.2
    logging.getLogger().handlers.clear()
    sys.exit(run_worker(WorkerSettings(**settings)))
