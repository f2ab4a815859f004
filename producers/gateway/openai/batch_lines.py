"""The endpoints without HTTP, for the lines of a batch: one line is one task.

url, body, card -> read_line -> Line: Task (the worker renders and tokenises it, unless it has tools), fields of its
                                record
final record, all events -> answer_line -> the body that the endpoint would have answered
                            answer_pooled, of models that generate nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from engine.text import Tokenizer
from producers.contract import model_fit
from producers.contract.record import Record
from producers.contract.stream import End, Event, rows_of
from producers.contract.task import Task
from producers.errors import InvalidTask, shown
from producers.gateway.http.errors import Problem, invalid_value
from producers.gateway.http.request_state import MAX_WARNING
from producers.gateway.openai.answer import OutputBatch, named
from producers.gateway.openai.chat import choices_of, read_chat
from producers.gateway.openai.chat import shape as chat_shape
from producers.gateway.openai.complete import Choice, Whole
from producers.gateway.openai.completions import MAX_TOKENS, read_completion
from producers.gateway.openai.completions import shape as completion_shape
from producers.gateway.openai.logprobs import COMPLETION, ChatLogprobs, CompletionLogprobs
from producers.gateway.openai.output_parser import OutputSyntax
from producers.gateway.openai.parameters import TextRequest, check_chats, naming, refused
from producers.gateway.openai.pooling import ENDPOINTS as POOLED
from producers.gateway.openai.pooling import PooledRows
from producers.gateway.openai.reasoning import Reasoning, ReasoningRequest
from producers.gateway.openai.responses.request import REFERENCE, ResponseRequest, read_response
from producers.gateway.openai.responses.view import body as response_body
from producers.gateway.openai.tools import Calling, Tools
from producers.gateway.text.forms import warnings_of
from producers.store.batches import ENDPOINTS

CHATS, COMPLETIONS, RESPONSES, *_ = ENDPOINTS
_OF_TOKENS: Final[dict[str, tuple[Any, ...]]] = {"truncate_prompt_tokens": (), "return_token_ids": (False,)}
#: The URLs that a line may have, beside those of POOLED -> parameters that need a caller who waits, or more than the
#: line's own task, with the values that ask for nothing.
URLS: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    CHATS: {
        "stream": (False,),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
        "chat_template_kwargs": ({},),
        "prompt_logprobs": (),
        **_OF_TOKENS,
    },
    COMPLETIONS: {
        "stream": (False,),
        "echo": (False,),
        "add_special_tokens": (True,),
        "prompt_logprobs": (),
        **_OF_TOKENS,
    },
    RESPONSES: {
        "stream": (False,),
        "background": (False,),
        "previous_response_id": (),
        "truncation": ("disabled",),
    },
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line's task, resolved. `more`: fields of its record beside the task's own. `template`: variables of the chat
    template that no worker has: with some, the messages are to be rendered before the task is queued."""

    task: Task
    more: Mapping[str, str | int]
    template: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Read:
    """A line's body, read. `response`, `tools`: None where it has none."""

    text_request: TextRequest
    task: Task
    response: ResponseRequest | None = None
    tools: Tools | None = None
    reasoning: ReasoningRequest | None = None


def read_line(
    url: str,
    body: Mapping[str, Any],
    card: Mapping[str, Any],
    now_ms: int,
    check_form: Callable[[Task], None],
    call: Callable[[Tools, Sequence[str]], Calling],
    reason: Callable[[ReasoningRequest], Reasoning | None] | None = None,
    **fields: Any,
) -> Line:
    """A line as it is to be queued.

    `url`: one of ENDPOINTS. `card`: of the body's model. `now_ms`: server time. `check_form`: as `Forms.check_now`; it
    may block. `call`: makes the model's way to call tools; it may block, too. `reason`: makes its way to reason; None:
    it does not. `fields`: the batch's, which go before the line's own. Raises Problem and InvalidTask, which name the
    parameter at fault.
    """
    if url in POOLED:
        return Line(_pooled(url, body, card, fields), {}, {})
    for name, nothing in URLS[url].items():
        if body.get(name) is not None and body[name] not in nothing:
            raise refused(name, body[name], nothing, "which a line of a batch cannot have")
    read = _READ[url](body, fields)
    task, response, calling = read.task, read.response, None
    with read.text_request.naming():
        if task.messages is not None:
            check_chats(card)
        task = task.resolved(card)
        reasoning = None if reason is None or read.reasoning is None else reason(read.reasoning)
        if read.tools is not None:
            calling = call(read.tools, () if reasoning is None else reasoning.marks)
            task = task.model_copy(update={"grammar": calling.grammar})
        reasoned = None
        if reasoning is not None:
            reasoned = reasoning.applied(task, read.text_request.names, calling=calling is not None)
            task = reasoned.task
    with naming(read.text_request.names if reasoned is None else reasoned.names):
        check_form(task)
    syntax = OutputSyntax.of(None if calling is None else calling.syntax, None if reasoned is None else reasoned.syntax)
    # A line cannot set other variables of the template than those.
    template = {} if reasoning is None else {**reasoning.variables}
    template |= {} if calling is None else calling.variables
    warnings = [*(() if calling is None else calling.warnings), *warnings_of(task)]
    warning = {"warning": "; ".join(warnings)[:MAX_WARNING]} if warnings else {}
    if response is not None:
        return Line(task, response.more(task, response.items, now_ms, syntax) | warning, template)
    return Line(task, {**({} if syntax is None else syntax.fields), **warning}, template)


