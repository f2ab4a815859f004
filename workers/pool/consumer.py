"""Celery's consumer, which keeps what it cannot read, logs nothing that callers sent, and reconnects soon.

Beside it the commands of Celery's remote control that do not know how a Penstock worker works, and its heartbeats.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ClassVar, Final

from celery.utils.log import get_logger
from celery.utils.sysinfo import load_average
from celery.worker import heartbeat, state
from celery.worker.consumer import Consumer as Stock
from celery.worker.consumer import consumer as stock
from celery.worker.consumer.heart import Heart as StockHeart
from celery.worker.control import Panel, control_command, inspect_command, nok
from kombu.utils.functional import maybe_list

from producers.connection.log_throttle import warn_throttled
from producers.contract.keys import KINDS, TASK_NAME
from producers.contract.message import is_plain
from workers.flow.monitors import Monitors
from workers.pool.app import batch_of

logger = get_logger(__name__)

#: Printed in logs instead of a message's body. `penstock dlq show` shows the whole message to users of the broker.
UNSHOWN: Final = "(not shown)"
#: Seconds between tries to connect: at first, more after each try, at most.
RECONNECT_S: Final = (0.2, 0.2, 1.0)
#: What stock logs of messages that it refuses.
STOCK_REPORTS: Final = (stock.UNKNOWN_FORMAT, stock.UNKNOWN_TASK_ERROR, stock.INVALID_TASK_ERROR)


class Consumer(Stock):
    """Stock acknowledges, and so loses, a message whose body cannot be decoded, and logs the bodies of others. Its rate
    limits hold up every task, also those of HTTP and the clients, for whom the gateway has bounds of its own.

    A kind of Penstock's messages that it does not know may be a later release's: that is not refused, but put aside."""

    class Blueprint(Stock.Blueprint):
        """Stock, but for the heartbeats."""

        default_steps: ClassVar = [
            f"{__name__}:Heart" if step.endswith(":Heart") else step for step in Stock.Blueprint.default_steps
        ]

    def ensure_connected(self, conn: Any) -> Any:
        """Stock waits 2 s longer after each try, up to half a minute, and so for long after a server is back; and it
        logs each try."""

        def failed(error: Exception, wait_s: float) -> None:
            self.broker_connection_retry_attempt += 1
            warn_throttled(logger, "Celery's consumer cannot connect to %s, trying again: %s", conn.as_uri(), error)

        start, step, longest = RECONNECT_S
        conn = conn.ensure_connection(
            failed,
            self.app.conf.broker_connection_max_retries,
            interval_start=start,
            interval_step=step,
            interval_max=longest,
            callback=state.maybe_shutdown,
        )
        self.first_connection_attempt = False
        self.broker_connection_retry_attempt = 0
        return conn

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        logger.critical("A message cannot be decoded (%s: %s): dead-lettered", type(exc).__name__, exc)
        message.reject()

    def on_unknown_message(self, body: Any, message: Any) -> None:
        logger.error("A message is not Celery's: dead-lettered")
        with _stock_is_quiet():
            super().on_unknown_message(UNSHOWN, message)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        name = message.headers["task"]
        if not name.startswith(KINDS):
            message_format = "Message %.200r is of task %.200r, and Penstock has no task of that name: dead-lettered"
            logger.error(message_format, message.headers.get("id"), name)
            with _stock_is_quiet():
                super().on_unknown_task(UNSHOWN, message, exc)
            return
        batch_of(self.app).defer_to_later_release(message.delivery_tag, name)
        message.channel.qos.forget(message.delivery_tag)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        reason = " ".join(str(exc).split())
        logger.error("Message %.200r is no task (%.200s): dead-lettered", message.headers.get("id"), reason)
        with _stock_is_quiet():
            super().on_invalid_task(UNSHOWN, message, exc)

    def _limit_task(self, request: Any, bucket: Any, tokens: int) -> Any:
        if is_plain(request.request_dict):
            return super()._limit_task(request, bucket, tokens)
        return self._limit_move_to_pool(request)

    def _limit_post_eta(self, request: Any, bucket: Any, tokens: int) -> Any:
        if is_plain(request.request_dict):
            return super()._limit_post_eta(request, bucket, tokens)
        self.qos.decrement_eventually()
        return self._limit_move_to_pool(request)


class Beats(heartbeat.Heart):
    """Heartbeats that also count the tasks which pass Celery by."""

    monitors: Monitors

    def _send(self, event: str, retry: bool = True) -> Any:
        return self.eventer.send(
            event,
            freq=self.interval,
            active=len(state.active_requests) + self.monitors.unseen,
            processed=state.all_total_count[0] + self.monitors.begun_count,
            loadavg=load_average(),
            retry=retry,
            **state.SOFTWARE_INFO,
        )


class Heart(StockHeart):
    """The step of the consumer's start that begins its heartbeats, once it has a connection and events can be sent."""

    def start(self, c: Any) -> None:
        monitors = batch_of(c.app).monitors
        monitors.eventer = c.event_dispatcher
        c.heart = Beats(c.timer, c.event_dispatcher, self.heartbeat_interval)
        c.heart.monitors = monitors
        c.heart.start()


