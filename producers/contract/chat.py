"""Checks the messages of a chat and turns them into the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from engine.errors import ErrorText, FieldName
from producers.contract.json_parts import MAX_PARTS, SMALL, count_parts
from producers.errors import InvalidTask, shown

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
#: Roles whose messages may have no text: null, no parts, or no content.
TEXTLESS: Final = ("assistant", "tool")
#: Most messages of a request. A template walks through them several times.
MAX_MESSAGES: Final = 4096
#: Most characters of all tool calls' arguments that come as JSON text, of which a body has but one string each.
MAX_ARGUMENTS: Final = 1 << 20
#: Separator that joins a content's text parts.
BETWEEN_PARTS: Final = "\n"
#: Further fields of a message that templates may read.
PASSED_ON: Final = ("name", "tool_call_id", "reasoning_content")
#: Fields that an assistant's message has, empty, when clients send it back as received. Any other field, such as an id
#: or another service's `cache_control`, is ignored.
EMPTY_AS_RECEIVED: Final = ("refusal", "annotations", "audio", "function_call", "tool_calls")
_PART: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
#: The JSON schema of a message, for OpenAPI.
MESSAGE: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
        **{name: {"type": ["string", "null"]} for name in PASSED_ON},
    },
    "anyOf": [
        {"properties": {"role": {"enum": list(TEXTLESS)}}},
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"], "minItems": 1}}},
    ],
}


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Check messages. Returns dicts with `role`, `content` (a string) and the fields that templates may read.

    Raises InvalidTask, which names the message and the field.
    """
    if not isinstance(value, list):
        raise refused("messages", value, "a list of messages", "invalid_type")
    if not value:
        raise InvalidTask("messages is empty; give at least one message", code="empty_array", param="messages")
    if len(value) > MAX_MESSAGES:
        raise too_many(len(value))
    check_arguments(_argument_texts(value))
    return [_message(message, f"messages[{at}]") for at, message in enumerate(value)]


def _argument_texts(messages: list[Any]) -> list[str]:
    """The arguments of all tool calls that come as JSON text."""
    return [
        call["function"]["arguments"]
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        for call in message["tool_calls"]
        if isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("arguments"), str)
    ]


def check_arguments(texts: Sequence[str], param: str = "messages") -> None:
    """Raise InvalidTask for more of tool calls' arguments, as JSON text, than may be parsed."""
    if (size := sum(map(len, texts))) <= SMALL:
        return
    if size > MAX_ARGUMENTS:
        message = f"the arguments of tool calls have {size} characters; at most {MAX_ARGUMENTS} are taken"
        raise InvalidTask(message, param=param)
    parts = sum(count_parts(text.encode(errors="replace"), MAX_PARTS) for text in texts)
    if parts > MAX_PARTS:
        message = f"the arguments of tool calls have {parts} lists, objects and strings; at most {MAX_PARTS} are taken"
        raise InvalidTask(message, param=param, code="too_many_parts")


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise refused(path, message, "an object with role and content", "invalid_type")
    remaining = dict(message)
    role = remaining.pop("role", None)
    if role not in ROLES:
        raise refused(f"{path}.role", role, f"one of {', '.join(ROLES)}")
    calls = remaining.pop("tool_calls", None) or None
    content = remaining.pop("content", None)
    read: dict[str, Any] = {"role": role, "content": None}
    for name, part in remaining.items():
        # vLLM's newer name for reasoning_content, `reasoning`, is an object elsewhere.
        if (name in PASSED_ON and part is not None) or (name == "reasoning" and isinstance(part, str)):
            read[name] = read_string(part, f"{path}.{name}")
        elif name in EMPTY_AS_RECEIVED and part:
            raise InvalidTask(
                f"{path} has {name}, which is not offered here; a message has role, content, "
                f"{', '.join(PASSED_ON)}, tool_calls",
                code="unsupported_parameter",
                param=f"{path}.{name}",
            )
    # Checked last: an unsupported field, such as a refusal, explains a missing content better.
    if role in TEXTLESS and (content is None or content == []):
        read["content"] = None if calls else ""  # an answer, or a tool's output, without text, as clients send it
    else:
        read["content"] = _content(content, path)
    if calls is not None:
        if role != "assistant":
            raise refused(f"{path}.tool_calls", calls, "left out: only an assistant's message has them")
        read["tool_calls"] = _each(calls, f"{path}.tool_calls", _tool_call)
    return read


def _content(content: Any, path: str) -> str:
    name = f"{path}.content"
    if isinstance(content, list):
        return BETWEEN_PARTS.join(_each(content, name, _text_part))
    if not isinstance(content, str):
        raise refused(name, content, "a string or a list of text parts", "invalid_type")
    return read_string(content, name)


def _text_part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise refused(path, part, 'an object like {"type": "text", "text": "..."}', "invalid_type")
    if part.get("type") != "text":
        raise refused(f"{path}.type", part.get("type"), '"text": no other kind of content is offered here')
    return read_string(part.get("text"), f"{path}.text")


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """Check a tool call."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused(path, call, "an object with id, type and function (name, arguments)", "invalid_type")
    name = read_string(function["name"], f"{path}.function.name")
    arguments = read_arguments(function.get("arguments"), f"{path}.function.arguments")
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_arguments(value: Any, path: str) -> Mapping[str, Any] | str:
    """A call's arguments for templates: the object of OpenAI's JSON text. Text that holds no object, such as that of a
    call which `max_tokens` cut, stays text: agents send their history as it is.

    Raises InvalidTask for text that UTF-8 cannot hold.
    """
    if isinstance(value, Mapping):
        return value
    if not value:  # of a call without arguments, clients may send nothing
        return {}
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, Mapping) else read_string(text, path)


def _each(parts: Any, path: str, read: Callable[[Any, str], Any]) -> list[Any]:
    if not isinstance(parts, list) or not parts:
        raise refused(path, parts, "a list, not empty", "invalid_type")
    return [read(part, f"{path}[{at}]") for at, part in enumerate(parts)]


def read_string(value: Any, path: str) -> str:
    """A string that UTF-8 can hold. Raises InvalidTask, which names the place."""
    if not isinstance(value, str):
        raise refused(path, value, "a string", "invalid_type")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refused(path, value, f"valid Unicode: it has a lone surrogate at character {error.start}") from None
    return value


def too_many(count: int, param: str = "messages") -> InvalidTask:
    """The error for more messages than a request may have."""
    text = ErrorText.of("{} has {} messages; at most {} are taken", FieldName(param), count, MAX_MESSAGES)
    return InvalidTask(text, code="array_above_max_length", param=param)


def refused(path: str, value: Any, expected: str, code: str = "invalid_value") -> InvalidTask:
    """The error for a value within messages or items. `expected` completes "it must be ..."."""
    return InvalidTask(f"{path} is {shown(value)}; it must be {expected}", code=code, param=path)
