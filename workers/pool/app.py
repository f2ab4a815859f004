"""The Celery application of a worker, and its tasks: `penstock.generate`, and one for each other kind.

A task's body runs when the engine is done, and passes on what the engine made.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any, Final

from celery import Celery, Task
from celery.backends.redis import RedisBackend
from celery.exceptions import Reject
from celery.worker.request import Request
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from producers.broker.connect import control_url
from producers.connection.connect import connection_pool, kombu_url
from producers.connection.script import run, text
from producers.connection.trouble import trouble
from producers.contract import keys
from producers.contract.keys import NAMED_KINDS
from producers.errors import TaskFailed
from producers.store.protocol import celery_result
from workers.flow.finisher import OUTCOME, Fault, Finisher
from workers.pool.transport import LINK, SCHEME, Link
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    from workers.flow.celery_side import CelerySide

#: The name under which Celery finds the result backend.
BACKEND: Final = "penstock"
#: Before a task that the engine failed is tried again, seconds; doubled each time.
RETRY_COUNTDOWN_S = 1.0
#: One lock for all requests: it is held for microseconds.
_acknowledging = threading.RLock()


class Backend(RedisBackend):
    """Celery's Redis result backend, on our connections, with their time limits and Sentinels."""

    def _get_pool(self, **params: Any) -> Any:
        return connection_pool(self.app.store_url)

    def _set(self, key: Any, value: Any, expires: Any = None) -> None:
        """Store a result, also in a store that is full."""
        run(self.client, celery_result(text(key), value, int(expires or self.expires or 0)))


class App(Celery):
    """Celery. A link that the broker refuses just now (its disk or memory is full) would make stock Celery store a
    failed task as its result, and settle it without the link. Here it Rejects, so the task is left as it is, and tried
    again."""

    store_url: str
    """The store's URL, password included: no part of the configuration, which `inspect conf` shows."""

    def send_task(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().send_task(*args, **kwargs)
        except OperationalError as exc:
            cause = exc.__cause__ if isinstance(exc.__cause__, Exception) else exc
            if isinstance(threading.current_thread(), Finisher) and trouble(cause) is not None:
                raise Reject(exc) from exc
            raise


def make_app(settings: WorkerSettings) -> Celery:
    """Consumes through `transport`. Before it starts, `consume` names its queues and `attach` plugs it in."""
    control = kombu_url(control_url(settings.broker, settings.store))
    app = App("penstock", set_as_current=False)
    app.store_url = settings.store
    app.loader.override_backends = {BACKEND: f"{__name__}:Backend"}
    app.conf.update(
        # TLS, if any, stands in the query (`ssl_cert_reqs`), where kombu looks for it whatever the scheme.
        broker_url=SCHEME + _without_user(control).removeprefix("rediss").removeprefix("redis"),
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # stock gives up after 100 tries, three quarters of an hour
        result_backend=f"{BACKEND}+{_without_user(kombu_url(settings.store)).removeprefix('redis+')}",
        result_extended=True,
        task_create_missing_queues=True,
        accept_content=["json"],
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_pool="workers.pool.engine_pool:EnginePool",
        worker_consumer="workers.pool.consumer:Consumer",
        worker_hijack_root_logger=False,
        worker_send_task_events=settings.events,
        # Deliveries belong to the worker's incarnation, not to a connection: losing the connection ends nothing.
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_enable_prefetch_count_reduction=False,
        worker_prefetch_multiplier=0,  # no limit of Celery's: the intake fetches what the engine has room for
    )
    register(app, settings.max_retries)
    return app


def _without_user(url: str) -> str:
    """The URL without user and password, for the configuration: `Link` and App connect by the whole one. Of a Unix
    socket `inspect stats` shows all of it."""
    return re.sub("://[^/?]*@", "://", url, count=1)


def consume(app: Celery, queues: list[str]) -> None:
    """Names the queues. Tasks that the application's own tasks send without a queue go to the last one."""
    app.conf.update(
        task_queues=[Queue(name, Exchange(name), routing_key=name) for name in queues], task_default_queue=queues[-1]
    )
    app.amqp.queues = app.conf.task_queues


def attach(app: Celery, batch: CelerySide, link: Link) -> None:
    """The batch for the pool (`batch_of`), and the link for the transport, among its options."""
    app.penstock = batch
    app.conf.broker_transport_options = {LINK: link, "priority_steps": steps()}


def batch_of(app: Celery) -> CelerySide:
    """The batch that `workers.pool.app.attach` gave the application."""
    batch: CelerySide = app.penstock
    return batch


def steps() -> list[int]:
    """kombu's priority steps, in its order."""
    return sorted(priority for _, priority in keys.TIERS.values())


class EngineRequest(Request):
    """Celery's request, taught that revoking a task must reach its record and the engine. Everything else is stock."""

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        super()._announce_revoked(reason, terminated, signum, expired)
        batch_of(self._app).revoke(self, expired)

    def acknowledge(self) -> None:
        """Acknowledge once, from whichever thread comes first.

        A lease may end while the finisher acknowledges, and Celery's worker exits at a second acknowledgement.
        """
        with _acknowledging:
            super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        """Reject once, as `acknowledge`."""
        with _acknowledging:
            super().reject(requeue)


class EngineTask(Task):
    """Run by `EnginePool` in the engine; any other task of the app runs on a thread beside it."""

    abstract = True
    engine_task = True
    acks_late = True
    Request = EngineRequest


def register(app: Celery, max_retries: int) -> None:
    """Add `penstock.generate` and the names of the other kinds to the app."""

    def settle(self: Any, *args: Any, **kwargs: Any) -> Any:  # what is wrong with `args` is the outcome's to say
        outcome = getattr(self.request, OUTCOME, None)
        if outcome is None:
            raise RuntimeError(f"{self.name} runs in a Penstock worker only (EnginePool), not here")
        if isinstance(outcome, Fault):
            headers = {"penstock": fields} if (fields := getattr(self.request, "penstock", None)) else {}
            countdown = RETRY_COUNTDOWN_S * 2**self.request.retries
            raise self.retry(exc=outcome, countdown=countdown, headers=headers)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    for name in NAMED_KINDS:
        app.task(
            settle,
            name=name,
            bind=True,
            base=EngineTask,
            max_retries=max_retries,
            shared=False,
            throws=(TaskFailed,),
        )
