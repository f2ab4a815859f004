"""Reads a request's body: the task, what its record has to say of the response, and the items of its input.

input: text | messages of parts, calls and their outputs -> Item -> kept in the record
                                                                  -> messages of a template | item of the API
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from producers.contract.chat import (
    BETWEEN_PARTS,
    MAX_MESSAGES,
    check_arguments,
    read_arguments,
    read_string,
    too_many,
)
from producers.contract.chat import refused as invalid_item
from producers.contract.task import Task
from producers.errors import InvalidTask, shown
from producers.gateway.http.errors import invalid_value, unknown_parameter
from producers.gateway.openai.output_parser import OutputSyntax
from producers.gateway.openai.parameters import (
    KEPT_S,
    LEAST_TOP_P,
    SAME,
    Parameters,
    TextRequest,
    count,
    flag,
    refusal,
    refused,
)
from producers.gateway.openai.reasoning import BUDGET_PARAMETERS, EFFORTS, ReasoningRequest, read_reasoning
from producers.gateway.openai.response_format import FLAT, TEXT, formed
from producers.gateway.openai.tools import FLAT_TOOL_PARAMETERS, Tools, read_tools, with_tools
from producers.store.protocol import DEFAULT_TTL_S

#: Role -> the type of its text parts.
ROLES: Final = {"user": "input_text", "system": "input_text", "developer": "input_text", "assistant": "output_text"}
#: Fields of a message beside role, content and type; clients send them back as received, and none changes the prompt.
AS_RECEIVED: Final = ("id", "status", "phase")
#: The types of items that are no messages -> their members beside those of AS_RECEIVED.
CALL, CALL_OUTPUT, REASONING = "function_call", "function_call_output", "reasoning"
MEMBERS: Final = {
    CALL: ("call_id", "name", "arguments"),
    CALL_OUTPUT: ("call_id", "output"),
    REASONING: ("summary", "content", "encrypted_content"),
}
#: The beginning of the ids of reasoning.
THOUGHT: Final = "rs_"
#: The role of a call's output, as chat templates name it.
TOOL: Final = "tool"
#: An item that only names one of an earlier response's output; it has this role until that is found.
REFERENCE: Final = "item_reference"
_PART: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
}
_THOUGHT: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "reasoning_text"}, "text": {"type": "string"}},
}
_STRING: Final = {"type": "string"}
_CONTENT: Final = {"anyOf": [_STRING, {"type": "array", "minItems": 1, "items": _PART}]}

_OUTPUT: Final = {"anyOf": [_STRING, {"type": "array", "items": _PART}]}


def _item_schema(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": [*required],
        "properties": {**properties, **{name: {"type": ["string", "null"]} for name in AS_RECEIVED}},
        "additionalProperties": False,
    }


#: The JSON schema of `input`, for OpenAPI.
INPUT: Final[dict[str, Any]] = {
    "description": "text, which is a user's message, or a list of messages, calls and their outputs",
    "anyOf": [
        _STRING,
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    _item_schema(
                        ("role", "content"), type={"const": "message"}, role={"enum": list(ROLES)}, content=_CONTENT
                    ),
                    _item_schema(
                        ("type", *MEMBERS[CALL]), type={"const": CALL}, **dict.fromkeys(MEMBERS[CALL], _STRING)
                    ),
                    _item_schema(
                        ("type", *MEMBERS[CALL_OUTPUT]), type={"const": CALL_OUTPUT}, call_id=_STRING, output=_OUTPUT
                    ),
                    _item_schema(
                        ("type",),
                        type={"const": REASONING},
                        summary={"type": "array", "maxItems": 0},
                        content={"type": ["array", "null"], "items": _THOUGHT},
                        encrypted_content={"type": "null"},
                    ),
                    _item_schema(("type", "id"), type={"const": REFERENCE}) | {"description": "of an output's item"},
                ]
            },
        },
    ],
}
MAX_TOP_LOGPROBS: Final = 20
#: Most log probabilities of an output, alternatives included. Each reader of a stream collects them for its end.
MAX_LOGPROBS: Final = 1 << 17
#: The values of `include`. Only log probabilities exist here; the others add nothing.
LOGPROBS: Final = "message.output_text.logprobs"
INCLUDABLE: Final = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
#: Members of `reasoning` that ask for a summary of it, and the value that leaves it to the server, which makes none.
SUMMARIES: Final = ("summary", "generate_summary")
ANY_SUMMARY: Final = "auto"
TRUNCATIONS: Final = ("auto", "disabled")
PARAMETERS: Final = Parameters(
    endpoint_schemas={
        "input": INPUT,
        "instructions": {"type": "string"},
        "previous_response_id": {"type": "string"},
        "background": {"type": "boolean"},
        "store": {"type": "boolean"},
        "truncation": {"enum": list(TRUNCATIONS)},
        "include": {"type": "array", "items": {"enum": list(INCLUDABLE)}},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "text": {
            "type": "object",
            "properties": {"format": {"anyOf": [{"type": "null"}, FLAT]}, "verbosity": {"enum": [None, "medium"]}},
            "additionalProperties": False,
        },
        "reasoning": {
            "type": "object",
            "properties": {
                "effort": {"enum": [None, *EFFORTS]},
                **{name: {"enum": [None, ANY_SUMMARY]} for name in SUMMARIES},
            },
            "additionalProperties": False,
        },
        **BUDGET_PARAMETERS,
        **FLAT_TOOL_PARAMETERS,
    },
    renamed={"max_output_tokens": "max_tokens", "ttl": "ttl", "webhook": "webhook"},
    required="input",
    same=tuple(name for name in SAME if name != "n"),  # a response has one output
    not_offered={
        "max_tool_calls": (),
        "prompt": (),
        "conversation": (),
        "context_management": ([],),
        "moderation": (),
        "access_programs": (),
        "image": (),
        "cache_salt": (),
        "return_token_ids": (False,),
    },
    stream_options=("include_obfuscation",),
)
#: A task's field -> the name that a response has for it, where they differ.
NAMES: Final = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    **dict.fromkeys(("prompt", "prompt_ids", "messages"), "input"),
}
#: Texts that the response shows as they came.
SHOWN: Final = ("user", "safety_identifier", "prompt_cache_key", "previous_response_id")


@dataclass(frozen=True, slots=True)
class Item:
    """One message, call or output of a call, or reasoning. `texts`: a message's or reasoning's parts; a call's
    arguments; an output's text.

    `call_id`: given for a call and its output. `name`, `arguments`: a call's function, and what templates take.
    """

    id: str
    role: str
    texts: tuple[str, ...]
    call_id: str | None = None
    name: str | None = None
    arguments: Mapping[str, Any] | str = field(init=False, compare=False, repr=False, default="")

    def __post_init__(self) -> None:
        if self.name is not None:  # parsed once, since truncation makes the messages several times
            object.__setattr__(self, "arguments", read_arguments(self.text, "input"))

    @classmethod
    def new(cls, role: str, *texts: str, call_id: str | None = None, name: str | None = None) -> Self:
        message = "rs" if role == REASONING else "msg"
        prefix = message if call_id is None else "fc" if name is not None else "fco"
        return cls(f"{prefix}_{uuid.uuid4().hex}", role, texts, call_id, name)

    @classmethod
    def of(cls, kept: Sequence[Any]) -> Self:
        """The item that `kept` gave."""
        item_id, role, texts, *call = kept
        call_id, name = call or (None, None)
        if item_id.startswith(THOUGHT):
            role = REASONING
        return cls(item_id, TOOL if call and name is None else role, tuple(texts), call_id, name)

    @property
    def kept(self) -> list[Any]:
        """The item as its record has it, as JSON. A gateway of the release before takes an output for a user's
        message, and reasoning for an assistant's."""
        call = [] if self.call_id is None else [self.call_id, self.name]
        role = {TOOL: "user", REASONING: "assistant"}.get(self.role, self.role)
        return [self.id, role, list(self.texts), *call]

    @property
    def text(self) -> str:
        return BETWEEN_PARTS.join(self.texts)

    @property
    def message(self) -> dict[str, Any]:
        """The item as chat templates take it."""
        if self.name is not None:
            function = {"name": self.name, "arguments": self.arguments}
            return {
                "role": self.role,
                "content": None,
                "tool_calls": [{"id": self.call_id, "type": "function", "function": function}],
            }
        if self.role == REASONING:
            return {"role": "assistant", "content": "", "reasoning_content": self.text}
        return {"role": self.role, "content": self.text} | (
            {} if self.call_id is None else {"tool_call_id": self.call_id}
        )

    @property
    def view(self) -> dict[str, Any]:
        """The item as callers see it."""
        if self.name is not None:
            return call_view(self.id, "completed", self.call_id, self.name, self.text)
        if self.call_id is not None:
            head = {"id": self.id, "type": CALL_OUTPUT, "status": "completed"}
            return head | {"call_id": self.call_id, "output": self.text}
        if self.role == REASONING:
            thoughts = [{"type": "reasoning_text", "text": text} for text in self.texts]
            return {"id": self.id, "type": REASONING, "status": "completed", "summary": [], "content": thoughts}
        kind = ROLES[self.role]
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        content = [{"type": kind, "text": text, **more} for text in self.texts]
        return {"id": self.id, "type": "message", "role": self.role, "status": "completed", "content": content}


