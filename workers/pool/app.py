"""The Celery application of a worker."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from celery import Celery
from celery.backends.redis import RedisBackend
from celery.exceptions import Reject
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from producers.broker.connect import control_url
from producers.connection.connect import connection_pool, kombu_url
from producers.connection.script import run, text
from producers.connection.trouble import trouble
from producers.contract import keys
from producers.store.protocol import celery_result
from workers.flow.finisher import Finisher
from workers.pool.task import register
from workers.pool.transport import LINK, SCHEME, Link
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    from workers.flow.celery_side import CelerySide

#: The name under which Celery finds the result backend.
BACKEND: Final = "penstock"
#: The configuration key that holds the store's URL.
STORE: Final = "penstock_store"


class Backend(RedisBackend):
    """Celery's Redis result backend, on our connections, with their time limits and Sentinels."""

    def _get_pool(self, **params: Any) -> Any:
        return connection_pool(self.app.conf[STORE])

    def _set(self, key: Any, value: Any, expires: Any = None) -> None:
        """Store a result, also in a store that is full."""
        run(self.client, celery_result(text(key), value, int(expires or self.expires or 0)))


class App(Celery):
    """Celery, which takes a link that the broker refuses just now (its disk or memory is full) for a task that failed,
    stores that as its result, and settles it without the link. What Rejects is left as it is, and tried again."""

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
    app.loader.override_backends = {BACKEND: f"{__name__}:Backend"}
    app.conf.update(
        # TLS, if any, stands in the query (`ssl_cert_reqs`), where kombu looks for it whatever the scheme.
        broker_url=SCHEME + control.removeprefix("rediss").removeprefix("redis"),
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # stock gives up after 100 tries, three quarters of an hour
        result_backend=f"{BACKEND}+{kombu_url(settings.store).removeprefix('redis+')}",
        **{STORE: settings.store},
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


def consume(app: Celery, queues: list[str]) -> None:
    """Name the queues; the last one takes what tasks of the application's own send without a queue."""
    app.conf.update(
        task_queues=[Queue(name, Exchange(name), routing_key=name) for name in queues], task_default_queue=queues[-1]
    )
    app.amqp.queues = app.conf.task_queues


def attach(app: Celery, batch: CelerySide, link: Link) -> None:
    """The batch for the pool (`batch_of`), and the link for the transport, among its options."""
    app.penstock = batch
    app.conf.broker_transport_options = {LINK: link, "priority_steps": steps()}


def steps() -> list[int]:
    """kombu's priority steps, in its order."""
    return sorted(priority for _, priority in keys.TIERS.values())
