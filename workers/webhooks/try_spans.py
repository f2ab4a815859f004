"""The spans of tries to deliver webhooks, in the traces of the tasks that they tell of."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Final

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import aexecute, text
from producers.contract import keys
from producers.contract.webhook import Destination
from producers.store.outbox import Attempt, Row
from producers.tracing.export import Tracer
from producers.tracing.spans import TRACE_FIELDS, Span, TaskTrace, Value

log = logging.getLogger(__name__)
#: Longest time (s) for which the task's trace is looked up; a try that took longer has no span.
LOOK_UP_S: Final = 1.0
#: Stands before the task's id in events of a background response.
RESPONSE: Final = "resp_"


class TrySpans:
    """`client`: of the store, where tasks' traces are."""

    def __init__(self, client: AsyncClient, tracer: Tracer) -> None:
        self._client, self._tracer = client, tracer

    async def send(self, row: Row, url: str, begin: float, attempt: Attempt) -> None:
        """Send the span of a try that began then (unix s), if its task's trace is sent. Raises nothing."""
        task_id, fields = row.object, {}
        try:
            async with asyncio.timeout(LOOK_UP_S):
                fields = await self._trace_fields(task_id)
                if not fields and task_id.startswith(RESPONSE):
                    task_id = task_id.removeprefix(RESPONSE)
                    fields = await self._trace_fields(task_id)
            host = Destination.parse(url).host
        except (*FAILURES, ValueError) as error:
            warn_throttled(log, "a delivery is not in its task's trace: %s", error)
            return
        trace = TaskTrace.of(task_id, fields)
        if not fields or not self._tracer.sampled(trace.trace_id, trace.parent):
            return
        attributes: dict[str, Value] = {
            "http.request.method": "POST",
            "server.address": host,  # not the URL: its path may be a secret
            "penstock.task.id": task_id,
            "penstock.webhook.id": row.webhook_id,
            "penstock.webhook.type": row.type,
            "http.request.resend_count": row.tries,
        }
        fault = None
        if attempt.status is None:
            fault = "no_answer"
        elif not 200 <= attempt.status < 300:
            fault = str(attempt.status)
        if attempt.status is not None:
            attributes["http.response.status_code"] = attempt.status
        if fault is not None:
            attributes["error.type"] = fault
        start = 1000 * begin
        self._tracer.put(
            Span(
                "webhook",
                trace.trace_id,
                secrets.token_hex(8),
                trace.span_id,
                start,
                start + attempt.latency_ms,
                "client",
                attributes,
                error=fault,
            )
        )

    async def _trace_fields(self, task_id: str) -> dict[str, str]:
        """TRACE_FIELDS, as far as the task's record has them. Raises one of FAILURES, or ValueError."""
        values = await aexecute(self._client.store, "HMGET", keys.task(task_id), *TRACE_FIELDS)
        return {name: text(value) for name, value in zip(TRACE_FIELDS, values, strict=True) if value is not None}
