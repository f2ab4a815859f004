"""Finds the conversation that a request goes on with, and makes it a prompt that fits the model.

previous_response_id -> its record: items, and its output as one more -> + the request's items -> rendered, encoded
                                                                      -> too long, with truncation: the oldest go

With truncation, a conversation that no request may send is cut by its size alone, before it is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from starlette.requests import Request

from producers.client.aio import AsyncHandle
from producers.contract import model_fit
from producers.contract.chat import MAX_MESSAGES
from producers.contract.fields import MAX_PROMPT_BYTES
from producers.contract.record import Record
from producers.contract.task import Task
from producers.errors import InvalidTask, TaskNotFound, shown
from producers.gateway.context import Gateway
from producers.gateway.http.authorization import principal_of, tenant_of
from producers.gateway.http.errors import TOO_LONG, Problem
from producers.gateway.http.request_state import Work
from producers.gateway.openai.parameters import check_chats
from producers.gateway.openai.responses.request import REFERENCE, Item, ResponseRequest
from producers.gateway.openai.responses.view import PREFIX, Output, ResponseMetadata
from producers.gateway.tasks.ownership import task_of

#: Share of the context that truncation leaves for an output without max_output_tokens: one in so many.
ROOM: Final = 4
#: Most responses that a request's input may refer to. Each is read from the store.
MAX_REFERENCED: Final = 256
#: Roles of messages that stay at the beginning of a conversation.
STAY: Final = ("system", "developer")
#: Bytes of JSON around messages, with the template's variables.
_AROUND: Final = 100


async def find(request: Request, response_id: str) -> tuple[AsyncHandle, Record, ResponseMetadata] | None:
    """A stored response of the caller's; None if there is none (any more). Raises redis.exceptions.RedisError or
    OSError; Problem, where the caller names a tenant that it may not."""
    if not response_id.startswith(PREFIX):
        return None
    tenant = tenant_of(request)
    try:
        handle = await task_of(request, response_id.removeprefix(PREFIX))
        record = await handle.status()
    except TaskNotFound:
        return None
    if "response" not in record.fields or (principal_of(request).key is None and record.fields.get("tenant") != tenant):
        return None
    metadata = await ResponseMetadata.read(record.id, record.fields)
    return (handle, record, metadata) if metadata.fields["store"] else None


async def before(request: Request, response_id: str) -> list[Item]:
    """The conversation up to and with a response's output. Raises Problem, and as `find`."""
    stored = await find(request, response_id)
    if stored is None:
        raise Problem(
            400,
            f"previous_response_id is {shown(response_id)}: there is no such response (any more). Responses are kept "
            "for 24 hours, or for their ttl, unless they are deleted; send the conversation as input",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    _, record, metadata = stored
    if not record.final:
        raise Problem(
            400,
            f"previous_response_id is {shown(response_id)}, which is {record.status}; wait until it has ended",
            code="previous_response_not_ready",
            param="previous_response_id",
        )
    return [*metadata.items, *await _output_of(*stored)]


async def with_referenced(request: Request, items: Sequence[Item]) -> list[Item]:
    """A request's items, with those of earlier responses' outputs in place of references to them. Raises Problem,
    InvalidTask, and as `find`."""
    outputs: dict[str, dict[str, Item]] = {}
    size, resolved = 0, []
    for at, item in enumerate(items):
        if item.role == REFERENCE:
            response_id = f"{PREFIX}{_response_of(item.id)}"
            if response_id not in outputs:
                stored = await find(request, response_id)
                output = [] if stored is None or not stored[1].final else await _output_of(*stored)
                outputs[response_id] = {item.id: item for item in output}
                size += sum(len(item.text) for item in output)
            if size > MAX_PROMPT_BYTES or len(outputs) > MAX_REFERENCED:
                raise InvalidTask(
                    f"input refers to more than {MAX_REFERENCED} responses, or to more than {MAX_PROMPT_BYTES} "
                    "characters of their text; go on with previous_response_id",
                    param="input",
                )
            item = _referenced(outputs[response_id], item, f"input[{at}].id")
        resolved.append(item)
    return resolved


def _response_of(item_id: str) -> str:
    """The task of the response that an item is of, by its id; any text if that is of none."""
    _, _, name = item_id.partition("_")
    return name.partition("_")[0]


def _referenced(output: Mapping[str, Item], reference: Item, parameter: str) -> Item:
    item = output.get(reference.id)
    if item is None:
        raise Problem(
            400,
            f"{parameter} is {shown(reference.id)}: no stored response that has ended has such an item in its output "
            "(any more); send the item itself, or previous_response_id",
            code="item_not_found",
            param=parameter,
        )
    return item


async def _output_of(handle: AsyncHandle, record: Record, metadata: ResponseMetadata) -> list[Item]:
    """The items of an ended response's output. Raises TaskNotFound, redis.exceptions.RedisError or OSError."""
    output = Output(metadata, None)
    async with aclosing(handle.batches()) as batches:
        async for events in batches:
            output.take(events)
    return output.as_input()


async def fitted(
    gateway: Gateway,
    card: Mapping[str, Any],
    response_request: ResponseRequest,
    task: Task,
    items: Sequence[Item],
    work: Work,
    variables: Mapping[str, Any],
) -> tuple[Task, list[Item]]:
    """The task with its prompt, and the items that are in it. `variables`: the chat template's, beside the messages.
    Raises InvalidTask, and what rendering does.

    Without truncation those are all. With it the oldest go, as few as must: the system's and developer's messages at
    the beginning stay, and what follows them begins with a user's message.
    """
    with response_request.text_request.naming():
        model_fit.check(task, card, counted=False)
        check_chats(card)
        stay, starts = _starts(items, response_request.truncate)
        if response_request.previous is not None:
            work.size = None  # the body is not all of it

        def from_start(at: int) -> list[Item]:
            return [*items[:stay], *items[starts[at] :]]

        async def filled(at: int) -> Task:
            messages = response_request.messages(from_start(at))
            full = task.model_copy(update={"prompt": await _prompt(gateway, card, messages, work, variables)})
            model_fit.check(full, card)
            if full.max_tokens is None and at < len(starts) - 1:
                model_fit.check(full.model_copy(update={"max_tokens": int(card["context_length"]) // ROOM}), card)
            return full

        first = 0 if len(starts) == 1 else _first_of_size(response_request, items, stay, starts)
        full, at = await _first_that_fits(filled, first, len(starts))
        return full, from_start(at)


def _first_of_size(response_request: ResponseRequest, items: Sequence[Item], stay: int, starts: Sequence[int]) -> int:
    """The first of the places where the others may begin that leaves no more than a request may have; else the last."""
    fixed = [*response_request.messages([]), *(item.message for item in items[:stay])]  # instructions, and what stays
    behind = [_size(item.message) for item in items]
    size, count = sum(map(_size, fixed)), len(fixed)
    first, at = len(starts) - 1, len(items)
    for start in range(len(starts) - 1, -1, -1):
        size, count = size + sum(behind[starts[start] : at]), count + at - starts[start]
        at = starts[start]
        if size + _AROUND > MAX_PROMPT_BYTES or count > MAX_MESSAGES:
            break
        first = start
    return first


def _size(message: Mapping[str, Any]) -> int:
    """A message's bytes within a list of JSON."""
    return len(json.dumps(message, ensure_ascii=False).encode()) + 2


async def _first_that_fits(filled: Callable[[int], Awaitable[Task]], first: int, count: int) -> tuple[Task, int]:
    """The first of `count` tasks, ever shorter, that is not too long, and its place; not before `first`. Raises what
    the last one does."""
    low, high, at = first, count - 1, first
    fits: tuple[Task, int] | None = None
    while low <= high:
        try:
            fits = await filled(at), at
            high = at - 1
        except InvalidTask as error:
            if at == count - 1 or error.code not in TOO_LONG:
                raise
            low = at + 1
        at = (low + high) // 2
    assert fits is not None  # the last one fits, or has raised
    return fits


def _starts(items: Sequence[Item], truncate: bool) -> tuple[int, list[int]]:
    """The number of messages that stay at the beginning, and places where the others may begin, in order."""
    stay = next((at for at, item in enumerate(items) if item.role not in STAY), len(items))
    turns = [at for at in range(stay + 1, len(items)) if items[at].role == "user"] if truncate else []
    return stay, [stay, *turns]


async def _prompt(
    gateway: Gateway,
    card: Mapping[str, Any],
    messages: Sequence[dict[str, Any]],
    work: Work,
    variables: Mapping[str, Any],
) -> tuple[int, ...]:
    text = await gateway.templates.render(
        card, messages, work, add_generation_prompt=True, continue_final_message=False, **variables
    )
    return await gateway.prompts.encode(card, text, work, special=False)
