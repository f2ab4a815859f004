"""Reads a request's body: the chat that chat completions would make of it, with errors that name Anthropic's fields.

system, messages: turns of blocks -> messages of a template: text, calls, a message for each tool's result
tools, tool_choice -> Tools | thinking -> ReasoningRequest | a last turn of the assistant -> the text that goes on
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from producers.contract.chat import BETWEEN_PARTS, MAX_MESSAGES, read_string, too_many
from producers.contract.chat import refused as invalid_part
from producers.errors import InvalidTask, shown
from producers.gateway.http.errors import Problem, check_given, invalid_value, unknown_parameter
from producers.gateway.openai.chat import ChatRequest
from producers.gateway.openai.parameters import (
    BEAMS,
    OTHER_NAMES,
    SAME,
    Parameters,
    TextRequest,
    count,
    flag,
    refusal,
    refused,
)
from producers.gateway.openai.reasoning import MAX_BUDGET, ReasoningRequest
from producers.gateway.openai.tools import MAX_TOOLS, NAMED, Tools, tools_of, with_tools

ROLES: Final = ("user", "assistant", "system")
#: Types of blocks that a turn of a role may have.
USER_BLOCKS: Final = ("text", "tool_result")
ASSISTANT_BLOCKS: Final = ("text", "tool_use", "thinking", "redacted_thinking")
#: The types of `thinking` and of `tool_choice`.
THINKING: Final = ("enabled", "disabled", "adaptive")
CHOICES: Final = ("auto", "any", "tool", "none")
#: Anthropic's name of an effort -> that of chat completions.
EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
#: Most characters of a tool's name.
MAX_NAME: Final = 128
#: Prefix of a tool's result that tells of an error: templates have no field for that.
ERROR: Final = "Error: "
#: Sampling parameters that say how many outputs there are, and how they are searched: a message has one. And those that
#: Anthropic names otherwise.
_LEFT_OUT: Final = ("n", "best_of", "beam_width", "length_penalty", "early_stopping", "stop", "include_stop")
#: Members of a tool, beside its function's, that change nothing here.
_TOOL_HINTS: Final = ("type", "cache_control", "defer_loading", "eager_input_streaming", "input_examples")

_STRING: Final = {"type": "string"}
_OBJECT: Final = {"type": "object"}
_BLOCKS: Final = {
    "anyOf": [
        _STRING,
        {"type": "array", "items": {"type": "object", "required": ["type"], "properties": {"type": _STRING}}},
    ]
}
PARAMETERS: Final = Parameters(
    endpoint_schemas={
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"enum": list(ROLES)}, "content": _BLOCKS},
            },
        },
        "system": _BLOCKS,
        "tools": {
            "type": "array",
            "maxItems": MAX_TOOLS,
            "items": {
                "type": "object",
                "required": ["name", "input_schema"],
                "properties": {"name": {"type": "string", "maxLength": MAX_NAME}, "input_schema": _OBJECT},
            },
        },
        "tool_choice": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": list(CHOICES)},
                "name": _STRING,
                "disable_parallel_tool_use": {"type": "boolean"},
            },
            "additionalProperties": False,
        },
        "thinking": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": list(THINKING)},
                "budget_tokens": {"type": "integer", "minimum": 1, "maximum": MAX_BUDGET},
                "display": {"enum": ["summarized", "omitted"]},
            },
            "additionalProperties": False,
        },
        "output_config": {
            "type": "object",
            "properties": {
                "effort": {"enum": list(EFFORTS)},
                "format": {
                    "type": "object",
                    "required": ["type", "schema"],
                    "properties": {"type": {"const": "json_schema"}, "schema": _OBJECT},
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
        "cache_control": {"type": "object", "description": "taken, and not used: prompts are cached by themselves"},
        "context_management": {"type": "object", "description": "taken, and not used: nothing is edited"},
    },
    renamed={"max_tokens": "max_tokens", "stop_sequences": "stop"},
    required="messages",
    same=tuple(name for name in SAME if name not in _LEFT_OUT),
    not_offered={
        "container": (),
        "mcp_servers": ([],),
        "inference_geo": ("global",),
        "speed": ("standard",),
        "diagnostics": ({},),
        "stream_options": ({},),
    },
    stream_options=(),
    page="docs/use/anthropic.md",
    hints={
        "stop": "here it is stop_sequences",
        "response_format": "here it is output_config.format",
        "reasoning_effort": "here it is output_config.effort, with thinking of the type adaptive",
        **dict.fromkeys(("enable_thinking", "think", "reasoning"), "here it is thinking"),
    },
)


def openapi(*required: str) -> dict[str, Any]:
    """OpenAPI's part of an endpoint. `required`: what it needs beside model and messages."""
    part = PARAMETERS.openapi()
    schema = part["requestBody"]["content"]["application/json"]["schema"]
    for name in (BEAMS, "stream_options", *(name for name, ours in OTHER_NAMES.items() if ours in _LEFT_OUT)):
        del schema["properties"][name]
    schema["required"] = [*schema["required"], *required]
    return part


