"""`POST /v1/completions`: the legacy endpoint, which evaluation harnesses use. Each prompt becomes a task.

An echoed prompt, with which its choices begin, is built once for all of them:

parts of the prompt's log probabilities -> lists -> in a stream, sent at once to each choice
                                                 -> in one piece, kept as JSON that the choices share
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from json.encoder import encode_basestring as quote
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from engine.declared import MAX_INT32
from engine.errors import ErrorText
from engine.text import Tokenizer
from producers.contract import model_fit
from producers.contract.fields import MAX_PROMPT_BYTES, MAX_PROMPT_TOKENS
from producers.contract.model_fit import MAX_LOGPROBS
from producers.contract.stream import End, Prompt, Token
from producers.contract.task import Task
from producers.errors import InvalidTask, shown
from producers.gateway.admission.limits import check_may_use, check_number
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import SUBMITS_TASKS, principal_of, tenant_of
from producers.gateway.http.errors import Problem, invalid_value
from producers.gateway.http.request_body import checked, read_object
from producers.gateway.http.request_state import Work, work_of
from producers.gateway.http.sse import Direct
from producers.gateway.openai.answer import (
    DONE,
    REASONS,
    Chunks,
    ChunkStream,
    OutputBatch,
    fingerprint,
    head,
    output_batches,
    respond,
    run_by_weight,
    weight,
)
from producers.gateway.openai.complete import Choice, Whole, whole_answer
from producers.gateway.openai.logprobs import (
    COMPLETION,
    Arrays,
    CompletionLogprobs,
    PromptLogprobs,
    ScoredPrompt,
    joined,
)
from producers.gateway.openai.parameters import (
    RESPONSES,
    TOKEN_IDS,
    TOKEN_PARAMETERS,
    TRUNCATE,
    Parameters,
    TextRequest,
    Truncation,
    flag,
    in_one_piece,
    read_truncation,
)
from producers.gateway.openai.response_format import NESTED, TEXT, formed
from producers.gateway.tasks.foreground import Foreground, keyed
from producers.gateway.text.prompts import InvalidPrompt

P = TypeVar("P")
T = TypeVar("T")
#: Most prompts in one request.
MAX_PROMPTS: Final = 256
_TEXT: Final = {"type": "string", "maxLength": MAX_PROMPT_BYTES}
_IDS: Final = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_PROMPT_TOKENS,
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT32},
}
PARAMETERS: Final = Parameters(
    endpoint_schemas={
        "prompt": {
            "description": "text, a list of texts, token ids, or a list of lists of token ids",
            "anyOf": [
                _TEXT,
                _IDS,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"anyOf": [_TEXT, _IDS]}},
            ],
        },
        "echo": {"type": "boolean"},
        "add_special_tokens": {"type": "boolean"},
        "response_format": NESTED,
        **TOKEN_PARAMETERS,
    },
    renamed={name: name for name in ("max_tokens", "best_of", "logprobs", "prompt_logprobs")},
    required="prompt",
)
#: OpenAI's default of max_tokens.
MAX_TOKENS: Final = 16
#: Most output tokens of a complete answer, over all choices and prompts: some tens of megabytes.
MAX_ANSWER: Final = 1 << 23
PromptInput = str | list[int]
router = APIRouter(prefix="/v1", tags=["openai"])


@dataclass(frozen=True, slots=True)
class Completion:
    """A checked completions request. `special`: whether the tokenizer adds its special tokens to texts. `token_ids`:
    whether choices have token ids. `truncation`: how prompts are cut."""

    text_request: TextRequest
    prompts: list[PromptInput]
    echo: bool
    special: bool
    token_ids: bool = False
    truncation: Truncation | None = None

    @property
    def n(self) -> int:
        return int(self.text_request.fields.get("n", 1))

    @property
    def logprobs(self) -> bool:
        return "logprobs" in self.text_request.fields

    def tasks(self) -> list[Task]:
        """A task for each prompt, before tokenisation. Raises InvalidTask."""
        return [self._task(at, prompt) for at, prompt in enumerate(self.prompts)]

    async def encoded(
        self,
        gateway: Gateway,
        card: Mapping[str, Any],
        tasks: Sequence[Task],
        work: Work,
        max_output: int | None = None,
        earlier: Sequence[tuple[int, ...]] | None = None,
    ) -> list[Task]:
        """The tasks with token ids, checked against the model. `max_output`: the key's largest output, if it has one.
        `earlier`: the prompts that an earlier request of this Idempotency-Key made of the same texts.

        Raises InvalidTask, and as `Prompts.encode`.
        """
        texts = {at: task.prompt for at, task in enumerate(tasks) if isinstance(task.prompt, str)}
        ids = dict(enumerate(earlier or ()))
        if earlier is None:
            encode = partial(
                gateway.prompts.encode_all, card, work=work, special=self.special, whole=self.truncation is None
            )
            ids = await self._each(texts, encode)
        usual = min(MAX_TOKENS, max_output or MAX_TOKENS)
        return [self._checked(card, at, task, ids.get(at), usual) for at, task in enumerate(tasks)]

    async def texts(self, gateway: Gateway, card: Mapping[str, Any], work: Work) -> list[str]:
        """Each prompt's text. Raises as `encoded` does."""
        ids = {at: prompt for at, prompt in enumerate(self.prompts) if not isinstance(prompt, str)}
        decoded = await self._each(ids, partial(gateway.prompts.decode_all, card, work=work))
        return [prompt if isinstance(prompt, str) else decoded[at] for at, prompt in enumerate(self.prompts)]

    async def _each(self, prompts: Mapping[int, P], work: Callable[[Sequence[P]], Awaitable[list[T]]]) -> dict[int, T]:
        """Returns index -> result of `work` for each prompt. Its errors name the prompt's index."""
        indexes = list(prompts)
        try:
            results = await work(list(prompts.values()))
        except InvalidPrompt as error:
            with self._named_for(indexes[error.at]).naming():
                raise
        return dict(zip(indexes, results, strict=True))

    def _checked(self, card: Mapping[str, Any], at: int, task: Task, ids: tuple[int, ...] | None, usual: int) -> Task:
        """A task ready to submit. `ids`: the token ids of a text prompt, else None. `usual`: its output, if unsaid."""
        with self._named_for(at).naming():
            if ids is None and not self.prompts[at]:
                ids = _beginning(card)
            if ids is not None:
                task = task.model_copy(update={"prompt": ids})
            if self.truncation is not None and not isinstance(task.prompt, str):
                task = task.model_copy(update={"prompt": self.truncation.of(task.prompt, task, card)})
            if "max_tokens" not in self.text_request.fields:
                # It is only a default: a long prompt gets the tokens that are left.
                remaining = max(1, int(card["context_length"]) - len(task.prompt))
                task = task.model_copy(update={"max_tokens": min(usual, remaining)})
            model_fit.check(task, card)
        return task

    def check_size(self, tasks: Sequence[Task]) -> None:
        """Raise Problem if the complete answer to all prompts would be too large."""
        output = sum(task.max_tokens or 0 for task in tasks) * self.n
        if not self.text_request.stream and output > MAX_ANSWER:
            raise invalid_value(
                "max_tokens",
                f"max_tokens is {self.text_request.fields['max_tokens']}: over all prompts and choices these are up to "
                f"{output} tokens; at most {MAX_ANSWER} are given in one answer; ask for a stream, send fewer prompts, "
                "or lower max_tokens or n",
            )
        self._check_scored(tasks)
        # A stream's output has no bound, but a choice's first chunk has its whole prompt.
        answered = (0 if self.text_request.stream else output) + sum(len(task.prompt) for task in tasks) * self.n
        if self.token_ids and answered > MAX_ANSWER:
            raise invalid_value(
                TOKEN_IDS,
                f"{TOKEN_IDS} is true: over all prompts and choices these are up to {answered} tokens; at most "
                f"{MAX_ANSWER} are given in one answer; send fewer prompts, or lower max_tokens or n",
            )
        if not self.logprobs:
            return
        tokens = output + (sum(len(task.prompt) for task in tasks) * self.n if self.echo else 0)
        logprobs = tokens * (1 + int(self.text_request.fields["logprobs"]))
        if logprobs > MAX_LOGPROBS:
            raise invalid_value(
                "logprobs",
                f"logprobs is {self.text_request.fields['logprobs']}: "
                f"over all prompts and choices these are {logprobs} log "
                f"probabilities; at most {MAX_LOGPROBS} are given in one answer; send fewer prompts, or lower the "
                "others",
            )

    def _check_scored(self, tasks: Sequence[Task]) -> None:
        scored = sum(
            len(task.prompt) * (1 + task.prompt_logprobs) for task in tasks if task.prompt_logprobs is not None
        )
        if not self.echo and scored * self.n > MAX_LOGPROBS:
            raise invalid_value(
                "prompt_logprobs",
                f"prompt_logprobs is {self.text_request.fields['prompt_logprobs']}: over all prompts and choices these "
                f"are {scored * self.n} log probabilities; at most {MAX_LOGPROBS} are given in one answer; send fewer "
                "or shorter prompts, or lower the others",
            )

    def _task(self, at: int, prompt: PromptInput) -> Task:
        fields = {} if "max_tokens" in self.text_request.fields else {"max_tokens": MAX_TOKENS}
        if self.echo and self.logprobs:
            fields["prompt_logprobs"] = self.text_request.fields["logprobs"]
        # The model's card says which token an empty text means; until then, a token that every model has.
        return self._named_for(at).task([0] if prompt == "" else prompt, **fields)

    def _named_for(self, at: int) -> TextRequest:
        """The request, with the caller's names for the fields of the task of prompt `at`."""
        names = {**self.text_request.names}
        if self.echo and self.logprobs:
            names |= {"prompt_logprobs": "logprobs"}
        if len(self.prompts) > 1:
            names |= dict.fromkeys(("prompt", "prompt_ids"), f"prompt[{at}]")
        return replace(self.text_request, names=names)


