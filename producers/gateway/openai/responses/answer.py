"""Answers with a response as it stands: open, or with its output once it has ended."""

from __future__ import annotations

import json
from contextlib import aclosing
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from producers.client.aio import AsyncHandle
from producers.contract.record import Record
from producers.errors import UnknownModel
from producers.gateway.context import Gateway
from producers.gateway.openai.logprobs import ChatLogprobs
from producers.gateway.openai.responses.view import About, Output
from producers.gateway.tasks import outcome
from producers.gateway.tasks.foreground import Foreground, answered


async def answer(gateway: Gateway, handle: AsyncHandle, record: Record, about: About) -> Response:
    """The response as its record stands. Raises as `outcome.collected`."""
    if not record.final:
        return opened(about, record.status)
    output = Output(await scorer_of(gateway, record))
    return await outcome.collected(gateway, handle, output, partial(output.pieces, about, record))


def opened(about: About, status: str) -> Response:
    """The response before its end."""
    return Response(json.dumps(about.open(status)), media_type="application/json")


async def waited(request: Request, gateway: Gateway, about: About, foreground: Foreground) -> Response:
    """The response of a foreground task, once it has ended. Raises what `answered` and `outcome.collected` do, and
    Problem for one that failed."""

    async def ended() -> None:
        async with aclosing(foreground.events()) as batches:
            async for _ in batches:
                pass

    try:
        await answered(request, gateway, ended)
    finally:
        await foreground.close()
    handle = gateway.client.get(about.task_id)
    return await answer(gateway, handle, await handle.status(), about)


async def scorer_of(gateway: Gateway, record: Record) -> ChatLogprobs | None:
    """The speller of a response's log probabilities; None without any, or if its model's version is served no more.

    Raises as `Prompts.tokenizer`.
    """
    if record.task.get("logprobs") is None:
        return None
    try:
        card = await gateway.client.card(record.model)
    except UnknownModel:
        return None
    same = card["version"] == record.fields.get("version")
    return ChatLogprobs(await gateway.prompts.tokenizer(card)) if same else None
