"""The Celery application of a worker."""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu import Exchange, Queue

from producers import keys
from producers.connect import kombu_url
from workers.settings import WorkerSettings
from workers.task import register
from workers.transport.redis import RUNTIME, SCHEME


def make_app(settings: WorkerSettings, queues: list[str]) -> Celery:
    """Consumes the queues through `workers.transport`; `attach` gives it the runtime before it starts."""
    app = Celery("penstock", set_as_current=False)
    app.conf.update(
        # TLS, if any, stands in the query (`ssl_cert_reqs`), where kombu looks for it whatever the scheme.
        broker_url=SCHEME + kombu_url(settings.broker).removeprefix("rediss").removeprefix("redis"),
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # stock gives up after 100 tries, three quarters of an hour
        result_backend=kombu_url(settings.store),
        result_extended=True,
        task_queues=[Queue(name, Exchange(name), routing_key=name) for name in queues],
        task_default_queue=queues[-1],
        task_create_missing_queues=True,
        accept_content=["json"],
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_pool="workers.pool.engine_pool:EnginePool",
        worker_consumer="workers.consumer:Consumer",
        worker_hijack_root_logger=False,
        worker_send_task_events=settings.events,
        # Deliveries belong to the worker's incarnation, not to a connection: losing the connection ends nothing.
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_enable_prefetch_count_reduction=False,
    )
    register(app, settings.max_retries)
    return app


def attach(app: Celery, runtime: Any) -> None:
    """The pool finds the runtime as `app.penstock`, the transport among its options."""
    app.penstock = runtime
    app.conf.broker_transport_options = {RUNTIME: runtime, "priority_steps": steps()}


def steps() -> list[int]:
    """kombu's priority steps, in its order."""
    return sorted(priority for _, priority in keys.TIERS.values())
