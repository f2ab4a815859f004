"""Tools for chat templates that have none: as text of messages, in the form of Hermes and Qwen.

tools ─▶ system text: what may be called, and how │ calls ─▶ text of the assistant │ their outputs ─▶ text of a user
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

#: The variables by which a template has tools.
_NAMES: Final = re.compile(r"\b(tools|tool_calls)\b")
_LISTS: Final = re.compile(r"\btools\b")
_SYSTEM: Final = """You can call functions. Each line between <tools> and </tools> describes one of them as JSON:
{tools}

{how} Call functions only where they help; otherwise answer as usual."""
_HERMES: Final = """To call a function, write its name and its arguments as a JSON object between <tool_call> and \
</tool_call>:
<tool_call>
{"name": "<function-name>", "arguments": {"<parameter>": <value>}}
</tool_call>
What a function returns comes back between <tool_response> and </tool_response>."""
_OWN: Final = """To call a function, write its name and its arguments as a JSON object in this form:
{call}
Further calls follow in the same form."""
#: Roles of a first message that the system text may join.
_SYSTEM_ROLES: Final = ("system", "developer")


def has_tools(template: str) -> bool:
    """Whether a template's text has tools or calls of its own."""
    return _NAMES.search(template) is not None


def lists_tools(template: str) -> bool:
    """Whether a template's text lists the tools that may be called; another may have the calls of messages alone."""
    return _LISTS.search(template) is not None


def list_tools(tools: Sequence[Any]) -> str:
    """The list of tools that stands in a prompt."""
    return "\n".join(["<tools>", *(json.dumps(tool, ensure_ascii=False) for tool in tools), "</tools>"])


def spell_tools(messages: Sequence[Any], tools: Sequence[Any], role: str, call: str = "") -> list[Any]:
    """The messages with a text that says which tools may be called, and how. `role`: of the message that has it,
    `system` or `user`. A user's text begins with it; a system's ends with it, and is made if there is none. `call`: how
    the model writes one; "": as Hermes does."""
    text = _SYSTEM.format(tools=list_tools(tools), how=_OWN.format(call=call) if call else _HERMES)
    copy = list(messages)
    if role == "user":
        at = next((at for at, message in enumerate(copy) if _role_of(message) == "user"), None)
        if at is None:
            return [{"role": "user", "content": text}, *copy]
        copy[at] = _begun(copy[at], text)
        return copy
    if copy and _role_of(copy[0]) in _SYSTEM_ROLES:
        content = copy[0].get("content") or ""
        if isinstance(content, list):
            return [copy[0] | {"content": [*content, _part(text)]}, *copy[1:]]
        return [copy[0] | {"content": f"{content}\n\n{text}" if content else text}, *copy[1:]]
    return [{"role": "system", "content": text}, *copy]


def _begun(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A user's message that begins with a text."""
    content = message.get("content") or ""
    return {**message, "content": [_part(text), *content] if isinstance(content, list) else f"{text}\n\n{content}"}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def spell_calls(messages: Sequence[Any]) -> list[Any]:
    """The messages with calls as text of the assistant, and outputs of calls as text of a user, with which the user's
    message after them is joined."""
    spelled: list[Any] = []
    outputs: list[str] = []
    for message in messages:
        if _role_of(message) == "tool":
            output = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if outputs:
                spelled.pop()
            outputs.append(output)
            spelled.append({"role": "user", "content": "\n".join(outputs)})
            continue
        if outputs and _role_of(message) == "user":  # many templates refuse two users' messages in a row
            message = _begun(message, spelled.pop()["content"])
        outputs = []
        spelled.append(_with_calls_as_text(message))
    return spelled


def calls_with_text(messages: Sequence[Any]) -> list[Any] | None:
    """The messages with calls whose arguments are JSON text, for templates that take no objects; None if there are no
    objects."""
    if not any(isinstance(_arguments_of(call), Mapping) for message in messages for call in _calls_of(message)):
        return None
    return [_with_text_arguments(message) for message in messages]


def _with_text_arguments(message: Any) -> Any:
    calls = _calls_of(message)
    if not calls:
        return message
    texts = [
        {**call, "function": {**call["function"], "arguments": _arguments_text(_arguments_of(call))}} for call in calls
    ]
    return {**message, "tool_calls": texts}


def _arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def spell_broken_calls(messages: Sequence[Any]) -> list[Any] | None:
    """The messages with calls as text where their arguments are no object, for templates that take objects alone; None
    if there are no such calls."""
    broken = [any(isinstance(_arguments_of(call), str) for call in _calls_of(message)) for message in messages]
    if not any(broken):
        return None
    return [
        _with_calls_as_text(message) if spelled else message for message, spelled in zip(messages, broken, strict=True)
    ]


def _with_calls_as_text(message: Any) -> Any:
    calls = _calls_of(message)
    if not calls:
        return message
    texts = [f"<tool_call>\n{_call(call)}\n</tool_call>" for call in calls]
    content = message.get("content")
    remaining = {name: value for name, value in message.items() if name != "tool_calls"}
    return remaining | {"content": "\n".join([*([content] if content else []), *texts])}


def _call(call: Mapping[str, Any]) -> str:
    function, arguments = call["function"], _arguments_of(call)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {_arguments_text(arguments)}}}'


def _calls_of(message: Any) -> list[Mapping[str, Any]]:
    """A message's calls of functions, as far as they have the form of OpenAI's."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return []
    return [call for call in calls if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)]


def _arguments_of(call: Mapping[str, Any]) -> Any:
    return call["function"].get("arguments", {})


def _role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None