def read_completion(body: Mapping[str, Any], tenant: str | None) -> Completion:
    """The completions request in a body. Raises Problem."""
    text_request = PARAMETERS.read(body, tenant)
    text_request = formed(text_request, "response_format", text_request.endpoint_values.get("response_format", TEXT))
    n, best_of = text_request.fields.get("n", 1), text_request.fields.get("best_of")
    if text_request.stream and best_of is not None and best_of != n:
        raise invalid_value(
            "best_of",
            f"best_of is {shown(best_of)} and n is {shown(n)}: the best are known at the end only, and not streamed",
        )
    if "prompt_logprobs" in text_request.fields:
        if text_request.stream:
            raise in_one_piece("prompt_logprobs")
        if flag(text_request.endpoint_values, "echo"):
            raise invalid_value(
                "prompt_logprobs",
                "prompt_logprobs and echo both answer the prompt; give one of them: echo with logprobs scores it, too",
            )
    truncation = read_truncation(text_request.endpoint_values)
    if truncation is not None and flag(text_request.endpoint_values, "echo"):
        raise invalid_value(TRUNCATE, f"echo answers the whole prompt, of which {TRUNCATE} cuts some; give one of them")
    return Completion(
        text_request,
        _prompts(text_request.endpoint_values["prompt"]),
        flag(text_request.endpoint_values, "echo"),
        flag(text_request.endpoint_values, "add_special_tokens", True),
        flag(text_request.endpoint_values, TOKEN_IDS),
        truncation,
    )


