"""`POST /v1/completions`: the legacy endpoint, which evaluation harnesses use. Each prompt is a task."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from engine.text import Tokenizer
from producers.events import End, Logprobs
from producers.events import Prompt as PromptPart
from producers.gateway.body import read_object
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.errors import Problem
from producers.gateway.foreground import Foreground, answered
from producers.gateway.openai.answer import DONE, REASONS, Chunks, ChunkStream, head, usage_of, whole_answer
from producers.gateway.openai.logprobs import CompletionLogprobs
from producers.gateway.openai.outputs import Output, news, whole
from producers.gateway.openai.parameters import Asked, flag, read, request_body
from producers.gateway.prompts import InvalidPrompt
from producers.gateway.views import ErrorView
from producers.task import MAX_LOGPROBS, Task, shown

router = APIRouter(prefix="/v1", tags=["openai"])

#: The endpoint's own parameters, with their JSON schemas.
OWN: Final[dict[str, dict[str, Any]]] = {
    "prompt": {
        "description": "text, a list of texts, token ids, or a list of lists of token ids",
        "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1}],
    },
    "echo": {"type": "boolean"},
    "add_special_tokens": {"type": "boolean"},
}
RENAMED: Final = {name: name for name in ("max_tokens", "best_of", "logprobs")}
#: OpenAI's default.
MAX_TOKENS: Final = 16
MAX_PROMPTS: Final = 256
Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class _Completion:
    asked: Asked
    prompts: list[Prompt]
    echo: bool
    special: bool

    @property
    def n(self) -> int:
        return int(self.asked.fields.get("n", 1))

    @property
    def logprobs(self) -> bool:
        return "logprobs" in self.asked.fields

    def words(self, at: int) -> Asked:
        """What to call the fields of the task of prompt `at`."""
        if len(self.prompts) == 1:
            return self.asked
        return replace(self.asked, names=self.asked.names | {"prompt": f"prompt[{at}]"})


@router.post(
    "/completions",
    response_class=JSONResponse,
    response_model=None,
    responses={status: {"model": ErrorView} for status in (400, 404, 413, 415, 429, 503)},
    openapi_extra=request_body(OWN, RENAMED, required="prompt"),
)
async def create(request: Request) -> Response:
    """OpenAI's completions; docs/http.md says which parameters are taken."""
    gateway = gateway_of(request)
    asked = _read(await read_object(request, gateway.settings.max_body))
    tasks = [_task(asked, at, prompt) for at, prompt in enumerate(asked.prompts)]
    known = await gateway.client.known(asked.asked.model)
    tasks = await _encoded(gateway, known.card, asked, tasks)
    _check_size(asked, tasks)
    tokenizer = await gateway.prompts.tokenizer(known.card) if asked.echo or asked.logprobs else None
    foreground = Foreground(gateway, tasks)
    with asked.asked.in_its_words():
        await foreground.submit()
    first = head("text_completion", "cmpl", foreground.ids[0], known)
    if asked.asked.tier_given:
        first["service_tier"] = asked.asked.service_tier
    writers = [_Writer(asked, asked.prompts[at // asked.n], tokenizer) for at in range(len(tasks) * asked.n)]
    if asked.asked.stream:
        chunks = Chunks(first, asked.asked.include_usage)
        return ChunkStream(_stream(foreground, chunks, asked, writers), foreground, gateway)
    try:
        done = await answered(request, gateway, lambda: whole(foreground.events(), len(tasks), asked.n))
    finally:
        await foreground.close()

    def answer() -> dict[str, Any]:
        choices = [
            writers[index].choice(index, output, done.prompts.get(index // asked.n, ()))
            for index, output in done.outputs.items()
        ]
        return first | {"choices": choices, "usage": usage_of(done.ends.values())}

    echoed = sum(len(task.prompt) for task in tasks) * asked.n if asked.echo else 0
    return await whole_answer(done.tokens + echoed, answer)


def _read(body: Mapping[str, Any]) -> _Completion:
    asked = read(body, own=OWN, renamed=RENAMED, required="prompt")
    n, best_of = asked.fields.get("n", 1), asked.fields.get("best_of")
    if asked.stream and best_of is not None and best_of != n:
        raise Problem(
            400,
            f"best_of is {shown(best_of)} and n is {shown(n)}: the best are known at the end only, and not streamed",
            code="invalid_value",
            param="best_of",
        )
    return _Completion(
        asked, _prompts(asked.own["prompt"]), flag(asked.own, "echo"), flag(asked.own, "add_special_tokens", True)
    )


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or many: text, token ids, or a list of either. What each of them may be, its task says."""
    many = isinstance(value, list) and bool(value) and all(isinstance(one, (str, list)) for one in value)
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


def _task(asked: _Completion, at: int, prompt: Prompt) -> Task:
    fields = {} if "max_tokens" in asked.asked.fields else {"max_tokens": MAX_TOKENS}
    if asked.echo and asked.logprobs:
        fields["prompt_logprobs"] = asked.asked.fields["logprobs"]
    return asked.words(at).task(prompt, **fields)


async def _encoded(gateway: Gateway, card: Mapping[str, Any], asked: _Completion, tasks: Sequence[Task]) -> list[Task]:
    """The tasks with token ids, checked against the model."""
    texts = {at: task.prompt for at, task in enumerate(tasks) if isinstance(task.prompt, str)}
    places = list(texts)
    try:
        found = await gateway.prompts.encode_all(card, list(texts.values()), special=asked.special)
    except InvalidPrompt as error:
        with asked.words(places[error.at]).in_its_words():
            raise
    ids = dict(zip(places, found, strict=True))
    return [_checked(card, asked, at, task, ids.get(at)) for at, task in enumerate(tasks)]


def _checked(card: Mapping[str, Any], asked: _Completion, at: int, task: Task, ids: tuple[int, ...] | None) -> Task:
    """`ids`: of its prompt, where that came as text."""
    if ids is not None:
        task = task.model_copy(update={"prompt": ids})
    with asked.words(at).in_its_words():
        if "max_tokens" not in asked.asked.fields:
            # Nobody asked for so many: a prompt that leaves less room gets what there is.
            room = max(1, int(card["context_length"]) - len(task.prompt))
            task = task.model_copy(update={"max_tokens": min(MAX_TOKENS, room)})
        task.check(card)
    return task


def _check_size(asked: _Completion, tasks: Sequence[Task]) -> None:
    """What one answer tells is bounded: all its prompts' tasks are small enough, and yet there may be many."""
    if not asked.logprobs:
        return
    tokens = sum((len(task.prompt) if asked.echo else 0) + (task.max_tokens or 0) for task in tasks) * asked.n
    wanted = tokens * (1 + int(asked.asked.fields["logprobs"]))
    if wanted > MAX_LOGPROBS:
        raise Problem(
            400,
            f"logprobs is {asked.asked.fields['logprobs']}: over all prompts and choices these are {wanted} log "
            f"probabilities; at most {MAX_LOGPROBS} are given in one answer; send fewer prompts, or lower the others",
            code="invalid_value",
            param="logprobs",
        )


class _Writer:
    """Makes one choice's text and logprobs, piece by piece; before the first, the prompt's where it is echoed."""

    def __init__(self, asked: _Completion, prompt: Prompt, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._echo = ""
        if asked.echo and tokenizer is not None:
            self._echo = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        self._echoing = asked.echo
        self._logprobs = CompletionLogprobs(tokenizer) if asked.logprobs and tokenizer is not None else None

    def choice(self, index: int, output: Output, prompt: Sequence[PromptPart]) -> dict[str, Any]:
        """What is new of the choice. `prompt`: all parts of it, once there is anything new."""
        echo = self._echo if self._echoing else ""
        logprobs = None
        if self._logprobs is not None:
            rows = [(token.token_id, token.text, token.logprobs) for token in output.tokens]
            before = self._prompt_rows(prompt) if self._echoing else ()
            logprobs = self._logprobs.of([*before, *rows])
        self._echoing = False
        return {"index": index, "text": echo + output.text, "logprobs": logprobs, "finish_reason": output.reason}

    def _prompt_rows(self, prompt: Sequence[PromptPart]) -> Iterator[tuple[int, str, Logprobs | None]]:
        """Each token with its piece of the echoed text. What a tokenizer leaves out of its text, the last token has."""
        assert self._tokenizer is not None
        detokenizer = self._tokenizer.new_detokenizer()
        tokens = [pair for part in prompt for pair in zip(part.token_ids, part.logprobs, strict=True)]
        at = 0
        for place, (token_id, logprobs) in enumerate(tokens, 1):
            end = len(self._echo) if place == len(tokens) else at + len(detokenizer.push(token_id))
            piece = self._echo[at:end]
            at += len(piece)
            yield token_id, piece, logprobs


async def _stream(
    foreground: Foreground, chunks: Chunks, asked: _Completion, writers: Sequence[_Writer]
) -> AsyncGenerator[bytes]:
    """A chunk for whatever is new of a choice; its last one has the reason that it ended."""
    ended: set[int] = set()
    ends: dict[int, End] = {}
    prompts: dict[int, list[PromptPart]] = {}
    async with aclosing(news(foreground.events(), asked.n)) as batches:
        async for batch in batches:
            ends |= batch.ends
            for number, parts in batch.prompts.items():
                prompts.setdefault(number, []).extend(parts)
            made = []
            for index, output in batch.outputs.items():
                if output.reason not in REASONS or index in ended:
                    output.reason = None
                else:
                    ended.add(index)
                choice = writers[index].choice(index, output, prompts.get(index // asked.n, ()))
                if choice["text"] or choice["finish_reason"] or (choice["logprobs"] and choice["logprobs"]["tokens"]):
                    made.append(choice)
            if made:
                yield chunks.of(*made)
    if asked.asked.include_usage:
        yield chunks.usage(ends.values())
    yield DONE
