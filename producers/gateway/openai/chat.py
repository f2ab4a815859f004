"""`POST /v1/chat/completions`: messages in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from engine.text import Tokenizer
from producers.errors import InvalidTask
from producers.events import End
from producers.gateway.body import read_object
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.errors import Problem
from producers.gateway.foreground import Foreground, answered
from producers.gateway.openai.answer import DONE, REASONS, Chunks, ChunkStream, head, usage_of, whole_answer
from producers.gateway.openai.logprobs import chat_logprobs
from producers.gateway.openai.messages import read_messages
from producers.gateway.openai.outputs import Output, news, whole
from producers.gateway.openai.parameters import Asked, count, flag, read, refusal, request_body
from producers.gateway.views import ErrorView
from producers.task import Task

router = APIRouter(prefix="/v1/chat", tags=["openai"])

MAX_TOP_LOGPROBS: Final = 20
#: The endpoint's own parameters, with their JSON schemas.
OWN: Final[dict[str, dict[str, Any]]] = {
    "messages": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["role"]}},
    "logprobs": {"type": "boolean"},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "add_generation_prompt": {"type": "boolean"},
    "continue_final_message": {"type": "boolean"},
    "chat_template_kwargs": {"type": "object"},
}
RENAMED: Final = {"max_completion_tokens": "max_tokens", "max_tokens": "max_tokens"}
#: Variables of a template that the request has other ways to set.
TAKEN: Final = ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents")


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat request. `template`: what its template is told beside the messages."""

    asked: Asked
    messages: list[dict[str, Any]]
    template: dict[str, Any]
    logprobs: int | None

    @property
    def n(self) -> int:
        return int(self.asked.fields.get("n", 1))


@router.post(
    "/completions",
    response_class=JSONResponse,
    response_model=None,
    responses={status: {"model": ErrorView} for status in (400, 404, 413, 415, 429, 503)},
    openapi_extra=request_body(OWN, RENAMED, required="messages"),
)
async def create(request: Request) -> Response:
    """OpenAI's chat completions; docs/http.md says which parameters are taken."""
    gateway = gateway_of(request)
    chat = _read(await read_object(request, gateway.settings.max_body))
    task = chat.asked.task([0], logprobs=chat.logprobs)
    known = await gateway.client.known(task.model)
    task = task.model_copy(update={"prompt": await _prompt(gateway, known.card, chat, task)})
    tokenizer = await gateway.prompts.tokenizer(known.card)
    foreground = Foreground(gateway, [task])
    with chat.asked.in_its_words():
        await foreground.submit()
    kind = "chat.completion.chunk" if chat.asked.stream else "chat.completion"
    first = head(kind, "chatcmpl", foreground.ids[0], known) | {"service_tier": chat.asked.service_tier}
    if chat.asked.stream:
        chunks = Chunks(first, chat.asked.include_usage)
        return ChunkStream(_stream(foreground, chunks, chat, tokenizer), foreground, gateway)
    try:
        done = await answered(request, gateway, lambda: whole(foreground.events(), 1, chat.n))
    finally:
        await foreground.close()

    def answer() -> dict[str, Any]:
        choices = [_choice(index, output, chat, tokenizer) for index, output in done.outputs.items()]
        return first | {"choices": choices, "usage": usage_of(done.ends.values())}

    return await whole_answer(done.tokens, answer)


def _read(body: Mapping[str, Any]) -> _Chat:
    asked = read(body, own=OWN, renamed=RENAMED, required="messages")
    own = asked.own
    wanted, top = flag(own, "logprobs"), count(own, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise Problem(400, "top_logprobs is given without logprobs: true", code="invalid_value", param="top_logprobs")
    going_on = flag(own, "continue_final_message")
    prompting = flag(own, "add_generation_prompt", not going_on)
    if going_on and prompting:
        raise Problem(
            400,
            "continue_final_message and add_generation_prompt are both true: either the last message goes on, or a new "
            "one begins",
            code="invalid_value",
            param="add_generation_prompt",
        )
    variables = own.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise refusal("chat_template_kwargs", variables, "an object", code="invalid_type")
    for name in TAKEN:
        if name in variables:
            raise Problem(
                400, f"chat_template_kwargs may not have {name}", code="invalid_value", param="chat_template_kwargs"
            )
    template = variables | {"add_generation_prompt": prompting, "continue_final_message": going_on}
    return _Chat(asked, read_messages(own["messages"]), template, (top or 0) if wanted else None)


async def _prompt(gateway: Gateway, card: Mapping[str, Any], chat: _Chat, task: Task) -> tuple[int, ...]:
    """Token ids of the messages, once all else has been checked."""
    with chat.asked.in_its_words():
        task.check(card)
        if "chat" not in card["capabilities"]:
            raise InvalidTask(
                f"model {task.model!r} has no chat template; send its prompts to /v1/completions",
                param="model",
                code="unsupported_model",
            )
        text = await gateway.templates.render(card, chat.messages, **chat.template)
        return await gateway.prompts.encode(card, text, special=False)


def _choice(index: int, output: Output, chat: _Chat, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": output.text, "refusal": None, "annotations": []},
        "logprobs": None if chat.logprobs is None else chat_logprobs(output.tokens, tokenizer),
        "finish_reason": output.reason,
    }


async def _stream(foreground: Foreground, chunks: Chunks, chat: _Chat, tokenizer: Tokenizer) -> AsyncGenerator[bytes]:
    """Of each choice: a chunk with the role, chunks with content, one with the reason that it ended."""
    spoken: set[int] = set()
    ended: set[int] = set()
    ends: dict[int, End] = {}
    async with aclosing(news(foreground.events(), chat.n)) as batches:
        async for batch in batches:
            ends |= batch.ends
            made = []
            for index, output in batch.outputs.items():
                if index not in spoken:
                    spoken.add(index)
                    made.append(_delta(index, {"role": "assistant", "content": "", "refusal": None}))
                logprobs = None if chat.logprobs is None else chat_logprobs(output.tokens, tokenizer)
                if (text := output.text) or (logprobs and logprobs["content"]):
                    made.append(_delta(index, {"content": text}, logprobs))
                if output.reason in REASONS and index not in ended:
                    ended.add(index)
                    made.append(_delta(index, {}, reason=output.reason))
            if made:
                yield chunks.of(*made)
    if chat.asked.include_usage:
        yield chunks.usage(ends.values())
    yield DONE


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