def _prompts(value: Any) -> list[PromptInput]:
    """The prompts: one or a list, each text or token ids. The task checks each one."""
    many = isinstance(value, list) and bool(value) and all(isinstance(element, (str, list)) for element in value)
    if not many:
        return [value]
    if len(value) > MAX_PROMPTS:
        raise Problem(
            400,
            f"prompt has {len(value)} prompts; at most {MAX_PROMPTS} are taken",
            code="array_above_max_length",
            param="prompt",
        )
    return list(value)


def _beginning(card: Mapping[str, Any]) -> tuple[int, ...]:
    """The token that an empty text means: as in OpenAI's API, the one before every document. Raises InvalidTask."""
    tokens = [token for token in (card["bos_token_id"], *card["eos_token_ids"]) if token is not None]
    if not tokens:
        raise InvalidTask(
            ErrorText.of(
                "{prompt} is empty, and model {} has no token for a beginning; give text, or a token id",
                shown(card["name"]),
            ),
            param="prompt",
            code="empty_prompt",
        )
    return (int(tokens[0]),)


class ScoredChoices(ScoredPrompt):
    """The `prompt_logprobs` of one prompt, which each of its choices has, as vLLM's have."""

    def members(self) -> Iterator[bytes | bytearray]:
        return iter(())

    def in_choice(self) -> Iterator[bytes | bytearray]:
        return super().members()


