"""Celery's request, taught that revoking a task must reach its record and the engine."""

from __future__ import annotations

import threading
from typing import Any

from celery.worker.request import Request

from workers.pool.batch import batch_of

#: One lock for all requests: it is held for microseconds.
_acknowledging = threading.RLock()


class EngineRequest(Request):
    """`EngineTask.Request`: everything else is stock."""

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