def call_view(item_id: str, status: str, call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    """A call as callers see it. Its arguments come last, so that they can be written in pieces."""
    return {"id": item_id, "type": CALL, "status": status, "call_id": call_id, "name": name, "arguments": arguments}


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The items as chat templates take them: calls belong to the assistant's message that they follow, and reasoning to
    the one before which it stands."""
    messages: list[dict[str, Any]] = []
    names: dict[str | None, str] = {}
    reasoning: dict[str, str] = {}
    for item in items:
        if item.role == REASONING:
            reasoning = {"reasoning_content": item.text}
            continue
        message = item.message
        if item.role == "assistant":
            message |= reasoning
        reasoning = {}
        if item.name is not None:
            names[item.call_id] = item.name
            if messages and messages[-1]["role"] == item.role and "reasoning_content" not in message:
                calls = messages[-1].setdefault("tool_calls", [])
                calls += message["tool_calls"]
                continue
        elif item.call_id in names:
            message["name"] = names[item.call_id]
        messages.append(message)
    return messages


def read_input(value: Any) -> list[Item]:
    """The items of `input`. Raises InvalidTask, which names the item and the field."""
    if isinstance(value, str):
        return [Item.new("user", read_string(value, "input"))]
    if not isinstance(value, list):
        raise invalid_item("input", value, "text or a list of messages", "invalid_type")
    if not value:
        raise InvalidTask("input is empty; give text, or at least one message", code="empty_array", param="input")
    if len(value) > MAX_MESSAGES:
        raise too_many(len(value), "input")
    arguments = [item.get("arguments") for item in value if isinstance(item, dict) and item.get("type") == CALL]
    check_arguments([text for text in arguments if isinstance(text, str)], "input")
    return [_item(item, f"input[{at}]") for at, item in enumerate(value)]


def _item(item: Any, parameter: str) -> Item:
    if not isinstance(item, dict):
        raise invalid_item(parameter, item, "a message with role and content", "invalid_type")
    kind = item.get("type") or "message"
    if kind == REFERENCE:
        return Item(read_string(item.get("id"), f"{parameter}.id"), REFERENCE, ())
    if not isinstance(kind, str) or (kind != "message" and kind not in MEMBERS):
        raise InvalidTask(
            f"{parameter}.type is {shown(kind)}, which is not offered here; give messages, {CALL} and {CALL_OUTPUT}",
            code="unsupported_parameter",
            param=f"{parameter}.type",
        )
    members = MEMBERS.get(kind, ("role", "content"))
    # A null member asks for nothing: clients send whole items back, with members of services that are not here.
    unknown = next((name for name in item if name not in ("type", *members, *AS_RECEIVED)), None)
    if unknown is not None and (kind == "message" or item[unknown] is not None):
        subject = "a message" if kind == "message" else f"a {kind}"
        raise InvalidTask(
            f"{parameter} has {shown(unknown)}; {subject} has {' and '.join(members)}",
            code="unknown_parameter",
            param=f"{parameter}.{unknown}",
        )
    if kind == "message":
        return _message(item, parameter)
    if kind == REASONING:
        return _reasoning(item, parameter)
    call_id = read_string(item.get("call_id"), f"{parameter}.call_id")
    if kind == CALL_OUTPUT:
        output = item.get("output")
        texts = [""] if output == [] else _content(output, f"{parameter}.output")  # a tool that gave nothing
        return Item.new(TOOL, *texts, call_id=call_id)
    name = read_string(item.get("name"), f"{parameter}.name")
    arguments = read_string(item.get("arguments"), f"{parameter}.arguments")
    return Item.new("assistant", arguments, call_id=call_id, name=name)


def _message(item: Mapping[str, Any], parameter: str) -> Item:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid_item(f"{parameter}.role", role, f"one of {', '.join(ROLES)}")
    return Item.new(role, *_content(item.get("content"), f"{parameter}.content"))


def _reasoning(item: Mapping[str, Any], parameter: str) -> Item:
    """Reasoning as an answer has it. Of another service's, a summary and what is encrypted are refused."""
    for name in ("summary", "encrypted_content"):
        if item.get(name):
            raise refused(f"{parameter}.{name}", item[name], ([],) if name == "summary" else ())
    content = item.get("content")
    if content is not None and not isinstance(content, list):
        raise invalid_item(f"{parameter}.content", content, "a list of reasoning_text parts", "invalid_type")
    texts = []
    for at, part in enumerate(content or []):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "reasoning_text":
            raise invalid_item(f"{parameter}.content[{at}]", part, 'an object like {"type": "reasoning_text", ...}')
        texts.append(read_string(part.get("text"), f"{parameter}.content[{at}].text"))
    return Item.new(REASONING, *texts)


def _content(content: Any, parameter: str) -> list[str]:
    if isinstance(content, str):
        return [read_string(content, parameter)]
    if not isinstance(content, list) or not content:
        raise invalid_item(parameter, content, "text or a list of text parts", "invalid_type")
    return [_part(part, f"{parameter}[{at}]") for at, part in enumerate(content)]


def _part(part: Any, parameter: str) -> str:
    if not isinstance(part, dict):
        raise invalid_item(parameter, part, 'an object like {"type": "input_text", "text": "..."}', "invalid_type")
    if part.get("type") not in ("input_text", "output_text"):
        raise invalid_item(
            f"{parameter}.type",
            part.get("type"),
            '"input_text" or "output_text": no other kind of content is offered here',
        )
    return read_string(part.get("text"), f"{parameter}.text")


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A checked request. `items`: of its `input` alone. `shown`: fields of the response that are known already.
    `tools`: those that may be called."""

    text_request: TextRequest
    items: list[Item]
    instructions: str | None
    previous: str | None
    background: bool
    store: bool
    truncate: bool
    shown: dict[str, Any]
    tools: Tools | None
    reasoning: ReasoningRequest

    def task(self, **fields: Any) -> Task:
        """The task; its prompt is still to be set, unless it is given as `prompt` or `messages`. Raises InvalidTask."""
        prompt = fields.pop("prompt", None if "messages" in fields else [0])
        return self.text_request.task(prompt, **fields)

    def messages(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """The conversation as a chat template takes it. `items`: those before this request, and its own."""
        first = [] if self.instructions is None else [Item.new("system", self.instructions)]
        return messages_of([*first, *items])

    def more(
        self, task: Task, items: Sequence[Item], created_ms: int, syntax: OutputSyntax | None
    ) -> dict[str, str | int]:
        """The record's fields beside those of the task itself, which is resolved."""
        fields = {
            "created_at": created_ms // 1000,
            "model": task.model,
            "instructions": self.instructions,
            "background": self.background,
            "store": self.store,
            "service_tier": self.text_request.service_tier,
            "temperature": task.temperature,
            "top_p": 0.0 if task.top_p == LEAST_TOP_P else task.top_p,
            "metadata": task.metadata,
            **self.shown,
        }
        response = json.dumps({"fields": fields, "items": [item.kept for item in items]}, ensure_ascii=False)
        origin: dict[str, str | int] = {"origin": "response"} if self.background else {}
        return {"response": response, **({} if syntax is None else syntax.fields), **origin}


def read_response(body: Mapping[str, Any], tenant: str | None) -> ResponseRequest:
    """The request in a body. Raises Problem and InvalidTask."""
    text_request = PARAMETERS.read(body, tenant)
    values = text_request.endpoint_values
    background, store = flag(values, "background"), flag(values, "store", True)
    if background and not store:
        raise invalid_value(
            "store",
            "background is true and store is false: its caller comes back for a background response, so it is stored",
        )
    if text_request.fields.get("webhook") is not None and not background:
        raise invalid_value("webhook", "webhook is for background responses; leave it out, or ask for background: true")
    text_request.fields.setdefault("ttl", DEFAULT_TTL_S if store else KEPT_S)
    truncation = values.get("truncation", "disabled")
    if truncation not in TRUNCATIONS:
        raise refusal("truncation", truncation, " or ".join(TRUNCATIONS))
    top = count(values, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top or LOGPROBS in included(values.get("include", [])):
        text_request.fields["logprobs"] = top or 0
    text = _text(values)
    text_request = formed(text_request, "text.format", text["format"])
    tools = read_tools(values, flat=True, open_objects=text_request.fields.get("open_objects") is True)
    if tools is not None:
        text_request, tools = with_tools(text_request, tools)
    texts: dict[str, Any] = {name: _string(body, name) for name in SHOWN}
    return ResponseRequest(
        text_request=replace(text_request, names=text_request.names | NAMES),
        items=read_input(values["input"]),
        instructions=_string(values, "instructions"),
        previous=texts["previous_response_id"],
        background=background,
        store=store,
        truncate=truncation == "auto",
        shown=texts
        | {"max_output_tokens": body.get("max_output_tokens"), "truncation": truncation}
        | {"top_logprobs": top or 0, "text": text}
        | {"tools": [_tool_view(tool) for tool in values.get("tools", [])]}
        | {"tool_choice": values.get("tool_choice", "auto")}
        | {"parallel_tool_calls": values.get("parallel_tool_calls", True)}
        | {"reasoning": values.get("reasoning", {})},
        tools=tools,
        reasoning=_effort(values),
    )


def _effort(values: Mapping[str, Any]) -> ReasoningRequest:
    """The reasoning that the request asks for. Raises Problem."""
    reasoning = values.get("reasoning", {})
    if not isinstance(reasoning, dict):
        raise refusal("reasoning", reasoning, "an object with an effort", code="invalid_type")
    for name, value in reasoning.items():
        if name not in ("effort", *SUMMARIES):
            raise unknown_parameter(f"reasoning.{shown(name)[1:-1]}", "there is effort")
        if name in SUMMARIES and value not in (None, ANY_SUMMARY):
            why = "which is not offered here: the reasoning itself is answered"
            raise refused(f"reasoning.{name}", value, (ANY_SUMMARY,), why)
    return read_reasoning(values, reasoning.get("effort"), "reasoning.effort")


def _tool_view(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A checked tool as the response shows it."""
    return {"type": "function"} | {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}


def bounded(task: Task, card: Mapping[str, Any]) -> Task:
    """The task with at most MAX_LOGPROBS log probabilities. Raises Problem if it asks for more."""
    if task.logprobs is None:
        return task
    max_tokens = MAX_LOGPROBS // (task.logprobs + 1)
    if task.max_tokens is None:
        remaining = int(card["context_length"]) - len(task.prompt)
        return task.model_copy(update={"max_tokens": max(1, min(max_tokens, remaining))})
    if task.max_tokens > max_tokens:
        raise invalid_value(
            "top_logprobs",
            f"top_logprobs is {task.logprobs}: with it, max_output_tokens is at most {max_tokens}, not "
            f"{task.max_tokens}; "
            "lower one of them",
        )
    return task


def included(value: Any) -> list[str]:
    """The checked value of `include`. Raises Problem."""
    if not isinstance(value, list):
        raise refusal("include", value, "a list", code="invalid_type")
    for name in value:
        if name not in INCLUDABLE:
            raise refusal("include", name, f"a list of {', '.join(INCLUDABLE)}")
    return value


def _string(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise refusal(name, value, "a string", code="invalid_type")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refusal(name, value, f"valid Unicode: it has a lone surrogate at character {error.start}") from None
    return value


def _text(values: Mapping[str, Any]) -> dict[str, Any]:
    """The response's `text`; its format is checked elsewhere. Raises Problem."""
    value = values.get("text", {})
    if not isinstance(value, dict):
        raise refusal("text", value, "an object", code="invalid_type")
    usual: dict[str, Any] = {"format": TEXT, "verbosity": "medium"}
    for name, part in value.items():
        if name not in usual:
            raise unknown_parameter(f"text.{name}", f"there is {', '.join(usual)}")
        if name == "verbosity" and part not in (None, usual[name]):
            raise refused(f"text.{name}", part, (usual[name],))
    return usual | ({} if value.get("format") is None else {"format": value["format"]})