class Echo:
    """One echoed prompt. `tokens`: its length. `tokenizer`: given if it has log probabilities, too."""

    def __init__(self, text: str, tokens: int, tokenizer: Tokenizer | None) -> None:
        self.text = text
        self.scored = tokenizer is not None
        self._tokens = tokens
        self._logprobs = None if tokenizer is None else PromptLogprobs(tokenizer, text)
        self._sent = 0
        self.arrays = Arrays(COMPLETION)

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return len(self.text) + self.arrays.size

    @cached_property
    def quoted(self) -> bytes:
        """The text as JSON, without quotes."""
        return quote(self.text)[1:-1].encode()

    def take(self, part: Prompt) -> None:
        """Add a part of the prompt's log probabilities."""
        self.arrays.add(self._lists(part))

    def members(self) -> Iterator[bytes]:
        """No members: the prompt is in the choices."""
        return iter(())

    def choice(self, part: Prompt) -> str:
        """A part's JSON in a stream's chunk, after the choice's index.

        A part has the text of its tokens. The last part also has the text that no token covers.
        """
        lists = self._lists(part)
        last = part.first + len(part.token_ids) >= self._tokens
        end = len(self.text) if last or self._logprobs is None else self._logprobs.offset
        text, self._sent = self.text[self._sent : end], end
        return echoed(text, lists)

    def _lists(self, part: Prompt) -> dict[str, list[Any]]:
        return {} if self._logprobs is None else self._logprobs.rows(zip(part.token_ids, part.logprobs, strict=True))


def echoed(text: str, logprobs: dict[str, list[Any]] | None) -> str:
    """A choice's JSON in a chunk, after its index."""
    return json.dumps({"text": text, "logprobs": logprobs, "finish_reason": None})[1:]


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
        completion = read_completion(body, tenant)
        return completion, completion.tasks()

    completion, tasks = await checked(request, read)
    text_request, work = completion.text_request, work_of(request)
    request.state.tier = tasks[0].tier
    check_may_use(principal_of(request), tasks[0])
    tenant = tasks[0].tenant
    resolved = await idempotency.resolve(request, gateway.client, tasks[0], len(tasks), tenant=tenant)
    accounts = await gateway.accounts.limited(request, tasks[0].tenant)
    if len(tasks) > 1 and idempotency.HEADER not in request.headers:
        for account in accounts:
            check_number(account, len(tasks))
    prompts_made = await idempotency.made_prompts(
        request, gateway.client, resolved, len(tasks), tenant=tasks[0].tenant, spelled=completion.logprobs
    )
    max_output = accounts[0].limits.max_output if accounts else None
    tasks = await completion.encoded(gateway, resolved.card, tasks, work, max_output, prompts_made)
    completion.check_size(tasks)
    tokenizer = await gateway.prompts.tokenizer(resolved.card) if completion.logprobs else None
    echoes = await _echoes(gateway, resolved.card, completion, tasks, work, tokenizer)
    scorers = _scorers(completion, tokenizer, echoes)
    with text_request.naming():
        foreground = await keyed(request, gateway, tasks)
    first = head("text_completion", "cmpl", foreground, resolved)
    if text_request.tier_given:
        first["service_tier"] = text_request.service_tier

    async def answer() -> Response:
        first.update(system_fingerprint=fingerprint(foreground.resolved or resolved), **foreground.shortened)
        ids: list[str] = []
        if completion.token_ids:
            ids = await run_by_weight(
                sum(len(task.prompt) for task in tasks), lambda: [json.dumps(task.prompt) for task in tasks]
            )
        if text_request.stream:
            prompts = [len(task.prompt) for task in tasks for _ in range(completion.n)]
            stream = _Stream(completion, Chunks(first, text_request, prompts), scorers, echoes, ids)
            direct = Direct(stream.tokens)
            return ChunkStream(stream.chunks(foreground, direct), foreground, gateway, direct)
        choices = [Choice(scorer, COMPLETION) for scorer in scorers]
        for choice in choices if completion.token_ids else ():
            choice.token_ids = bytearray()
        encoded = [text.encode() for text in ids]
        if text_request.fields.get("prompt_logprobs") is None:
            whole = Whole(choices, completion.n, partial(shape, completion.n, echoes, prompts=encoded), echoes)
        else:
            spelling = await gateway.prompts.tokenizer(resolved.card)
            scored = [ScoredChoices(spelling) for _ in tasks]
            shaped = partial(shape, completion.n, (), scored=scored, prompts=encoded)
            whole = Whole(choices, completion.n, shaped, scored)
        whole.size += sum(map(len, encoded)) * completion.n
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