def in_words_of(url: str, body: Mapping[str, Any], error: Problem | InvalidTask) -> Problem | InvalidTask:
    """An error of a line's task, in the words of its body, which `read_line` has taken."""
    try:
        with POOLED[url].naming() if url in POOLED else _READ[url](body, {}).text_request.naming():
            raise error
    except (Problem, InvalidTask) as renamed:
        return renamed


def answer_line(url: str, record: Record, events: Iterable[Event], tokenizer: Tokenizer | None = None) -> bytes:
    """The body of a line's answer as JSON. `tokenizer`: given where the task has log probabilities."""
    if url == RESPONSES:
        return response_body(record, events, None if tokenizer is None else ChatLogprobs(tokenizer))
    n = record.n
    if url == CHATS:
        scorer = None if tokenizer is None else ChatLogprobs(tokenizer)
        syntax = OutputSyntax.of_record(record.fields)
        whole = Whole(choices_of(n, scorer, syntax, record.id), n, chat_shape)
        first = _head("chat.completion", "chatcmpl", record)
    else:
        scorers = [None if tokenizer is None else CompletionLogprobs(tokenizer) for _ in range(n)]
        whole = Whole([Choice(each, COMPLETION) for each in scorers], n, partial(completion_shape, n, []))
        first = _head("text_completion", "cmpl", record)
    batch = OutputBatch()
    batch.take([(0, event) for event in events], n)
    whole.add(batch)
    return b"".join(whole.pieces(first))


def answer_pooled(
    url: str, body: Mapping[str, Any], record: Record, events: Sequence[Event], card: Mapping[str, Any]
) -> bytes:
    """The body of the answer to a line for one of POOLED, as JSON. `card`: of the line's model; without labels, they
    are numbers."""
    end = events[-1]
    if not isinstance(end, End) or end.result is None:
        raise Problem(500, "The task ended without a result.", code="failed")
    created = (record.time("created") or 0) // 1000
    rows = PooledRows(record.id, card, rows_of(end.result), end.usage["prompt_tokens"], created)
    return POOLED[url].answer(POOLED[url].fields(body), rows)


def _pooled(url: str, body: Mapping[str, Any], card: Mapping[str, Any], fields: Mapping[str, Any]) -> Task:
    endpoint = POOLED[url]
    task = endpoint.task(endpoint.fields(body), **fields)
    with endpoint.naming():
        task = task.resolved(card)
        model_fit.check_at_once(task, card)
    return task


def _head(kind: str, prefix: str, record: Record) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{record.id}",
        "object": kind,
        "created": (record.time("created") or 0) // 1000,
        "model": record.model,
        "system_fingerprint": named(record.fields.get("version", ""), record.fields.get("fingerprint")),
        "service_tier": record.tier,
    }


def _chat(body: Mapping[str, Any], fields: Mapping[str, Any]) -> _Read:
    read = read_chat(body, None)
    task = read.text_request.task(None, messages=read.messages, logprobs=read.logprobs, **fields)
    return _Read(read.text_request, task, tools=read.tools, reasoning=read.reasoning)


def _completion(body: Mapping[str, Any], fields: Mapping[str, Any]) -> _Read:
    read = read_completion(body, None)
    if len(read.prompts) > 1 or read.prompts[0] == "":
        raise invalid_value(
            "prompt", f"prompt is {shown(body['prompt'])}; in a batch, a line has one prompt, which is not empty"
        )
    defaults = {} if "max_tokens" in read.text_request.fields else {"max_tokens": MAX_TOKENS}
    return _Read(read.text_request, read.text_request.task(read.prompts[0], **defaults, **fields))


def _response(body: Mapping[str, Any], fields: Mapping[str, Any]) -> _Read:
    read = read_response(body, None)
    if any(item.role == REFERENCE for item in read.items):
        raise refused("input", REFERENCE, (), "which a line of a batch cannot have")
    text_request = replace(read.text_request, service_tier=fields.get("tier", read.text_request.service_tier))
    # Its answer is in the batch's files alone: nobody comes back for it by its id.
    read = replace(read, text_request=text_request, store=False)
    task = read.task(messages=read.messages(read.items), **fields)
    return _Read(read.text_request, task, read, read.tools, read.reasoning)


_READ: Final[dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], _Read]]] = {
    CHATS: _chat,
    COMPLETIONS: _completion,
    RESPONSES: _response,
}
