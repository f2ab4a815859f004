"""Connections to the broker and the store, checks of both, and the errors that commands and workers raise."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from producers.admin.roles import ROLES
from producers.broker.connect import check_broker, control_url
from producers.connection.aws import AwsNotInstalled
from producers.connection.connect import connect, is_redis, shown
from producers.connection.trouble import Trouble, trouble
from producers.store import servers
from workers.errors import Away, Refused

__all__ = ["LOST", "check_queues", "check_server", "check_servers", "connect"]

log = logging.getLogger(__name__)

#: Exceptions of a lost or refused connection.
LOST = (RedisError, OSError)


def check_servers(
    broker: str,
    store: str,
    queues: Sequence[str] | None = None,
    *,
    must_answer: bool = True,
    worker: bool = False,
    process: str = "",
) -> None:
    """Check store and broker. Raises Refused, with the reason, for one that cannot be used; Away if it does not answer.

    One that does not answer is only refused if it must answer. `queues`: as of `check_queues`. `worker`: a worker will
    use them, and so Celery. `process`: the role whose rights this process needs (`producers.admin.roles`).
    """
    for url, role in {store: "store", broker: "broker"}.items():
        if role == "store" or is_redis(url):
            control, results = worker and url == control_url(broker, store), worker and url == store
            trials = ROLES[process].trials() if process else ()
            check_server(url, role, must_answer=must_answer, control=control, results=results, trials=trials)
        else:
            check_queues(broker, store, queues, must_answer=must_answer)


def check_server(url: str, role: str, **more: Any) -> None:
    """Check a Redis or Valkey server, as `producers.store.servers.check_server`. Raises Refused as `check_servers`."""
    try:
        servers.check_server(url, role, **more)
    except servers.ServerRefused as refused:
        raise (Away if isinstance(refused, servers.ServerAway) else Refused)(str(refused)) from refused


def check_queues(
    broker: str,
    store: str,
    queues: Sequence[str] | None = None,
    *,
    must_answer: bool = True,
    make: bool = False,
    lease: float = 0.0,
) -> None:
    """Check a broker's queues, as `producers.broker.connect.check_broker`. Raises Refused as `check_servers`."""
    try:
        check_broker(broker, store, queues, make=make, lease=lease)
    except (ValueError, AwsNotInstalled, *LOST) as error:
        away = isinstance(error, LOST) and trouble(error) is Trouble.AWAY
        if away and not must_answer:
            log.warning("the broker at %s does not answer yet: %s", shown(broker), error)
            return
        message = str(error).replace(broker, shown(broker))
        raise (Away if away else Refused)(f"cannot use the broker at {shown(broker)}: {message}") from error