def shape(
    n: int,
    echoes: Sequence[Echo],
    index: int,
    choice: Choice,
    *,
    scored: Sequence[ScoredChoices] = (),
    prompts: Sequence[bytes] = (),
) -> Iterator[bytes | bytearray]:
    """A choice's JSON in a complete answer. `prompts`: the token ids of each prompt as JSON, if the answer has them."""
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
    yield b',"finish_reason":%b' % choice.finish_reason
    if scored:
        yield from scored[index // n].in_choice()
    yield from choice.with_token_ids()
    if prompts:
        yield b',"prompt_token_ids":'
        yield prompts[index // n]
    yield b"}"


class _Stream:
    """A stream's chunks: one for each choice's new output; its last one has the finish reason. Token ids, if the answer
    has them, are as vLLM's: a prompt's in the first one of each of its choices. `prompts`: those of each prompt as
    JSON, which is made once for all of its choices; none if the answer has no token ids."""

    def __init__(
        self,
        completion: Completion,
        chunks: Chunks,
        scorers: Sequence[CompletionLogprobs | None],
        echoes: Sequence[Echo],
        prompts: Sequence[str],
    ) -> None:
        self._completion = completion
        self._prompts = prompts
        self._begun: set[int] = set()
        self._chunks = chunks
        self._scorers = scorers
        self._echoes = echoes
        self._ended: set[int] = set()

    def tokens(self, tokens: list[Token]) -> bytes:
        """The chunks of tokens that come on their own."""
        return self._of(OutputBatch.of(tokens))

    async def chunks(self, foreground: Foreground, direct: Direct) -> AsyncGenerator[bytes]:
        with self._completion.text_request.naming():
            ends: dict[int, End] = {}
            for number, echo in enumerate(self._echoes):
                if echo.text and not echo.scored:
                    for chunk in self._of_all(number, echoed(echo.text, None)):
                        yield chunk
            async with aclosing(output_batches(foreground.events(direct), self._completion.n)) as batches:
                async for batch in batches:
                    ends |= batch.ends
                    for number, parts in batch.prompts.items():
                        for part in parts:
                            choice = await run_by_weight(
                                weight(part.logprobs), partial(self._echoes[number].choice, part)
                            )
                            for chunk in self._of_all(number, choice):
                                yield chunk
                    if batch.outputs and (chunk := await run_by_weight(batch.weight, partial(self._of, batch))):
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
            listed = self._completion.token_ids
            if output.text or reason or (output.tokens and (logprobs or listed)):
                choice = {"index": index, "text": output.text, "logprobs": logprobs, "finish_reason": reason}
                if listed:
                    choice["token_ids"] = [token.token_id for token in output.tokens]
                chunks.append(self._chunks.around(index, json.dumps(choice)[:-1] + self._prompt(index) + "}"))
        return b"".join(chunks)

    def _prompt(self, index: int) -> str:
        """The member of a choice's first chunk that lists its prompt, if the answer has token ids."""
        if not self._prompts or index in self._begun:
            return ""
        self._begun.add(index)
        return f', "prompt_token_ids": {self._prompts[index // self._completion.n]}'
