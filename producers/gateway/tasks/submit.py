"""Submits a task for a caller who comes back for it, once for each Idempotency-Key.

Task -> encoded: its text as token ids, checked -> submitted: key, admission, ADMIT -> its id, or an earlier request's
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import Request

from producers.client.submission import TASK
from producers.contract import model_fit
from producers.contract.record import Record
from producers.contract.task import Task
from producers.errors import TaskExists, TaskNotFound
from producers.gateway.context import Gateway
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import charge_of, marks
from producers.gateway.http.errors import gone
from producers.gateway.http.request_state import work_of
from producers.gateway.tasks.views import TaskView, WebhookView


async def encoded(request: Request, gateway: Gateway, task: Task) -> Task:
    """The task with token ids in place of text or messages; its webhook may be called.

    Raises InvalidTask, UnknownModel or Problem.
    """
    gateway.client.directory.check(task)
    resolved = await idempotency.resolve(request, gateway.client, task, 1, tenant=task.tenant)
    card = resolved.card
    model_fit.check(task, card, counted=task.prompt_tokens is not None)
    if task.webhook is not None:
        await gateway.destinations.check(task.webhook.url, "webhook.url")
    if task.prompt_tokens is not None or task.kind != "generate":  # a worker counts the tokens of such texts
        return task
    work = work_of(request, task.tenant)
    prompts = await idempotency.made_prompts(request, gateway.client, resolved, 1, tenant=task.tenant)
    if prompts is not None:
        ids = prompts[0]
    elif task.messages is not None:
        text = await gateway.templates.render(card, task.messages, work)
        ids = await gateway.prompts.encode(card, text, work, special=False)
    else:
        ids = await gateway.prompts.encode(card, str(task.prompt), work)
    task = task.model_copy(update={"prompt": ids, "messages": None})
    model_fit.check(task, card)
    return task


async def submitted(
    request: Request, gateway: Gateway, task: Task, more: Mapping[str, str | int] = TASK
) -> tuple[str, Record | None]:
    """Submit an encoded task. Returns its id; with its record, if an earlier request of this key submitted it.

    `more`: as of `AsyncClient.admit`. Raises Problem, and as `AsyncClient.submit`.
    """
    await gateway.forms.check(task, work_of(request, task.tenant))
    (task,) = await gateway.accounts.sized(request, [task])
    entry = await idempotency.first(request, gateway.client, str(uuid.uuid4()), tenant=task.tenant)
    if entry is not None and entry.state == "made":
        return entry.id, await _repeated(gateway, task, entry.id)
    entered = await gateway.admission.enter(request, [task])
    task, more, charge = entered.tasks[0], {**more, **marks(request), **entered.more}, charge_of(request)
    if entry is None:
        task_id = await gateway.admission.admit(request, task, None, more, charge)
    else:
        try:
            more = {**more, "idempotency": entry.name}
            task_id = await gateway.admission.admit(request, task, entry.id, more, charge)
        except TaskExists:  # an equal request came at the same time
            return entry.id, await _repeated(gateway, task, entry.id)
    resolved = await idempotency.resolve(request, gateway.client, task, 1, tenant=task.tenant)
    gateway.metrics.submitted(resolved.card["name"], task.tier)
    return task_id, None


def submitted_view(
    task_id: str, task: Task, more: Mapping[str, str | int], shortened_to: int | None = None
) -> TaskView:
    """Returns the view of a task that was just submitted. `shortened_to`: output tokens to which overload cut it."""
    fields: dict[str, Any] = {
        "tenant": task.tenant,
        "order_key": task.order_key,
        "retried_from": more.get("retried_from"),
        "shortened_to": shortened_to,
    }
    if task.webhook is not None:
        fields["webhook"] = WebhookView(url=task.webhook.url, events=list(task.webhook.events))
    return TaskView(
        id=task_id,
        object="task",
        status="queued",
        model=task.model,
        tier=task.tier,
        n=task.n,
        # By this machine's clock: asking the store for its time could fail after the task is queued.
        created_at=round(time.time(), 3),
        metadata=task.metadata,
        **{name: value for name, value in fields.items() if value is not None},
    )


async def _repeated(gateway: Gateway, task: Task, task_id: str) -> Record:
    """The record of the task that an Idempotency-Key made, with all of its chunks. Raises as `original`, and
    SubmitFailed."""
    await gateway.client.submit_rest(task, task_id)
    return await original(gateway, task_id)


async def original(gateway: Gateway, task_id: str) -> Record:
    """The record of the task that an Idempotency-Key made. Raises Problem if it is gone, and as
    `AsyncHandle.status`."""
    try:
        return await gateway.client.get(task_id).status()
    except TaskNotFound:
        message = f"task {task_id}, which was deleted or is past its time to live; use another key to submit it again."
        raise gone(message, code="task_not_found") from None
