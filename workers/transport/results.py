"""Celery's Redis result backend, on our connections: with their time limits, and by Sentinels where those are asked."""

from __future__ import annotations

from typing import Any, Final

from celery.backends.redis import RedisBackend

from producers.connection.connect import connection_pool

#: The name under which Celery finds it, once `workers.pool.app` has told.
NAME: Final = "penstock"
#: The configuration key that holds the store's URL.
STORE: Final = "penstock_store"


class Backend(RedisBackend):
    """Stock, but for its pool."""

    def _get_pool(self, **params: Any) -> Any:
        return connection_pool(self.app.conf[STORE])
