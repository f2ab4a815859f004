"""`penstock worker`: load the model, announce it, and let Celery's worker run until it is told to stop.

    beside the load       Celery's modules, the application, its worker with pool and consumer: all that needs no model
    after it              the queues, whose names hold the engine's fingerprint; batch and link; the connection

What is beside the load runs on the thread of `Boot`. If a server or a model is missing, that still fails on the main
thread, before or in the load. So this module imports what a load needs, and `Boot` imports Celery and all else.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from redis import Redis

from engine.errors import ErrorText, message_of
from producers.connection import logs
from producers.connection.log_throttle import Throttle, warn_throttled
from producers.connection.trouble import trouble
from producers.contract import keys
from producers.contract.levels import beside
from producers.store.fleet import cards
from workers.connect import LOST, check_queues, check_servers, connect
from workers.engine_process.front import ProcessEngine
from workers.errors import Refused
from workers.flow.probe import check_model
from workers.library import find_model, verify
from workers.processes.notify import notify_ready, notify_start
from workers.progress import bytes_bar
from workers.runtime.aws import SpotNotice, TaskProtection
from workers.runtime.cold_start import COLD_START
from workers.runtime.health import Health
from workers.runtime.signals import Stopping
from workers.settings import WorkerSettings
from workers.state.engine import ServedEngine
from workers.state.served import Served, places

if TYPE_CHECKING:
    from celery import Celery

    from workers.flow.celery_side import CelerySide
    from workers.pool.transport import Link
    from workers.runtime.assembly import Runtime

logger = logging.getLogger(__name__)

#: A store that does not take what must be in it before this worker can serve is asked again after this long.
RETRY_S: Final = 1.0
#: Time (s) between two notifications of how much of the weights is read.
READING_S: Final = 0.25
#: Longest time (s) for which imports keep the load, which needs the interpreter often and for short, from going on.
TURN_S: Final = 0.0005


def run_worker(settings: WorkerSettings, loglevel: str = "INFO") -> int:
    """Serves until a signal stops it (`workers.runtime.signals`), and ends the process. Returns the exit code if Celery
    gives up.

    Raises workers.errors.Refused where broker, store or model cannot be used.
    """
    COLD_START.mark("imports")
    _log(loglevel)
    # Before there are threads: it is forked.
    process = ProcessEngine(settings.name, settings.lease) if settings.engine_process else None
    stopping = Stopping()
    stopping.install()
    health = Health(settings.health_port, starting="the model is being loaded")
    check_servers(settings.broker, settings.store, queues=(), worker=True, process="worker")
    COLD_START.mark("connect")
    with Boot(settings, loglevel, ("celery.worker.consumer", "workers.runtime.assembly")) as boot:
        served = _loaded(settings, process)
    app = boot.app(served.pool.queues)
    from celery.signals import worker_ready
    from celery.worker import state

    from workers.runtime.assembly import Runtime

    runtime = Runtime(served, app, lambda store: announce(store, served.engine, served.files, placing=served.places))
    threading.excepthook = partial(_thread_died, runtime)
    stopping.serve(runtime.stop, settings.drain)
    runtime.start()
    health.serve(runtime, None)  # its watchdog looks at the event loop
    if settings.spot_notice is not None:
        SpotNotice(runtime.notice, settings.spot_endpoint).start()
    TaskProtection.follow(lambda: bool(runtime.deliveries.by_uuid))
    worker = boot.worker(runtime.celery, runtime.link)
    # What is there now stays, the little garbage among it too: a collection would take 200 ms to go through it.
    gc.freeze()
    gc.enable()
    gc.collect()  # the next full one comes when a quarter of what this one leaves, nothing, has come
    logger.info("Serving %s from %s", served.model, served.pool.queue)
    worker_ready.connect(partial(_tell_ready, runtime), weak=False)
    worker.start()
    if runtime.drain.over.is_set():
        # The interpreter's own end takes as long as it likes, and on a busy machine longer than a drain may.
        logging.shutdown()
        os._exit(os.EX_OK)
    return 0 if state.should_stop is not None else int(worker.exitcode or 0)


def _log(level: str) -> None:
    try:
        logs.set_up(level)
    except ValueError as error:
        raise Refused(str(error)) from error
    # a line or two for every task, and for every client of AWS
    for name in ("celery.app.trace", "celery.worker.strategy", "botocore"):
        logging.getLogger(name).setLevel(logging.DEBUG if level == "DEBUG" else logging.WARNING)
    # a line for every try, with a traceback, while the server is full or away
    for name in ("kombu.transport.redis", "celery.worker.consumer.consumer"):
        logging.getLogger(name).addFilter(Throttle())


class Boot:
    """Begins at once, and has ended when its context is left, so nothing is imported behind a caller that goes on or
    fails. `app()` raises the thread's error. `imports`: modules to import after Celery's."""

    def __init__(self, settings: WorkerSettings, loglevel: str, imports: tuple[str, ...] = ()) -> None:
        self._thread = ThreadPoolExecutor(1, "boot")
        self._future = self._thread.submit(_make, settings, loglevel, imports)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def app(self, queues: list[str]) -> Celery:
        """The application, which consumes these queues."""
        app, _ = self._future.result()
        from workers.pool.app import consume

        consume(app, queues)
        return app

    def worker(self, batch: CelerySide, link: Link) -> Any:
        """Celery's worker around the batch, to be started on the main thread."""
        app, worker = self._future.result()
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
        app_and_worker = _make_worker(settings, loglevel)
        for name in imports:
            import_module(name)
    finally:
        sys.setswitchinterval(turn)
    return app_and_worker


def _make_worker(settings: WorkerSettings, loglevel: str) -> tuple[Celery, Any]:
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


