"""`penstock worker`: load the model, announce it, and let Celery's worker run until it is told to stop.

Imports what a load needs; all else is imported on the thread of `Boot`, while the model is being loaded.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from producers.connection.log_throttle import Throttle, warn_throttled
from producers.connection.trouble import trouble
from producers.contract import keys
from producers.contract.levels import beside
from producers.store.fleet import cards
from workers.connect import LOST, check_queues, check_servers, connect
from workers.flow.probe import check_model
from workers.pool.boot import Boot
from workers.processes.notify import notify_ready
from workers.runtime.cold_start import COLD_START
from workers.runtime.health import Health
from workers.runtime.host.spot import SpotNotice
from workers.runtime.host.task_protection import TaskProtection
from workers.runtime.serving import announce, pool_of
from workers.runtime.signals import Stopping
from workers.settings import WorkerSettings
from workers.state.served import Served

if TYPE_CHECKING:
    from workers.runtime.assembly import Runtime

logger = logging.getLogger(__name__)

#: A store that does not take what must be in it before this worker can serve is asked again after this long.
RETRY_S = 1.0


def run_worker(settings: WorkerSettings, loglevel: str = "INFO") -> int:
    """Serve until told to stop (`workers.runtime.signals`), and end the process; return the exit code where Celery
    gives up.

    Raises workers.errors.Refused where broker, store or model cannot be used.
    """
    COLD_START.mark("imports")
    _log(loglevel)
    stopping = Stopping()
    stopping.install()
    health = Health(settings.health_port, starting="the model is being loaded")
    check_servers(settings.broker, settings.store, queues=(), worker=True)
    COLD_START.mark("connect")
    with Boot(settings, loglevel, ("celery.worker.consumer", "workers.runtime.assembly")) as boot:
        served = _loaded(settings)
    app = boot.app(served.pool.queues)
    from celery.signals import worker_ready
    from celery.worker import state

    from workers.runtime.assembly import Runtime

    runtime = Runtime(served, app, lambda store: announce(store, served.engine, served.files))
    threading.excepthook = partial(_thread_died, runtime)
    stopping.serve(runtime.stop, settings.drain)
    runtime.start()
    health.serve(runtime, None)  # its watchdog looks at the event loop
    if settings.spot_notice is not None:
        SpotNotice(runtime.notice, settings.spot_endpoint).start()
    TaskProtection.follow(lambda: bool(runtime.deliveries.held))
    worker = boot.worker(runtime.celery, runtime.link)
    # What is there now stays, the little garbage among it too: a collection would take 200 ms to go through it.
    gc.freeze()
    gc.enable()
    gc.collect()  # the next full one comes when a quarter of what this one leaves, nothing, has come
    logger.info("Serving %s from %s", served.model, served.pool.queue)
    worker_ready.connect(_tell_ready)
    worker.start()
    if runtime.drain.over.is_set():
        # The interpreter's own end takes as long as it likes, and on a busy machine longer than a drain may.
        logging.shutdown()
        os._exit(os.EX_OK)
    return 0 if state.should_stop is not None else int(worker.exitcode or 0)


def _log(level: str) -> None:
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # a line or two for every task, and for every client of AWS
    for name in ("celery.app.trace", "celery.worker.strategy", "botocore"):
        logging.getLogger(name).setLevel(logging.DEBUG if level == "DEBUG" else logging.WARNING)
    # a line for every try, with a traceback, while the server is full or away
    for name in ("kombu.transport.redis", "celery.worker.consumer.consumer"):
        logging.getLogger(name).addFilter(Throttle())


def _loaded(settings: WorkerSettings) -> Served:
    """Load the model, check what the servers must have for it, and announce it. Raises Refused."""
    engine, files = _factory(settings.engine_factory)(settings.model, settings.engine)
    COLD_START.mark("weights")
    check_model(engine, settings.model, settings.step_limit)
    COLD_START.mark("warm_up")
    pool = pool_of(engine)
    queues = [*beside(pool.version_queue), keys.model_queue(pool.model)]
    check_queues(settings.broker, settings.store, queues, must_answer=False, make=True, lease=settings.lease)
    return _announced(settings, engine, files)


def _tell_ready(**_: Any) -> None:
    """Tell how long the start took, once Celery's consumer takes tasks for the first time."""
    if COLD_START.ready():
        logger.info("Ready in %s", COLD_START)
        notify_ready(f"Ready in {COLD_START}")


def _announced(settings: WorkerSettings, engine: Any, files: dict[str, bytes]) -> Served:
    """Announce the model; try until the store takes it. A full store, or a failover, is no reason to load again."""
    with connect(settings.store) as store:
        while True:
            try:
                card, pool = announce(store, engine, files)
                new = cards.takes_new(cards.read(store, pool.model), pool.version)
                return Served(settings, engine, card, files, pool, takes_plain=new)
            except LOST as exc:
                if trouble(exc) is None:
                    raise
                warn_throttled(logger, "The store does not take the model's card, trying again: %s", exc)
                time.sleep(RETRY_S)


def _thread_died(runtime: Runtime, args: Any) -> None:
    """A worker that lacks a thread cannot go on. Any of its tasks may have been to blame."""
    name = args.thread.name if args.thread else "a thread"
    logger.critical("%s died", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))
    if name == "penstock-drain":
        os._exit(os.EX_SOFTWARE)
    elif name.startswith("penstock-"):
        runtime.give_up(f"{name} died: {args.exc_type.__name__}", None)


def _factory(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
