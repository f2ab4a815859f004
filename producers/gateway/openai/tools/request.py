"""Reads `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from producers.errors import InvalidTask
from producers.gateway.openai.parameters import flag, refusal
from producers.gateway.openai.response_format import DESCRIBED, check_known, described

#: Most tools of a request, as with OpenAI.
MAX_TOOLS: Final = 128
_CHOICES: Final = ("none", "auto", "required")
#: The arguments of a function without parameters.
_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_FUNCTION: Final = ("name", "description", "parameters", "strict")
#: The parameters' JSON schemas.
OWN: Final[dict[str, Any]] = {
    "tools": {
        "type": "array",
        "maxItems": MAX_TOOLS,
        "items": {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        **DESCRIBED,
                        "parameters": {"type": "object"},
                    },
                },
            },
        },
    },
    "tool_choice": {"anyOf": [{"enum": list(_CHOICES)}, {"type": "object", "required": ["type", "function"]}]},
    "parallel_tool_calls": {"type": "boolean"},
}


@dataclass(frozen=True, slots=True)
class Function:
    """`place`: where it stands in the request. `parameters`: the JSON schema of its arguments. `strict`: whether that
    must be followed to the letter."""

    place: str
    name: str
    parameters: dict[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class Tools:
    """A request's tools. `shown`: as chat templates take them. `must`: whether the output has to be a call.

    `callable`: those that may be called. `many`: whether several calls may be made.
    """

    shown: list[dict[str, Any]]
    callable: list[Function]
    must: bool
    many: bool


def read_tools(values: Mapping[str, Any]) -> Tools | None:
    """The tools in a request's own parameters; None if none may be called. Raises Problem and InvalidTask."""
    many = flag(values, "parallel_tool_calls", True)
    tools = values.get("tools", [])
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise refusal("tools", tools, f"a list of at most {MAX_TOOLS} tools", code="invalid_type")
    functions = [_function(f"tools[{at}]", one) for at, one in enumerate(tools)]
    names = [one.name for one in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise refusal("tools", twice, "functions of different names")
    choice = values.get("tool_choice", "auto")
    named = _named(choice, names)
    if choice == "none" or (not functions and choice == "auto"):
        return None
    if not functions:
        raise refusal("tool_choice", choice, "none or auto, unless there are tools")
    chosen = [one for one in functions if named in (None, one.name)]
    return Tools(_shown(tools), chosen, choice != "auto", many and named is None)


def _function(parameter: str, tool: Any) -> Function:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise refusal(parameter, tool, 'an object with type "function" and function', code="invalid_type")
    parameter = f"{parameter}.function"
    check_known(parameter, function, _FUNCTION)
    name, strict = described(parameter, function)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise refusal(f"{parameter}.parameters", parameters, "a JSON schema, which is an object", code="invalid_type")
    if parameters and parameters.get("type", "object") != "object":
        raise refusal(f"{parameter}.parameters.type", parameters["type"], '"object"')
    return Function(parameter, name, {"type": "object", **parameters} if parameters else _NOTHING, strict)


def _named(choice: Any, names: Sequence[str]) -> str | None:
    """The function that `tool_choice` names; None if it names none."""
    if choice in _CHOICES:
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict):
        expected = f'{", ".join(_CHOICES)}, or an object with type "function" and function'
        raise refusal("tool_choice", choice, expected)
    if function.get("name") not in names:
        raise refusal("tool_choice", function.get("name"), f"one of the tools: {', '.join(names) or 'there are none'}")
    return str(function["name"])


def _shown(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools for a chat template, without what is null."""
    return [
        {"type": "function", "function": {k: v for k, v in tool["function"].items() if v is not None}} for tool in tools
    ]


def too_large(size: int, limit: int) -> InvalidTask:
    return InvalidTask(
        f"tools have {size} characters as a grammar; at most {limit} are taken: leave some out, or shorten their "
        "parameters",
        param="tools",
    )