def read_message(body: Mapping[str, Any], tenant: str | None, *, counting: bool = False) -> ChatRequest:
    """The chat that a body asks for. `counting`: only its tokens are to be counted. Raises Problem and InvalidTask."""
    if body.get("thread") is not None:  # tool runners send it, and know by the code to go on without
        raise Problem(
            400,
            "thread is given, and conversations are not kept here; leave it out, and send all turns as messages",
            code="thread_unsupported_request",
            param="thread",
        )
    text_request = PARAMETERS.read(_neutral(body), tenant)
    values = text_request.endpoint_values
    if not counting:
        check_given(text_request.fields, "max_tokens")
    fields = dict(text_request.fields)
    if fields.get("include_stop"):
        raise refused(text_request.names["include_stop"], fields["include_stop"], (False,))
    if "beam_width" in fields:
        raise refused(BEAMS, True, (False,))
    if fields.get("stop"):
        fields["include_stop"] = True  # so that the answer can tell which one it was
    text_request = replace(text_request, fields=fields)
    config = _object(values, "output_config", ("effort", "format"))
    text_request = _formed(text_request, config.get("format"))
    tools = _tools(values, open_objects=fields.get("open_objects") is True)
    if tools is not None:
        text_request, tools = with_tools(text_request, tools)
    thinking = _object(values, "thinking", ("type", "budget_tokens", "display"))
    reasoning = _reasoning(thinking, config.get("effort"), grammar="grammar" in fields)
    conversation = _Conversation()
    conversation.read_system(values.get("system"))
    conversation.read(values["messages"])
    begun = conversation.finish()
    if begun is not None and thinking.get("type") == "enabled":
        raise invalid_value(
            "thinking",
            "thinking is enabled, and the last message is the assistant's, which the answer goes on with; leave one "
            "out",
        )
    return ChatRequest(
        text_request=text_request,
        messages=conversation.messages,
        variables={},
        template={"add_generation_prompt": begun is None, "continue_final_message": begun is not None},
        logprobs=None,
        tools=tools,
        reasoning=reasoning,
        token_ids=False,
        truncation=None,
        begun=begun,
        cut=True,
    )


def stops_of(chat: ChatRequest) -> tuple[str, ...]:
    """The stop sequences of a chat that was read here."""
    stops = chat.text_request.fields.get("stop") or ()
    return (stops,) if isinstance(stops, str) else tuple(stops)