def _loaded(settings: WorkerSettings, process: ProcessEngine | None = None) -> Served:
    """Loads the model, in its own process if there is one, checks that the servers have its queues, and announces it.
    Raises Refused."""
    _check_signatures(settings)
    engine: ServedEngine
    if process is None:
        engine, files = _factory(settings.engine_factory)(settings.model, settings.engine)
    else:
        engine, facts = process, process.load(settings.engine_factory, settings.model, settings.engine)
        COLD_START.adopt(facts["phases"])
        files = facts["files"]
    COLD_START.mark("weights")
    check_model(engine, settings.model, settings.step_limit)
    COLD_START.mark("warm_up")
    pool = pool_of(engine)
    queues = [*beside(pool.version_queue), keys.model_queue(pool.model)]
    check_queues(settings.broker, settings.store, queues, must_answer=False, make=True, lease=settings.lease)
    return _announced(settings, engine, files)


def _check_signatures(settings: WorkerSettings) -> None:
    """Raise Refused for a model, or draft model, that none of the demanded keys has signed. That its files are those of
    the manifest is checked as they are loaded."""
    if not settings.require_signature:
        return
    from workers.library.signatures import check_signature

    references = [settings.model, *([str(draft)] if (draft := settings.engine.get("draft_model")) else [])]
    for reference in references:
        folder = find_model(reference, say=logger.info).folder
        key = check_signature(folder, [Path(file) for file in settings.require_signature])
        logger.info("%s is signed by %s", folder, key)


def _factory(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def load_engine(model: str, options: dict[str, Any]) -> tuple[ServedEngine, dict[str, bytes]]:
    """`engine.Engine` or `PoolingEngine` for the model, by its reference, and its tokenizer's files by name.

    Raises Refused."""
    from engine import Engine, EngineConfig, EngineError, PoolingEngine  # torch takes seconds to import
    from engine.text import ModelCard
    from engine.text.config import read_config
    from engine.text.pooling import purpose

    COLD_START.mark("imports")
    model_files = find_model(model, say=logger.info)
    folder = model_files.folder
    notify_start("checking the model's files")
    verify(folder, say=logger.info)
    if "draft_model" in options:
        draft = find_model(options["draft_model"], say=logger.info).folder
        verify(draft, say=logger.info)
        options = options | {"draft_model": str(draft)}
    try:
        kind = Engine if purpose(folder, read_config(folder)) == "generate" else PoolingEngine
        reading = _Reading().notify
        engine: Engine | PoolingEngine = kind.load(
            folder, EngineConfig(**options), loaded=COLD_START.mark, progress=reading
        )
    except EngineError as exc:
        raise Refused(ErrorText.of("cannot serve {}: {}", folder, message_of(exc))) from exc
    if engine.card is None:
        raise Refused(f"cannot serve {folder}: it has no tokenizer.json")
    engine.card = replace(engine.card, name=model_files.name)
    return engine, ModelCard.tokenizer_files(folder)


class _Reading:
    """Tells those who wait for this worker how much of the weights it has read, now and then."""

    def __init__(self) -> None:
        self._next = 0.0

    def notify(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + READING_S
            notify_start(f"reading weights {bytes_bar(done, total)}")


def pool_of(engine: ServedEngine) -> keys.Pool:
    """The pool that a worker with this engine belongs to."""
    assert engine.card is not None
    card = json.loads(engine.card.to_json())
    return keys.Pool(card["name"], card["version"], engine.fingerprint)


def _announced(settings: WorkerSettings, engine: ServedEngine, files: dict[str, bytes]) -> Served:
    """Announce the model; try until the store takes it. A full store, or a failover, is no reason to load again."""
    with connect(settings.store) as store:
        while True:
            try:
                card, pool = announce(store, engine, files, placing=places(settings, engine))
                new = cards.takes_new(cards.read(store, pool.model), pool.version)
                return Served(settings, engine, card, files, pool, takes_plain=new)
            except LOST as exc:
                if trouble(exc) is None:
                    raise
                warn_throttled(logger, "The store does not take the model's card, trying again: %s", exc)
                time.sleep(RETRY_S)


def announce(
    store: Redis, engine: ServedEngine, files: dict[str, bytes], *, placing: bool = False
) -> tuple[dict[str, Any], keys.Pool]:
    """Write the model's card, tokenizer files and pool into the store; return the card as served, and the pool.
    `placing`: its tasks are placed by the marks of their prompts.

    The card outlives the worker, so that a gateway can check, tokenise and queue while no worker is up.
    """
    assert engine.card is not None
    card = json.loads(engine.card.to_json())
    card["context_length"] = min(card["context_length"], engine.max_model_len)
    if engine.kv_capacity < card["context_length"]:
        card["kv_capacity"] = engine.kv_capacity
    if engine.watermarks is not None:
        card["watermark"] = engine.watermarks.describe()
    if placing:
        card["marked_block"] = engine.marked_block
    pool = pool_of(engine)
    cards.announce(store, card, pool, files)
    return card, pool


def _tell_ready(runtime: Runtime, **_: Any) -> None:
    """Logs and counts how long the start took, once Celery's consumer takes tasks for the first time."""
    if COLD_START.ready():
        runtime.measured.increments.on_start(COLD_START.figures, from_standby=COLD_START.from_standby)
        logger.info("Ready in %s", COLD_START)
        notify_ready(f"Ready in {COLD_START}")


def _thread_died(runtime: Runtime, args: Any) -> None:
    """A worker that lacks a thread cannot go on. Any of its tasks may have been to blame."""
    name = args.thread.name if args.thread else "a thread"
    logger.critical("%s died", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))
    if name == "penstock-drain":
        os._exit(os.EX_SOFTWARE)
    elif name.startswith("penstock-"):
        runtime.give_up(f"{name} died: {args.exc_type.__name__}", None)
