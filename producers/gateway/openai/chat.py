"""`POST /v1/chat/completions`: answers messages with the assistant's next message."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from producers.client.directory import ResolvedModel
from producers.contract import model_fit
from producers.contract.chat import MESSAGE, read_messages
from producers.contract.stream import End, Token
from producers.contract.task import Task
from producers.gateway.admission.limits import check_may_use
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import SUBMITS_TASKS, principal_of, tenant_of
from producers.gateway.http.errors import invalid_value
from producers.gateway.http.request_body import checked, read_object
from producers.gateway.http.request_state import work_of
from producers.gateway.http.sse import Direct
from producers.gateway.openai.answer import (
    DONE,
    REASONS,
    Chunks,
    ChunkStream,
    Output,
    OutputBatch,
    fingerprint,
    head,
    output_batches,
    respond,
    run_by_weight,
)
from producers.gateway.openai.complete import Choice, Whole, whole_answer
from producers.gateway.openai.logprobs import CHAT, ChatLogprobs, ScoredPrompt, joined
from producers.gateway.openai.output_parser import CALLED, OutputSyntax, ParsedChoice, deltas, message
from producers.gateway.openai.parameters import (
    NOT_OFFERED,
    RESPONSES,
    TOKEN_IDS,
    TOKEN_PARAMETERS,
    Parameters,
    TextRequest,
    Truncation,
    check_chats,
    count,
    flag,
    in_one_piece,
    read_truncation,
    refusal,
)
from producers.gateway.openai.reasoning import REASONING_PARAMETERS, ReasoningRequest, read_reasoning, reasoning_of
from producers.gateway.openai.response_format import NESTED, TEXT, formed
from producers.gateway.openai.tools import (
    TOOL_PARAMETERS,
    Tools,
    calling_of,
    read_tools,
    with_tools,
)
from producers.gateway.tasks.foreground import Foreground, keyed

router = APIRouter(prefix="/v1/chat", tags=["openai"])

MAX_TOP_LOGPROBS: Final = 20
PARAMETERS: Final = Parameters(
    endpoint_schemas={
        "messages": {"type": "array", "minItems": 1, "items": MESSAGE},
        "logprobs": {"type": "boolean"},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "add_generation_prompt": {"type": "boolean"},
        "continue_final_message": {"type": "boolean"},
        "chat_template_kwargs": {"type": "object"},
        "response_format": NESTED,
        **TOKEN_PARAMETERS,
        **TOOL_PARAMETERS,
        **REASONING_PARAMETERS,
    },
    renamed={
        "max_completion_tokens": "max_tokens",
        "max_tokens": "max_tokens",
        "prompt_logprobs": "prompt_logprobs",
    },
    required="messages",
    not_offered={
        name: nothing
        for name, nothing in NOT_OFFERED.items()
        if name not in TOOL_PARAMETERS and name not in REASONING_PARAMETERS
    }
    | {"echo": (False,), "add_special_tokens": (False,)},
)
#: Template variables that `chat_template_kwargs` may not set: other parameters do.
RESERVED_VARIABLES: Final = (
    *("messages", "add_generation_prompt", "continue_final_message", "now", "tools", "tools_as_text", "documents"),
)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request. `variables`: the template's, as the caller sets them. `template`: all besides the messages.
    `tools`: those that may be called. `token_ids`: whether the answer has token ids. `truncation`: how the prompt is
    cut. `begun`: the text of the last message, where the output goes on with it. `cut`: whether an output for which the
    context has no room ends there; else the request is refused. `text`: one that a model without a chat template
    goes on with in place of the messages; with `begun`, which it is then, any model does."""

    text_request: TextRequest
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    template: dict[str, Any]
    logprobs: int | None
    tools: Tools | None
    reasoning: ReasoningRequest
    token_ids: bool
    truncation: Truncation | None
    begun: str | None = None
    cut: bool = False
    text: str | None = None

    @property
    def n(self) -> int:
        return int(self.text_request.fields.get("n", 1))


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat after all checks. `task`: with the prompt. `syntax`: what separates the parts of an output; None: it is
    content alone. `scorer`: spells log probabilities; None without them. `foreground`: submits the task."""

    chat: ChatRequest
    task: Task
    resolved: ResolvedModel
    syntax: OutputSyntax | None
    scorer: ChatLogprobs | None
    foreground: Foreground


@router.post(
    "/completions",
    dependencies=SUBMITS_TASKS,
    response_class=JSONResponse,
    response_model=None,
    responses=RESPONSES,
    openapi_extra=PARAMETERS.openapi(),
)
async def create(request: Request) -> Response:
    """OpenAI's chat completions; docs/use/http.md says which parameters are taken."""
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "answer")
    body, tenant = await read_object(request, gateway.settings.max_body), tenant_of(request)

    def read() -> tuple[ChatRequest, Task]:
        parsed = read_chat(body, tenant)
        return parsed, parsed.text_request.task([0], logprobs=parsed.logprobs)

    chat, task = await checked(request, read)
    ready = await prepare(request, gateway, chat, task)
    chat, task, text_request = ready.chat, ready.task, ready.chat.text_request
    resolved, syntax, scorer, foreground = ready.resolved, ready.syntax, ready.scorer, ready.foreground
    scored = [] if task.prompt_logprobs is None else [ScoredPrompt(await gateway.prompts.tokenizer(resolved.card))]
    kind = "chat.completion.chunk" if text_request.stream else "chat.completion"
    first = head(kind, "chatcmpl", foreground, resolved) | {"service_tier": text_request.service_tier}

    async def answer() -> Response:
        first.update(system_fingerprint=fingerprint(foreground.resolved or resolved), **foreground.shortened)
        if text_request.stream:
            stream = _Stream(chat, Chunks(first, text_request, [len(task.prompt)] * chat.n), scorer, syntax, task)
            direct = Direct(stream.tokens)
            return ChunkStream(stream.chunks(foreground, direct), foreground, gateway, direct)
        choices = choices_of(chat.n, scorer, syntax, foreground.ids[0])
        if chat.token_ids:
            first["prompt_token_ids"] = task.prompt
            for choice in choices:
                choice.token_ids = bytearray()
        whole = Whole(choices, chat.n, shape, scored)
        return await whole_answer(request, gateway, foreground, whole, first)

    return await respond(text_request, foreground, answer)


