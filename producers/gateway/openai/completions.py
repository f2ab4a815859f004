"""`POST /v1/completions`: the legacy endpoint, which evaluation harnesses use. Each prompt becomes a task."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from engine.text import Tokenizer
from producers.contract.stream import End
from producers.contract.task import Task
from producers.gateway.admission.accounts import check_number
from producers.gateway.admission.limits import check_may_use
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import SUBMITS_TASKS, principal_of, tenant_of
from producers.gateway.http.request_body import checked, read_object
from producers.gateway.http.request_state import Work, resolve, work_of
from producers.gateway.openai.answer import (
    DONE,
    REASONS,
    Chunks,
    ChunkStream,
    OutputBatch,
    head,
    made,
    news,
    respond,
    weight,
)
from producers.gateway.openai.arrays import joined
from producers.gateway.openai.complete import Choice, Whole, whole_answer
from producers.gateway.openai.echo import Echo, echoed
from producers.gateway.openai.logprobs import COMPLETION, CompletionLogprobs
from producers.gateway.openai.parameters import RESPONSES
from producers.gateway.openai.prompts import PARAMETERS, Completion, read_completion
from producers.gateway.tasks.foreground import Foreground, keyed

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post(
    "/completions",
    dependencies=SUBMITS_TASKS,
    response_class=JSONResponse,
    response_model=None,
    responses=RESPONSES,
    openapi_extra=PARAMETERS.openapi(),
)
async def create(request: Request) -> Response:
    """OpenAI's completions; docs/use/http.md says which parameters are taken."""
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "answer")
    body, tenant = await read_object(request, gateway.settings.max_body), tenant_of(request)

    def read() -> tuple[Completion, list[Task]]:
        found = read_completion(body, tenant)
        return found, found.tasks()

    completion, tasks = await checked(request, read)
    text_request, work = completion.text_request, work_of(request)
    request.state.tier = tasks[0].tier
    check_may_use(principal_of(request), tasks[0])
    resolved = await resolve(request, gateway.client, text_request.model)
    accounts = await gateway.accounts.limited(request, tasks[0].tenant)
    if len(tasks) > 1 and idempotency.HEADER not in request.headers:
        for account in accounts:
            check_number(account, len(tasks))
    prompts_made = await idempotency.made_prompts(request, gateway.client, len(tasks), tenant=tasks[0].tenant)
    max_output = accounts[0].limits.max_output if accounts else None
    tasks = await completion.encoded(gateway, resolved.card, tasks, work, max_output, prompts_made)
    completion.check_size(tasks)
    tokenizer = await gateway.prompts.tokenizer(resolved.card) if completion.logprobs else None
    echoes = await _echoes(gateway, resolved.card, completion, tasks, work, tokenizer)
    scorers = _scorers(completion, tokenizer, echoes)
    with text_request.in_its_words():
        foreground = await keyed(request, gateway, tasks)
    first = head("text_completion", "cmpl", foreground, resolved)
    if text_request.tier_given:
        first["service_tier"] = text_request.service_tier

    async def answer() -> Response:
        first.update(foreground.shortened)
        if text_request.stream:
            prompts = [len(task.prompt) for task in tasks for _ in range(completion.n)]
            stream = _Stream(completion, Chunks(first, text_request, prompts), scorers, echoes)
            return ChunkStream(stream.chunks(foreground), foreground, gateway)
        choices = [Choice(scorer, COMPLETION) for scorer in scorers]
        whole = Whole(choices, completion.n, partial(shape, completion.n, echoes), echoes)
        return await whole_answer(request, gateway, foreground, whole, first)

    return await respond(text_request, foreground, answer)


async def _echoes(
    gateway: Gateway,
    card: Mapping[str, Any],
    completion: Completion,
    tasks: Sequence[Task],
    work: Work,
    tokenizer: Tokenizer | None,
) -> list[Echo]:
    """The echo of each prompt, with which its choices begin; empty without `echo`."""
    if not completion.echo:
        return []
    texts = await completion.texts(gateway, card, work)
    return [Echo(text, len(task.prompt), tokenizer) for text, task in zip(texts, tasks, strict=True)]


def _scorers(
    completion: Completion, tokenizer: Tokenizer | None, echoes: Sequence[Echo]
) -> list[CompletionLogprobs] | list[None]:
    """A scorer for each choice, or None for each if no log probabilities were requested."""
    count = len(completion.prompts) * completion.n
    if tokenizer is None:
        return [None] * count
    begins = [len(echo.text) for echo in echoes] or [0] * len(completion.prompts)
    return [CompletionLogprobs(tokenizer, begins[index // completion.n]) for index in range(count)]


def shape(n: int, echoes: Sequence[Echo], index: int, choice: Choice) -> Iterator[bytes | bytearray]:
    """A choice's JSON in a complete answer."""
    echo = echoes[index // n] if echoes else None
    yield b'{"index":%d,"text":"' % index
    if echo is not None:
        yield echo.quoted
    yield choice.text
    if choice.arrays is None:
        yield b'","logprobs":null'
    else:
        yield b'","logprobs":{'
        yield from joined(COMPLETION, *([] if echo is None else [echo.arrays]), choice.arrays)
        yield b"}"
    yield b',"finish_reason":%b}' % choice.finish_reason


class _Stream:
    """A stream's chunks: one for each choice's new output; its last one has the finish reason."""

    def __init__(
        self,
        completion: Completion,
        chunks: Chunks,
        scorers: Sequence[CompletionLogprobs | None],
        echoes: Sequence[Echo],
    ) -> None:
        self._completion = completion
        self._chunks = chunks
        self._scorers = scorers
        self._echoes = echoes
        self._ended: set[int] = set()

    async def chunks(self, foreground: Foreground) -> AsyncGenerator[bytes]:
        with self._completion.text_request.in_its_words():
            ends: dict[int, End] = {}
            for number, echo in enumerate(self._echoes):
                if echo.text and not echo.scored:
                    for chunk in self._of_all(number, echoed(echo.text, None)):
                        yield chunk
            async with aclosing(news(foreground.events(), self._completion.n)) as batches:
                async for batch in batches:
                    ends |= batch.ends
                    for number, parts in batch.prompts.items():
                        for part in parts:
                            choice = await made(weight(part.logprobs), partial(self._echoes[number].choice, part))
                            for chunk in self._of_all(number, choice):
                                yield chunk
                    if batch.outputs and (chunk := await made(batch.weight, partial(self._of, batch))):
                        yield chunk
            if self._completion.text_request.include_usage:
                yield self._chunks.usage(ends.values())
            yield DONE

    def _of_all(self, number: int, choice: str) -> Iterator[bytes]:
        """Equal chunks for all choices of one prompt."""
        n = self._completion.n
        return self._chunks.alike(range(number * n, (number + 1) * n), choice)

    def _of(self, batch: OutputBatch) -> bytes:
        chunks: list[bytes] = []
        for index, output in batch.outputs.items():
            self._chunks.count(index, len(output.tokens))
            reason = output.reason if output.reason in REASONS and index not in self._ended else None
            if reason is not None:
                self._ended.add(index)
            scorer = self._scorers[index]
            logprobs = None if scorer is None else scorer.of(output.tokens)
            if output.text or reason or (output.tokens and logprobs):
                choice = {"index": index, "text": output.text, "logprobs": logprobs, "finish_reason": reason}
                chunks.append(self._chunks.of(choice))
        return b"".join(chunks)
