"""A reply's body: a task with its outputs, as GET /v1/tasks/{id} has it, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from producers.client.aio import AsyncClient
from producers.contract.stream import view
from producers.errors import TaskNotFound
from producers.store.outbox import Row

JSON: Final = "application/json"
EVENT: Final = "application/cloudevents+json"
#: Time (s) in which the outputs of a task that has ended are read.
READ_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A record's or a row's `reply`."""

    source: str
    url: str
    """The target."""
    correlation: str
    """The id that the sender knows."""
    format: str
    error: Mapping[str, Any] | None = None
    """Why the message was refused, and no task made."""

    @classmethod
    def parse(cls, text: str) -> Reply:
        """Raises ValueError, TypeError or KeyError."""
        said = json.loads(text)
        return cls(said["source"], said["url"], said["correlation"], said["format"], said.get("error"))

    def to_json(self) -> str:
        said = {"source": self.source, "url": self.url, "correlation": self.correlation, "format": self.format}
        return json.dumps(said if self.error is None else said | {"error": dict(self.error)})


async def task_of(client: AsyncClient, row: Row, reply: Reply) -> dict[str, Any]:
    """The task that a row tells of, as JSON's object. Raises redis.exceptions.RedisError or OSError."""
    if reply.error is not None:
        return _without_outputs(None, "failed", dict(reply.error))
    handle = client.get(row.object)
    try:
        found = view(await handle.result(READ_S, raise_for_status=False))
        return found | {"metadata": (await handle.status()).metadata}
    except TaskNotFound:
        status = row.type.partition(".")[2]
        why = "The task has ended; its outputs are gone, since its time to live was over before this was sent."
        return _without_outputs(row.object, status, {"code": "task_not_found", "message": why, "param": None})


def shortened(task: Mapping[str, Any]) -> dict[str, Any]:
    """The task without its outputs, for a target that takes no message of this size."""
    why = "The outputs are too large for this target; GET /v1/tasks/{id} has them."
    return {**task, "choices": None, "prompt_logprobs": None} | {"omitted": why}


def body_of(row: Row, reply: Reply, task: Mapping[str, Any]) -> tuple[str, str]:
    """The message, the same at each try, and its media type."""
    said = {**task, "correlation_id": reply.correlation}
    if reply.format == "json":
        return json.dumps(said), JSON
    event = {
        "specversion": "1.0",
        "id": row.webhook_id,
        "source": f"/penstock/{reply.source}",
        "type": f"penstock.{row.type}",
        "subject": reply.correlation,
        "time": datetime.fromtimestamp(row.at, UTC).isoformat(),
        "datacontenttype": JSON,
        "data": said,
    }
    return json.dumps(event), EVENT


def _without_outputs(task_id: str | None, status: str, error: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": task_id, "object": "task", "status": status, "error": error, "choices": None}