async def prepare(request: Request, gateway: Gateway, chat: ChatRequest, task: Task) -> PreparedChat:
    """A chat that is ready to be submitted. `task`: that of its parameters, without a prompt. Raises Problem,
    InvalidTask and UnknownModel, in the caller's names."""
    text_request = chat.text_request
    request.state.tier = task.tier
    check_may_use(principal_of(request), task)
    resolved = await idempotency.resolve(request, gateway.client, task, 1, tenant=task.tenant)
    calling, work = None, work_of(request)
    with text_request.naming():
        reasoning = await reasoning_of(
            gateway.templates, gateway.prompts, resolved.card, chat.reasoning, work, chat.variables, begun=chat.begun
        )
        if reasoning is not None:
            chat = replace(chat, template={**reasoning.variables, **chat.template})
        if chat.tools is not None:
            marks = () if reasoning is None else reasoning.marks
            calling = await calling_of(gateway, resolved.card, chat.tools, work, marks)
            chat = replace(chat, template={**chat.template, **calling.variables})
    prompt = await _prompt(request, gateway, resolved, chat, task)
    task = _cut(chat, task.model_copy(update={"prompt": prompt}), resolved.card)
    if calling is not None:
        task = task.model_copy(update={"grammar": calling.grammar})
        work.warnings += calling.warnings
    reasoned = None
    if reasoning is not None:
        with text_request.naming():
            reasoned = reasoning.applied(task, text_request.names, calling=calling is not None)
        task, text_request = reasoned.task, replace(text_request, names={**reasoned.names})
        chat = replace(chat, text_request=text_request)
    syntax = OutputSyntax.of(None if calling is None else calling.syntax, None if reasoned is None else reasoned.syntax)
    scorer = None if chat.logprobs is None else ChatLogprobs(await gateway.prompts.tokenizer(resolved.card))
    with text_request.naming():
        foreground = await keyed(request, gateway, [task])
    return PreparedChat(chat, task, resolved, syntax, scorer, foreground)


