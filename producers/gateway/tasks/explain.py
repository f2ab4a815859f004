"""`/v1/tasks/{id}/explain`: where a task is, what keeps it, and when it will start and end."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from producers.admin.explain import Explanation, explain
from producers.gateway.context import gateway_of
from producers.gateway.http.authorization import READS
from producers.gateway.tasks.ownership import task_of
from producers.gateway.tasks.views import EtaView, Status, errors

router = APIRouter(prefix="/v1/tasks", tags=["tasks"])


class ReasonView(BaseModel):
    """A reason that keeps a task: `name` for programs, `message` for people."""

    name: str
    message: str


class PreemptionView(BaseModel):
    """The engine took the task's room. `at`: unix s; `why`: better_tier, kv_room, memory or recompute."""

    at: float
    why: str


class AttemptView(BaseModel):
    """A start of the task; null where nobody knows. Times: unix seconds."""

    worker: str | None
    why: str = Field(
        description="what ended it: died, drained, preempted, lease_lost, breaker, failed, ended; or running"
    )
    at: float | None = Field(description="when that end was known")
    duration_s: float | None
    entries: int | None = Field(description="entries of the task's stream then, where it went on elsewhere")
    first_step_at: float | None
    cached_tokens: int | None = Field(description="prompt tokens that the prefix cache had")
    preemptions: int = Field(description="how often the engine took its room")
    preempted: list[PreemptionView] = Field(description="the first of them")


class EstimateView(BaseModel):
    """Seconds from now that a half of such tasks take, from what workers measured. Null: nobody can tell."""

    starts_in_s: float | None
    ends_in_s: float | None


class ExplanationView(BaseModel):
    """A task's place, what keeps it, and its times, in seconds."""

    id: str
    object: Literal["task.explanation"] = "task.explanation"
    status: Status
    summary: str = Field(description="one sentence")
    ahead: int | None = Field(description="tasks that go before it; null if it does not wait, or nobody can tell")
    ahead_is_exact: bool = Field(description="false where it is reckoned: several tenants or tiers wait")
    waiting: int = Field(description="all tasks that wait for its model's version")
    blocked_by: list[ReasonView] = Field(description="what keeps it now, the deciding reason first")
    estimate: EstimateView
    eta: EtaView | None = Field(description="its end; null: it has ended, or nobody can tell")
    worker: str | None = Field(description="the worker that runs it")
    starts: int = Field(description="how often it was started")
    attempts: list[AttemptView] = Field(description="its starts, as far as they are kept")
    phases: dict[str, float] = Field(description="how long each phase took so far")
    output_at_end: str | None = Field(
        description="why nothing of its output can be read before its end; null if it has ended, or its tokens can be "
        "read as they are made"
    )

    @classmethod
    def of(cls, explanation: Explanation) -> Self:
        return cls(**asdict(explanation))


@router.get("/{task_id}/explain", dependencies=READS, response_model=ExplanationView, responses=errors(404))
async def explained(request: Request, task_id: str) -> ExplanationView:
    """Explain where a task is: how many go before it, what keeps it, and when it will start and end."""
    client = gateway_of(request).client
    record = await (await task_of(request, task_id)).status()
    return ExplanationView.of(await explain(client.store, client.broker, record))
