"""The interface of an endpoint to batches: it makes a task of a request's body, and an answer of the task's result.

The gateway's endpoints implement it (`producers.gateway.batch_endpoints`), as they answer a caller who waits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from producers.client.directory import ResolvedModel
from producers.contract.record import Record
from producers.contract.stream import Event
from producers.contract.task import Task
from producers.store.access.api_keys import LOCAL, Principal
from producers.store.usage.limits import Charge
from producers.store.usage.prices import Prices


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer. `body`: JSON in ASCII, without line breaks. `worked`: it refuses a request for which work was
    done, so it counts (`Endpoints.charge_refused`). `warning`: what of the request was not followed."""

    status: int
    body: bytes
    worked: bool = False
    warning: str = ""

    def to_json(self) -> str:
        return f'{{"status": {self.status}, "body": {self.body.decode("ascii")}}}'

    @classmethod
    def of_json(cls, kept: str) -> Self:
        fields = json.loads(kept)
        return cls(fields["status"], json.dumps(fields["body"]).encode())


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """A task, resolved for its model. `more`: fields of its record beside the task's own. `charge`: the accounts that
    it is charged to."""

    task: Task
    resolved_model: ResolvedModel
    more: Mapping[str, str | int] = field(default_factory=dict)
    charge: Charge | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A request whose task is final: its body, record, and all events of its stream."""

    body: Mapping[str, Any]
    record: Record
    events: Sequence[Event]


class Endpoints(Protocol):
    """Knows the endpoints that a batch may be for, by their paths.

    Its methods may raise redis.exceptions.RedisError or OSError; then nothing is lost, and they are called again.
    """

    spent: Answer
    """The answer to a request for which a budget has not enough left."""

    async def tasks(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        principal: Principal = LOCAL,
        tenant: str | None = None,
        prices: Prices | None = None,
        sticky: str | None = None,
    ) -> list[PlannedTask | Answer]:
        """The task for each request, or its refusal; for the first requests alone if they take long, for one at least.

        Nothing while the key or tenant has none of a minute's requests left. The tier is `batch`, unless a request
        names another.

        `principal`: whose key made the batch. `tenant`: that of the tasks. `prices`: what they cost.
        `sticky`: tasks with equal ones go to one version where a model's are split.
        """

    async def charge_refused(self, requests: int, principal: Principal, tenant: str | None) -> None:
        """Count requests that were refused after work in a minute's, as those of callers who wait."""

    async def answers(self, path: str, finished: Sequence[Finished]) -> list[Answer]:
        """The answer to each request. Its status is 200 if the request got what it asked for."""