@contextmanager
def _stock_is_quiet() -> Iterator[None]:
    """Keeps stock from logging a refused message with a traceback, over 25 lines that may hold what callers sent."""

    def refuse(record: logging.LogRecord) -> bool:
        return record.msg not in STOCK_REPORTS

    stock.logger.addFilter(refuse)
    try:
        yield
    finally:
        stock.logger.removeFilter(refuse)


#: Countdown tasks that one answer shows.
SHOWN: Final = 100


def scheduled(state: Any, **_: Any) -> list[dict[str, Any]]:
    """Countdown and ETA tasks, which wait in the broker for all workers of the pool; the soonest 100."""
    payloads = [json.loads(message) for message in batch_of(state.app).scheduled(SHOWN)]
    return [_shown(payload, state.hostname) for payload in payloads if payload["headers"].get("eta")]


def breaker(state: Any, **_: Any) -> dict[str, Any]:
    """State and reason of the worker's breaker, the figures that it goes by, and how it stands among its peers."""
    return batch_of(state.app).breaker()


def fixed(state: Any, n: int = 1, **_: Any) -> dict[str, str]:
    """Refused: the pool is as large as the engine's batch."""
    capacity = batch_of(state.app).capacity
    refusal: dict[str, str] = nok(
        f"the pool is the engine's batch of {capacity} sequences, which memory was set aside for; "
        "start the worker with another --max-num-seqs"
    )
    return refusal


def _shown(payload: dict[str, Any], hostname: str) -> dict[str, Any]:
    """One message in the form that Celery shows, with the sender's short form of its arguments."""
    headers, properties = payload["headers"], payload["properties"]
    return {
        "eta": headers["eta"],
        "priority": properties.get("priority"),
        "request": {
            "id": headers["id"],
            "name": headers["task"],
            "args": headers.get("argsrepr"),
            "kwargs": headers.get("kwargsrepr"),
            "type": headers["task"],
            "hostname": hostname,
            "time_start": None,
            "acknowledged": False,
            "delivery_info": properties.get("delivery_info"),
            "worker_pid": None,
        },
    }


def stats(state: Any, **_: Any) -> dict[str, Any]:
    """Stock's, whose count of tasks lacks those that pass Celery by."""
    statistics: dict[str, Any] = state.consumer.controller.stats()
    if begun := batch_of(state.app).monitors.begun_count:
        statistics["total"] = {**statistics["total"], TASK_NAME: statistics["total"].get(TASK_NAME, 0) + begun}
    return statistics


def _with_native_tasks(command: Callable[..., Any], ids: str | None) -> Callable[..., Any]:
    """A command that looks at Celery's books: first they get what passes Celery by. `ids`: the argument that names the
    tasks it is about, if it is not about all."""

    @wraps(command)
    def shown(state: Any, **arguments: Any) -> Any:
        named = None if ids is None else frozenset(map(str, maybe_list(arguments.get(ids)) or ()))
        batch_of(state.app).monitors.show(named)
        return command(state, **arguments)

    return shown


for name in ("active", "dump_active", "reserved", "dump_reserved"):
    Panel.data[name] = _with_native_tasks(Panel.data[name], None)
for name, ids in {"query_task": "ids", "revoke": "task_id", "terminate": "task_id"}.items():
    Panel.data[name] = _with_native_tasks(Panel.data[name], ids)
inspect_command()(stats)
inspect_command(alias="dump_schedule")(scheduled)
inspect_command()(breaker)
for name in ("pool_grow", "pool_shrink"):
    control_command(name=name, args=[("n", int)], signature="[N=1]")(fixed)
