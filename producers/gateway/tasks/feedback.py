"""`POST /v1/feedback`: a score of a finished task, which rollouts that judge compare by version."""

from __future__ import annotations

from typing import Any, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from producers.client.operations import not_found
from producers.client.steps import persistently
from producers.contract import keys
from producers.errors import shown
from producers.gateway.context import gateway_of
from producers.gateway.http.authorization import SUBMITS
from producers.gateway.http.errors import Problem, invalid_value
from producers.gateway.http.request_body import documented, fields_of
from producers.gateway.tasks.ownership import sees
from producers.gateway.tasks.views import errors
from producers.store import feedback

#: Beginnings of the ids of OpenAI's endpoints, which the task's id follows.
PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_")
#: The body, for OpenAPI.
BODY: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["id", "score"],
    "additionalProperties": False,
    "properties": {
        "id": {
            "type": "string",
            "minLength": 1,
            "maxLength": 200,
            "description": "of a task, a chat completion, a completion or a response",
        },
        "score": {"type": "number", "minimum": 0, "maximum": 1, "description": "1: as good as can be"},
    },
}
router = APIRouter(prefix="/v1/feedback", tags=["tasks"])


class Feedback(BaseModel):
    """A score as it was stored."""

    object: Literal["feedback"] = "feedback"
    task: str
    score: float


@router.post(
    "",
    dependencies=SUBMITS,
    response_model=Feedback,
    responses=errors(404, 409, 413, 415),
    openapi_extra=documented(BODY),
)
async def give(request: Request) -> Feedback:
    """Give a finished task a score, once; the same again changes nothing."""
    gateway = gateway_of(request)
    fields = await fields_of(request, gateway.settings.max_body, BODY)
    name, score = fields["id"], fields["score"]
    if not 0 <= score <= 1:
        raise invalid_value("score", f"score is {shown(score)}; it is a number from 0 to 1")
    task_id, answer = name, feedback.NO_TASK
    # A caller may have chosen an id that begins so.
    for task_id in (name, *(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix))):
        if await sees(request, keys.task(task_id)):
            call = persistently(feedback.give(task_id, score), gateway.client.patience)
            if (answer := await gateway.client.run(call)) != feedback.NO_TASK:
                break
    if answer == feedback.NO_TASK:
        raise not_found(task_id)
    if answer == feedback.OTHER_SCORE:
        raise Problem(409, f"the task {shown(task_id)} has another score, which stays", code="feedback_exists")
    if answer == feedback.NOT_FINISHED:
        raise Problem(409, f"the task {shown(task_id)} has not ended: give it a score then", code="task_not_final")
    return Feedback(task=task_id, score=float(f"{score:.4g}"))