def read_chat(body: Mapping[str, Any], tenant: str | None) -> ChatRequest:
    """The chat request in a body. Raises Problem and InvalidTask."""
    text_request = PARAMETERS.read(body, tenant)
    values = text_request.endpoint_values
    scored, top = flag(values, "logprobs"), count(values, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not scored:
        raise invalid_value("top_logprobs", "top_logprobs is given without logprobs: true")
    going_on = flag(values, "continue_final_message")
    prompting = flag(values, "add_generation_prompt", not going_on)
    if going_on and prompting:
        raise invalid_value(
            "add_generation_prompt",
            "continue_final_message and add_generation_prompt are both true: either the last message goes on, or a new "
            "one begins",
        )
    if text_request.stream and "prompt_logprobs" in text_request.fields:
        raise in_one_piece("prompt_logprobs")
    variables = values.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise refusal("chat_template_kwargs", variables, "an object", code="invalid_type")
    for name in RESERVED_VARIABLES:
        if name in variables:
            raise invalid_value("chat_template_kwargs", f"chat_template_kwargs may not have {name}")
    if top is not None:
        text_request = replace(text_request, names=text_request.names | {"logprobs": "top_logprobs"})
    text_request = formed(text_request, "response_format", values.get("response_format", TEXT))
    template = variables | {"add_generation_prompt": prompting, "continue_final_message": going_on}
    tools = read_tools(values, open_objects=text_request.fields.get("open_objects") is True)
    if tools is not None:
        text_request, tools = with_tools(text_request, tools)
    reasoning = read_reasoning(values, values.get("reasoning_effort"), "reasoning_effort")
    messages = read_messages(values["messages"])
    begun = messages[-1]["content"] or "" if going_on else None
    return ChatRequest(
        text_request,
        messages,
        variables,
        template,
        (top or 0) if scored else None,
        tools,
        reasoning,
        flag(values, TOKEN_IDS),
        read_truncation(values),
        begun,
    )


async def _prompt(
    request: Request, gateway: Gateway, resolved: ResolvedModel, chat: ChatRequest, task: Task
) -> tuple[int, ...]:
    """The token ids of the messages, after all other checks."""
    work, card = work_of(request), resolved.card
    spelled = chat.logprobs is not None or task.prompt_logprobs is not None
    plain = chat.text is not None and (chat.begun == chat.text or "chat" not in card["capabilities"])
    with chat.text_request.naming():
        model_fit.check(task, card, counted=False)
        if not plain:
            check_chats(card)
        prompts = await idempotency.made_prompts(
            request, gateway.client, resolved, 1, tenant=task.tenant, spelled=spelled
        )
        if prompts is not None:
            return prompts[0]
        text = chat.text if plain else None
        if text is None:
            text = await gateway.templates.render(card, chat.messages, work, **chat.template)
        prompt = await gateway.prompts.encode(card, text, work, special=plain, whole=chat.truncation is None)
        if chat.truncation is not None:
            prompt = chat.truncation.of(prompt, _in_need_of_room(chat, task, prompt, card), card)
        model_fit.check(_cut(chat, task.model_copy(update={"prompt": prompt}), card), card)
        return prompt


def _cut(chat: ChatRequest, task: Task, card: Mapping[str, Any]) -> Task:
    """The task, whose output goes as far as there is room where the chat is to be cut there."""
    if not chat.cut or task.max_tokens is None or len(task.prompt) <= model_fit.longest_prompt(task, card):
        return task
    return task.model_copy(update={"max_tokens": None})


def _in_need_of_room(chat: ChatRequest, task: Task, prompt: tuple[int, ...], card: Mapping[str, Any]) -> Task:
    """The task with the output for which a prompt is cut to leave room. Where the output may end with the context, a
    prompt that leaves any room is not cut, and no prompt to less than half of the context."""
    if not chat.cut:
        return task
    any_length = task.model_copy(update={"max_tokens": None})
    if len(prompt) <= model_fit.longest_prompt(any_length, card):
        return any_length
    half = max(1, model_fit.room(card) // 2)
    return task.model_copy(update={"max_tokens": min(task.max_tokens or half, half)})


def choices_of(n: int, scorer: ChatLogprobs | None, syntax: OutputSyntax | None, task_id: str) -> list[Choice]:
    """The choices of a task. `syntax`: of what they have beside content, if they may have more."""
    if syntax is None:
        return [Choice(scorer, CHAT) for _ in range(n)]
    return [ParsedChoice(scorer, syntax, task_id, index) for index in range(n)]


def shape(index: int, choice: Choice) -> Iterator[bytes | bytearray]:
    """A choice's JSON in a complete answer."""
    yield b'{"index":%d,"message":{"role":"assistant",' % index
    yield from message(choice)
    yield b'},"logprobs":'
    if choice.arrays is None:
        yield b"null"
    else:
        yield b"{"
        yield from joined(CHAT, choice.arrays)
        yield b',"refusal":null}'
    yield b',"finish_reason":%b' % choice.finish_reason
    yield from choice.with_token_ids()
    yield b"}"


class _Stream:
    """A stream's chunks: for each choice one with the role, then content, then one with the finish reason. Token ids,
    if the answer has them, are as vLLM's: the prompt's in the first chunk, a choice's in those of its content."""

    def __init__(
        self, chat: ChatRequest, chunks: Chunks, scorer: ChatLogprobs | None, syntax: OutputSyntax | None, task: Task
    ) -> None:
        self._chat = chat
        self._task = task
        self._syntax = syntax
        self._parsers = [] if syntax is None else [syntax.parser() for _ in range(chat.n)]
        self._chunks = chunks
        self._scorer = scorer
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def tokens(self, tokens: list[Token]) -> bytes:
        """The chunks of tokens that come on their own."""
        return self._of(OutputBatch.of(tokens))

    async def chunks(self, foreground: Foreground, direct: Direct) -> AsyncGenerator[bytes]:
        self._task_id = foreground.ids[0]
        with self._chat.text_request.naming():
            ends: dict[int, End] = {}
            async with aclosing(output_batches(foreground.events(direct), self._chat.n)) as batches:
                async for batch in batches:
                    ends |= batch.ends
                    if batch.outputs and (chunk := await run_by_weight(batch.weight, partial(self._of, batch))):
                        yield chunk
            if self._chat.text_request.include_usage:
                yield self._chunks.usage(ends.values(), sum(parser.reasoning_tokens for parser in self._parsers))
            yield DONE

    def _of(self, batch: OutputBatch) -> bytes:
        chunks: list[bytes] = []
        for index, output in batch.outputs.items():
            if index not in self._begun:
                prompt = ""
                if self._chat.token_ids and not self._begun:
                    prompt = f', "prompt_token_ids": {json.dumps(self._task.prompt)}'
                self._begun.add(index)
                # Null where calls alone may follow, as with OpenAI: some clients begin a text at an empty one.
                content = "" if self._syntax is None else None
                role = {"role": "assistant", "content": content, "refusal": None}
                chunks.append(self._delta(index, role, members=prompt))
            self._chunks.count(index, len(output.tokens))
            logprobs = token_ids = None
            if self._scorer is not None and output.tokens:
                logprobs = self._scorer.of(output.tokens) | {"refusal": None}
            if self._chat.token_ids and output.tokens:
                token_ids = [token.token_id for token in output.tokens]
            ending = output.reason in REASONS and index not in self._ended
            for delta in self._deltas(index, output, ending, bool(logprobs or token_ids)):
                chunks.append(self._delta(index, delta, logprobs, token_ids=token_ids))
                logprobs = token_ids = None
            if ending:
                self._ended.add(index)
                called = output.reason == "stop" and self._parsers and self._parsers[index].called
                chunks.append(self._delta(index, {}, reason=CALLED if called else output.reason))
        return b"".join(chunks)

    def _deltas(self, index: int, output: Output, ending: bool, listed: bool) -> list[dict[str, Any]]:
        """Returns the deltas of a choice's new output; at least one if its tokens are `listed` beside the text."""
        if self._syntax is None:
            return [{"content": output.text}] if output.text or listed else []
        parts = self._parsers[index].feed(output.tokens)
        parts += self._parsers[index].end() if ending else []
        return [*deltas(parts, self._syntax, self._task_id, index)] or ([{"content": ""}] if listed else [])

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        *,
        token_ids: list[int] | None = None,
        members: str = "",
    ) -> bytes:
        plain = logprobs is None and reason is None and token_ids is None
        if plain and len(delta) == 1 and isinstance(text := delta.get("content"), str):
            content = (
                f'{{"index": {index}, "delta": {{"content": {quote(text)}}}, "logprobs": null, "finish_reason": null}}'
            )
            return self._chunks.around(index, content)  # nearly every chunk: `json.dumps` takes five times as long
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunks.of(choice if token_ids is None else choice | {"token_ids": token_ids}, members)
