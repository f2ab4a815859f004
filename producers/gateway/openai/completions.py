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
from producers.contract.stream.events import End
from producers.contract.task import Task
from producers.gateway.admission.accounts import check_number
from producers.gateway.admission.limits import check_may_use
from producers.gateway.admission.resolved import resolve
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import SUBMITS_TASKS, principal_of, tenant_of
from producers.gateway.http.request_body import INLINE, aside, read_object
from producers.gateway.http.work import Work, work_of
from producers.gateway.openai.answer import DONE, REASONS, Chunks, ChunkStream, News, head, made, news, respond, weight
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
    """OpenAI's completions; docs/http.md says which parameters are taken."""
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "answer")
    wanted = read_completion(await read_object(request, gateway.settings.max_body), tenant_of(request))
    asked, work = wanted.asked, work_of(request)
    # To check a body's token ids takes as long as to parse it.
    large = work.size is not None and work.size > INLINE
    tasks = await aside(request, work, wanted.tasks) if large else wanted.tasks()
    request.state.tier = tasks[0].tier
    check_may_use(principal_of(request), tasks[0])
    known = await resolve(request, gateway.client, asked.model)
    accounts = await gateway.accounts.limited(request, tasks[0].tenant)
    if len(tasks) > 1 and idempotency.HEADER not in request.headers:
        for account in accounts:
            check_number(account, len(tasks))
    made = await idempotency.made_prompts(request, gateway.client, len(tasks), tenant=tasks[0].tenant)
    most = accounts[0].limits.max_output if accounts else None
    tasks = await wanted.encoded(gateway, known.card, tasks, work, most, made)
    wanted.check_size(tasks)
    tokenizer = await gateway.prompts.tokenizer(known.card) if wanted.logprobs else None
    echoes = await _echoes(gateway, known.card, wanted, tasks, work, tokenizer)
    scorers = _scorers(wanted, tokenizer, echoes)
    with asked.in_its_words():
        foreground = await keyed(request, gateway, tasks)
    first = head("text_completion", "cmpl", foreground, known)
    if asked.tier_given:
        first["service_tier"] = asked.service_tier

    async def answer() -> Response:
        first.update(foreground.shortened)
        if asked.stream:
            prompts = [len(task.prompt) for task in tasks for _ in range(wanted.n)]
            stream = _Stream(wanted, Chunks(first, asked, prompts), scorers, echoes)
            return ChunkStream(stream.chunks(foreground), foreground, gateway)
        choices = [Choice(scorer, COMPLETION) for scorer in scorers]
        whole = Whole(choices, wanted.n, partial(shape, wanted.n, echoes), echoes)
        return await whole_answer(request, gateway, foreground, whole, first)

    return await respond(asked, foreground, answer)


async def _echoes(
    gateway: Gateway,
    card: Mapping[str, Any],
    wanted: Completion,
    tasks: Sequence[Task],
    work: Work,
    tokenizer: Tokenizer | None,
) -> list[Echo]:
    """The echo of each prompt, with which its choices begin; empty without `echo`."""
    if not wanted.echo:
        return []
    texts = await wanted.texts(gateway, card, work)
    return [Echo(text, len(task.prompt), tokenizer) for text, task in zip(texts, tasks, strict=True)]


def _scorers(
    wanted: Completion, tokenizer: Tokenizer | None, echoes: Sequence[Echo]
) -> list[CompletionLogprobs] | list[None]:
    """A scorer for each choice, or None for each if no log probabilities were requested."""
    count = len(wanted.prompts) * wanted.n
    if tokenizer is None:
        return [None] * count
    begins = [len(echo.text) for echo in echoes] or [0] * len(wanted.prompts)
    return [CompletionLogprobs(tokenizer, begins[index // wanted.n]) for index in range(count)]


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
        wanted: Completion,
        chunks: Chunks,
        scorers: Sequence[CompletionLogprobs | None],
        echoes: Sequence[Echo],
    ) -> None:
        self._wanted = wanted
        self._chunks = chunks
        self._scorers = scorers
        self._echoes = echoes
        self._ended: set[int] = set()

    async def chunks(self, foreground: Foreground) -> AsyncGenerator[bytes]:
        with self._wanted.asked.in_its_words():
            ends: dict[int, End] = {}
            for number, echo in enumerate(self._echoes):
                if echo.text and not echo.scored:
                    for chunk in self._of_all(number, echoed(echo.text, None)):
                        yield chunk
            async with aclosing(news(foreground.events(), self._wanted.n)) as batches:
                async for batch in batches:
                    ends |= batch.ends
                    for number, parts in batch.prompts.items():
                        for part in parts:
                            said = await made(weight(part.logprobs), partial(self._echoes[number].choice, part))
                            for chunk in self._of_all(number, said):
                                yield chunk
                    if batch.outputs and (chunk := await made(batch.weight, partial(self._of, batch))):
                        yield chunk
            if self._wanted.asked.include_usage:
                yield self._chunks.usage(ends.values())
            yield DONE

    def _of_all(self, number: int, said: str) -> Iterator[bytes]:
        """Equal chunks for all choices of one prompt."""
        n = self._wanted.n
        return self._chunks.alike(range(number * n, (number + 1) * n), said)

    def _of(self, batch: News) -> bytes:
        said: list[bytes] = []
        for index, output in batch.outputs.items():
            self._chunks.count(index, len(output.tokens))
            reason = output.reason if output.reason in REASONS and index not in self._ended else None
            if reason is not None:
                self._ended.add(index)
            scorer = self._scorers[index]
            logprobs = None if scorer is None else scorer.of(output.tokens)
            if output.text or reason or (output.tokens and logprobs):
                choice = {"index": index, "text": output.text, "logprobs": logprobs, "finish_reason": reason}
                said.append(self._chunks.of(choice))
        return b"".join(said)
