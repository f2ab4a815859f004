"""Processes that start in a tenth of a second: forked from one that has imported everything.

    Forked(argv)   `python -m MODULE ARGUMENT...` without its imports; all else is as if it had been executed
    printed(argv)  such a process's status and what it prints
    warm_gateway   a gateway on a socket
    WarmWorker     a worker with the stub engine, and with less patience than those that serve

All end when the process that everything is forked from does, which ends with the one that asked for it.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from tests.chaos import clock
from workers.processes.guard import PR_SET_PDEATHSIG

if TYPE_CHECKING:
    from producers.gateway import GatewaySettings

#: What the processes of a system would import when they start; last, what lets them share its memory.
_IMPORTS = """
    billiard.dummy billiard.pool boto3 celery.app.control celery.app.events celery.app.log celery.apps.worker
    celery.backends.redis celery.events celery.fixups.django celery.worker.autoscale celery.worker.consumer
    celery.worker.consumer.delayed_delivery celery.worker.control celery.worker.heartbeat celery.worker.loops
    celery.worker.request celery.worker.strategy encodings.idna importlib.resources.readers
    producers.broker.memory producers.broker.redis.calls producers.broker.redis.broker producers.broker.sqs.check
    producers.broker.sqs.consumer producers.broker.sqs.operator producers.broker.sqs.receiver
    producers.broker.sqs.operator producers.sources.settings
    hiredis redis.asyncio tests.chaos.strike tests.chaos.sweeping tests.stub_engine
    workers.pool.consumer workers.pool.engine_pool workers.pool.app workers.runtime.assembly workers.runtime.worker
    producers.gateway producers.gateway.app producers.gateway.batch_endpoints
    uvicorn uvicorn.protocols.http.httptools_impl uvloop
    workers.trials.chaos.senders workers.trials.chaos.caller workers.cli.commands workers.cli.gateway
    workers.cli.background workers.cli.webhooks workers.cli.worker workers.webhooks.deliverer
    tests.spared tests.frozen
"""


@cache
def template() -> ForkServerContext:
    """Where they are forked from. Their clocks can be set, where that is possible here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS.split())
    with _environment(clock.preload() if clock.available() else {}):
        forkserver.ensure_running()
    return context


@contextmanager
def _environment(env: Mapping[str, str]) -> Any:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Child:
    """What the template forked. Its end is told once, to whoever reads first: of several threads one at a time asks."""

    def __init__(self, run: Callable[..., None], *args: object) -> None:
        self._process = template().Process(target=run, args=args, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._asking = Lock()

    def poll(self) -> int | None:
        """The exit code (negative: the signal), or None where it still runs."""
        with self._asking:
            return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def ended(self, seconds: float | None) -> int | None:
        """As `poll`, after so long at most."""
        wait([self._process.sentinel], seconds)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked(_Child):
    """A `subprocess.Popen` of `argv`, which runs a module (`-m`), as far as it goes. What it prints goes to `log`.
    `folder`: in which it runs."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path, folder: Path | None = None) -> None:
        name, *arguments = argv[argv.index("-m") + 1 :]
        super().__init__(_run, name, arguments, {**os.environ, **env}, str(log), folder and str(folder))

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if (code := self.ended(timeout)) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code


def printed(argv: Sequence[str], env: Mapping[str, str], folder: Path, seconds: float) -> tuple[int, str]:
    """The status of a `Forked` that runs to its end, and what it prints. Raises subprocess.TimeoutExpired."""
    handle, name = tempfile.mkstemp(prefix="penstock-", suffix=".log")
    os.close(handle)
    log = Path(name)
    forked = Forked(argv, env, log, folder)
    try:
        return forked.wait(seconds), log.read_text()
    finally:
        forked.kill()
        log.unlink()


def warm_gateway(settings: GatewaySettings, listener: socket.socket) -> BaseProcess:
    """A gateway that listens there."""
    process = template().Process(target=_answer, args=(settings, listener, dict(os.environ)), daemon=True)
    process.start()
    return process


class WarmWorker(_Child):
    """As `tests.processes.Worker`, with the stub engine; `env` are environment variables of its own."""

    def __init__(self, *, env: dict[str, str], **fields: Any) -> None:
        handle, name = tempfile.mkstemp(prefix="penstock-worker-", suffix=".log")
        os.close(handle)
        self.log = Path(name)
        super().__init__(_serve, {"model": "stub", "engine_factory": "tests.stub_engine:load"} | fields, env, name)

    @property
    def alive(self) -> bool:
        return self.returncode is None

    def close(self) -> None:
        """Kill it where it still runs, and forget its log."""
        self.kill()
        self.ended(None)
        self._process.close()
        self.log.unlink(missing_ok=True)


def _begin(env: dict[str, str], log: str | None = None) -> None:
    """In the new process: as if it had been executed. Without a log, it writes where the tests do."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if log is not None:
        with open(log, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("LD_PRELOAD", None)
    os.environ.update(env)
    clock.attend()
    logging.getLogger().handlers.clear()


def _run(module: str, arguments: list[str], env: dict[str, str], log: str, folder: str | None) -> None:
    _begin(env, log)
    os.chdir(folder or ".")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _answer(settings: GatewaySettings, listener: socket.socket, env: dict[str, str]) -> None:
    _begin(env)
    from producers.gateway import serve

    serve(settings, listener)


def _serve(settings: dict[str, Any], env: dict[str, str], log: str) -> None:
    _begin(env, log)
    import workers.flow.intake
    import workers.pool.app
    import workers.runtime.drain
    from workers.runtime.worker import run_worker
    from workers.settings import WorkerSettings

    # A retried task is ready again after these two.
    workers.pool.app.RETRY_COUNTDOWN_S = 0.05
    workers.flow.intake.IDLE_S = 0.2
    # What is not handed back in time returns when the lease lapses, and counts a death: as on a busy machine.
    workers.runtime.drain.HAND_BACK_S, workers.runtime.drain.EXIT_S = 60.0, 70.0  # type: ignore[misc]
    sys.exit(run_worker(WorkerSettings(**settings)))