def _neutral(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with OpenAI's name of a tier, and without null members of its metadata."""
    values = dict(body)
    if values.get("service_tier") == "standard_only":
        values["service_tier"] = "default"
    if isinstance(metadata := values.get("metadata"), dict):
        values["metadata"] = {name: value for name, value in metadata.items() if value is not None}
    return values


def _object(values: Mapping[str, Any], name: str, members: Sequence[str]) -> dict[str, Any]:
    """The members of an object that are not null; none if it is not given. Raises Problem."""
    value = values.get(name, {})
    if not isinstance(value, dict):
        raise refusal(name, value, "an object", code="invalid_type")
    value = {member: part for member, part in value.items() if part is not None}
    for member in value:
        if member not in members:
            raise unknown_parameter(f"{name}.{shown(member)[1:-1]}", f"there is {', '.join(members)}")
    return value


def _formed(text_request: TextRequest, written: Any) -> TextRequest:
    """The request with the schema that `output_config.format` has. Raises Problem."""
    if written is None:
        return text_request
    name = "output_config.format"
    members = _object({name: written}, name, ("type", "schema"))
    if members.get("type") != "json_schema":
        raise refusal(f"{name}.type", members.get("type"), "json_schema")
    schema = members.get("schema")
    if not isinstance(schema, dict):
        raise refusal(f"{name}.schema", schema, "a JSON schema, which is an object", code="invalid_type")
    if "json_schema" in text_request.fields:
        raise invalid_value(name, f"{name} and json_schema mean the same; give one of them")
    return replace(
        text_request,
        fields=text_request.fields | {"json_schema": schema},
        names=text_request.names | {"json_schema": f"{name}.schema"},
    )


def _reasoning(thinking: Mapping[str, Any], effort: Any, *, grammar: bool) -> ReasoningRequest:
    """The reasoning that `thinking` asks for: without it there is none, as far as the model can be told. `grammar`:
    whether the whole output has a grammar. Raises Problem."""
    if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
        raise refusal("output_config.effort", effort, f"one of {', '.join(EFFORTS)}")
    if not thinking:
        return ReasoningRequest(budget=None if grammar else 0, include=False, firm=False)
    kind, display = thinking.get("type"), thinking.get("display", "summarized")
    if kind not in THINKING:
        raise refusal("thinking.type", kind, f"one of {', '.join(THINKING)}")
    if display not in ("summarized", "omitted"):
        raise refusal("thinking.display", display, "summarized or omitted")
    budget = count(
        {f"thinking.{name}": part for name, part in thinking.items()}, "thinking.budget_tokens", 1, MAX_BUDGET
    )
    if (kind == "enabled") != (budget is not None):
        expected = "missing: thinking is enabled" if budget is None else "for thinking that is enabled; leave it out"
        raise invalid_value("thinking.budget_tokens", f"thinking.budget_tokens is {expected}")
    if kind == "disabled":
        return ReasoningRequest(effort="none", include=False, effort_name="thinking")
    return ReasoningRequest(
        effort=None if effort is None else EFFORTS[effort],
        budget=budget,
        include=display == "summarized",
        parameter="thinking" if kind == "enabled" else None,
        effort_name="output_config.effort",
    )


def _tools(values: Mapping[str, Any], *, open_objects: bool) -> Tools | None:
    """The tools that may be called. Raises Problem and InvalidTask."""
    tools = values.get("tools", [])
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise refusal("tools", tools, f"a list of at most {MAX_TOOLS} tools", code="invalid_type")
    written = [(f"tools[{at}]", _tool(tool, f"tools[{at}]")) for at, tool in enumerate(tools)]
    choice = _object(values, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    kind, name = choice.get("type", "auto"), choice.get("name")
    if kind not in CHOICES:
        raise refusal("tool_choice.type", kind, f"one of {', '.join(CHOICES)}")
    single = "disable_parallel_tool_use"

    def chosen(names: Sequence[str]) -> tuple[str, Sequence[str]]:
        if kind != "tool":
            return "required" if kind == "any" else kind, names
        if name not in names:
            raise refusal("tool_choice.name", name, f"one of the tools: {', '.join(names) or 'there are none'}")
        return NAMED, [str(name)]

    return tools_of(
        written,
        choice,
        chosen,
        many=not flag({f"tool_choice.{single}": choice.get(single, False)}, f"tool_choice.{single}"),
        open_objects=open_objects,
        schema="input_schema",
        longest=MAX_NAME,
    )


def _tool(tool: Any, path: str) -> dict[str, Any]:
    """A tool's function as chat completions write it. Raises Problem."""
    if not isinstance(tool, dict):
        raise refusal(path, tool, "an object with name and input_schema", code="invalid_type")
    if tool.get("type") not in (None, "custom"):
        raise refused(f"{path}.type", tool["type"], ("custom",))
    tool = {name: part for name, part in tool.items() if part is not None and name not in _TOOL_HINTS}
    callers = tool.pop("allowed_callers", ["direct"])
    if not isinstance(callers, list) or "direct" not in callers:
        raise refused(f"{path}.allowed_callers", callers, (["direct"],))
    members = ("name", "description", "input_schema", "strict")
    for name in tool:
        if name not in members:
            raise unknown_parameter(f"{path}.{shown(name)[1:-1]}", f"there is {', '.join(members)}")
    if "input_schema" not in tool:
        check_given({}, f"{path}.input_schema")
    return {"parameters" if name == "input_schema" else name: part for name, part in tool.items()}


class _Conversation:
    """The messages of a template, from turns of blocks. Turns of one role that follow each other become one message,
    whose texts are lists until `finish`."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        #: The calls of the assistant's last turns that have no result yet: id -> the tool's name; and where they are.
        self._open: dict[str, str] = {}
        self._path = "messages"
        #: Ids of all calls of these turns.
        self._called: set[str] = set()
        self._role: str | None = None
        self._begins = True
        """Whether the user's first turn is still to come."""

    def read_system(self, system: Any) -> None:
        """Raises InvalidTask."""
        if system is not None and (text := _text_of(system, "system")):
            self.messages.append({"role": "system", "content": [text]})

    def read(self, turns: Any) -> None:
        """Raises InvalidTask, which names the turn and the field."""
        if not isinstance(turns, list):
            raise invalid_part("messages", turns, "a list of messages", "invalid_type")
        if not turns:
            raise InvalidTask("messages is empty; give at least one message", code="empty_array", param="messages")
        if len(turns) > MAX_MESSAGES:
            raise too_many(len(turns))
        for at, turn in enumerate(turns):
            self._turn(turn, f"messages[{at}]")
        self._check_results()
        if len(self.messages) > MAX_MESSAGES:
            raise too_many(len(self.messages))

    def finish(self) -> str | None:
        """Join the messages' texts. Returns that of a last turn of the assistant, with which the answer goes on; None
        if there is none, or it has no text. Raises InvalidTask for a turn that cannot go on."""
        for message in self.messages:
            message["content"] = BETWEEN_PARTS.join(message["content"]) or (None if "tool_calls" in message else "")
            if "reasoning_content" in message:
                message["reasoning_content"] = BETWEEN_PARTS.join(message["reasoning_content"])
        if self._role != "assistant":
            return None
        if "reasoning_content" in self.messages[-1]:
            raise InvalidTask(
                "messages ends with the assistant's turn, with which the answer goes on; such a turn may have text "
                "alone, and this one has thinking",
                code="unsupported_parameter",
                param="messages",
            )
        if not self.messages[-1]["content"]:
            self.messages.pop()
            return None
        return str(self.messages[-1]["content"])

    def _turn(self, turn: Any, path: str) -> None:
        if not isinstance(turn, dict):
            raise invalid_part(path, turn, "an object with role and content", "invalid_type")
        role, content = turn.get("role"), turn.get("content")
        if role not in ROLES:
            raise invalid_part(f"{path}.role", role, f"one of {', '.join(ROLES)}")
        if role == "system":
            self.messages.append({"role": role, "content": [_text_of(content, f"{path}.content")]})
        elif role == "user":
            self._user(content, f"{path}.content")
        elif self._begins:
            raise invalid_part(f"{path}.role", role, "user: a conversation begins with the user's turn")
        else:
            self._assistant(content, f"{path}.content")
        self._role = role

    def _user(self, content: Any, path: str) -> None:
        self._begins = False
        texts = []
        for place, kind, block in _blocks(content, path, USER_BLOCKS, least=1):
            if kind == "text":
                texts.append(read_string(block.get("text"), f"{place}.text"))
            else:
                self._result(block, place)
        if texts:
            self._check_results()
            self._message("user")["content"] += filter(None, texts)

    def _result(self, block: Mapping[str, Any], path: str) -> None:
        """A tool's result, which answers a call of the turn before."""
        call, failed = block.get("tool_use_id"), block.get("is_error")
        name = self._open.pop(call, None) if isinstance(call, str) else None
        if name is None:
            expected = "the id of a tool_use in the assistant's turn before that has no other result"
            raise invalid_part(f"{path}.tool_use_id", call, expected)
        if failed is not None and not isinstance(failed, bool):
            raise invalid_part(f"{path}.is_error", failed, "true or false", "invalid_type")
        content = block.get("content")
        text = "" if content is None else _text_of(content, f"{path}.content")
        text = f"{ERROR}{text}" if failed else text
        self.messages.append({"role": "tool", "tool_call_id": call, "name": name, "content": [text]})

    def _assistant(self, content: Any, path: str) -> None:
        if self._role != "assistant":
            self._check_results()
            self._called.clear()
        message = self._message("assistant")
        for place, kind, block in _blocks(content, path, ASSISTANT_BLOCKS):
            if kind == "text":
                message["content"] += filter(None, [read_string(block.get("text"), f"{place}.text")])
            elif kind == "tool_use":
                message.setdefault("tool_calls", []).append(self._call(block, place))
            elif kind == "thinking" and (thought := read_string(block.get("thinking"), f"{place}.thinking")):
                message.setdefault("reasoning_content", []).append(thought)

    def _call(self, block: Mapping[str, Any], path: str) -> dict[str, Any]:
        call, name = read_string(block.get("id"), f"{path}.id"), read_string(block.get("name"), f"{path}.name")
        arguments = block.get("input", {})
        if not isinstance(arguments, dict):
            raise invalid_part(f"{path}.input", arguments, "an object", "invalid_type")
        if call in self._called:
            raise invalid_part(f"{path}.id", call, "an id of its own")
        self._called.add(call)
        self._open[call], self._path = name, path
        return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _message(self, role: str) -> dict[str, Any]:
        """The last message, if it is of this role; else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        return self.messages[-1]

    def _check_results(self) -> None:
        """Raise InvalidTask where calls have no result."""
        if self._open:
            raise InvalidTask(
                f"{self._path}: the tool_use {shown(next(iter(self._open)))} has no tool_result in the user's turn "
                "after it; each one needs one",
                param=self._path,
            )


def _blocks(
    content: Any, path: str, kinds: Sequence[str], *, least: int = 0
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """A turn's blocks with their paths and types; a text is one block. `least`: the fewest. Raises InvalidTask."""
    if isinstance(content, str):
        yield path, "text", {"text": read_string(content, path)}
        return
    if not isinstance(content, list) or len(content) < least:
        raise invalid_part(path, content, "a string or a list of blocks", "invalid_type")
    for at, block in enumerate(content):
        place = f"{path}[{at}]"
        if not isinstance(block, dict):
            raise invalid_part(place, block, 'a block like {"type": "text", "text": "..."}', "invalid_type")
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            raise InvalidTask(
                f"{place}.type is {shown(kind)}, which is not offered here; there is {', '.join(kinds)}",
                code="unsupported_parameter",
                param=f"{place}.type",
            )
        yield place, kind, block


def _text_of(content: Any, path: str) -> str:
    """The text of a string or of blocks of text. Raises InvalidTask."""
    blocks = _blocks(content, path, ("text",))
    return BETWEEN_PARTS.join(read_string(block.get("text"), f"{place}.text") for place, _, block in blocks)
