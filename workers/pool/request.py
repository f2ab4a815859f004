"""Celery's request, taught that revoking a task must reach its record and the engine."""

from __future__ import annotations

import threading
from typing import Any

from celery.worker.request import Request

#: Of all requests: what it holds up takes microseconds.
_acknowledging = threading.RLock()


class EngineRequest(Request):
    """`EngineTask.Request`: everything else is stock."""

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        super()._announce_revoked(reason, terminated, signum, expired)
        self._app.penstock.celery.revoke(self, expired)

    def acknowledge(self) -> None:
        """Once, whichever threads come for it: a lease may end while the finisher puts the task down, and Celery's
        worker ends at a message that is acknowledged twice."""
        with _acknowledging:
            super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        """Reject once, as `acknowledge`."""
        with _acknowledging:
            super().reject(requeue)
