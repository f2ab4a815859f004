"""Celery's request, taught that revoking a task must reach its record and the engine."""

from __future__ import annotations

from typing import Any

from celery.worker.request import Request


class EngineRequest(Request):
    """`EngineTask.Request`: everything else is stock."""

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        super()._announce_revoked(reason, terminated, signum, expired)
        self._app.penstock.revoke(self, expired)
