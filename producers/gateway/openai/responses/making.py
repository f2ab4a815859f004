"""Makes a response: its conversation, its task, and the answer to the caller who asked for it."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from producers.contract.record import Record
from producers.contract.task import Task
from producers.gateway.admission.limits import check_may_use
from producers.gateway.admission.resolved import resolve
from producers.gateway.context import Gateway
from producers.gateway.http import idempotency
from producers.gateway.http.caller import principal_of
from producers.gateway.http.work import work_of
from producers.gateway.openai.answer import respond
from producers.gateway.openai.logprobs import ChatLogprobs
from producers.gateway.openai.responses import conversation
from producers.gateway.openai.responses.answer import answer, opened, scorer_of, waited
from producers.gateway.openai.responses.request import Wanted, bounded
from producers.gateway.openai.responses.story import Story
from producers.gateway.openai.responses.stream import ResponseStream
from producers.gateway.openai.responses.view import About, Output
from producers.gateway.tasks.foreground import Foreground
from producers.gateway.tasks.submit import original, submitted


async def make(request: Request, gateway: Gateway, wanted: Wanted) -> Response:
    """Submit a response's task and answer, or answer with what an earlier request of this Idempotency-Key made.

    Raises InvalidTask, UnknownModel, SubmitFailed, Problem, redis.exceptions.RedisError or OSError.
    """
    task = wanted.task()
    request.state.tier = task.tier
    check_may_use(principal_of(request), task)
    if task.webhook is not None:
        await gateway.destinations.check(task.webhook.url, "webhook.url")
    known = await resolve(request, gateway.client, task.model)
    made = await idempotency.made_prompts(request, gateway.client, 1, tenant=task.tenant)
    items = wanted.items
    if made is not None:  # its record has its conversation
        task = task.model_copy(update={"prompt": made[0]})
    else:
        earlier = [] if wanted.previous is None else await conversation.before(request, wanted.previous)
        work = work_of(request)
        task, items = await conversation.fitted(gateway, known.card, wanted, task, [*earlier, *items], work)
    with wanted.asked.in_its_words():
        (task,) = await gateway.accounts.sized(request, [task])
        task = bounded(task, known.card).resolved(known.card)
    more = wanted.more(task, items, known.now_ms())
    scorer = None if task.logprobs is None else ChatLogprobs(await gateway.prompts.tokenizer(known.card))
    kind = _background if wanted.background else _foreground
    return await kind(request, gateway, wanted, task, more, Output(scorer))


async def _background(
    request: Request, gateway: Gateway, wanted: Wanted, task: Task, more: dict[str, Any], output: Output
) -> Response:
    """Submit the task, which nobody's leaving cancels."""
    with wanted.asked.in_its_words():
        task_id, earlier = await submitted(request, gateway, task, more)
    if earlier is not None:
        return await _again(gateway, wanted, earlier)
    about = About.of(task_id, more["response"])
    if wanted.asked.stream:
        return ResponseStream(Story(about, output), gateway.client.get(task_id), gateway)
    return opened(about, "queued")


async def _foreground(
    request: Request, gateway: Gateway, wanted: Wanted, task: Task, more: dict[str, Any], output: Output
) -> Response:
    """Submit the task, whose caller waits; with a key, the one of an earlier request, if there was one."""
    with wanted.asked.in_its_words():
        await gateway.forms.check(task, work_of(request))
    entry = await idempotency.first(request, gateway.client, str(uuid.uuid4()), tenant=task.tenant)
    if entry is not None:
        more["idempotency"] = entry.name
        if entry.state == "made":
            await original(gateway, entry.id)  # one that was deleted is not made again
    ids = None if entry is None else [entry.id]
    foreground = Foreground(request, gateway, [task], more, ids, entry)

    async def answer() -> Response:
        name = foreground.ids[0]
        kept = (await original(gateway, name)).fields["response"] if foreground.replayed else more["response"]
        about = About.of(name, kept)
        if wanted.asked.stream:
            return ResponseStream(Story(about, output), gateway.client.get(name), gateway, foreground)
        return await waited(request, gateway, about, foreground)

    return await respond(wanted.asked, foreground, answer)


async def _again(gateway: Gateway, wanted: Wanted, record: Record) -> Response:
    """Answer with a background response that an earlier request of this key made."""
    handle, about = gateway.client.get(record.id), About.of(record.id, record.fields["response"])
    response: Response
    if wanted.asked.stream:
        response = ResponseStream(Story(about, Output(await scorer_of(gateway, record))), handle, gateway)
    else:
        response = await answer(gateway, handle, record, about)
    response.headers.update(idempotency.REPLAYED)
    return response
