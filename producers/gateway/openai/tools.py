"""Tools: functions that a model may call, in chat completions.

request: `tools`, `tool_choice`, `parallel_tool_calls`, checked ─▶ the format in which the model writes calls ─▶ grammar

A model's chat template says which format it has. The grammar says what an output with tools may be: text, calls, or
text and then calls, each of a function's schema.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from engine.grammar.source import SPACE
from engine.grammar.trial import STOPPED
from engine.params import MAX_GRAMMAR
from engine.text import RequestError, Tokenizer
from producers.errors import InvalidTask, shown
from producers.gateway.openai.parameters import flag, refusal
from producers.gateway.openai.response_format import DESCRIBED, check_known, described
from producers.gateway.text.forms import Judge

#: Most tools of a request, as with OpenAI.
MAX_TOOLS: Final = 128
_CHOICES: Final = ("none", "auto", "required")
#: The arguments of a function without parameters.
_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_FUNCTION: Final = ("name", "description", "parameters", "strict")
#: The parameters' JSON schemas.
TOOL_PARAMETERS: Final[dict[str, Any]] = {
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
#: Members of a schema that only describe it.
_ANNOTATIONS: Final = ("title", "description", "examples", "$comment")
#: Members that have schemas by names of the caller's own.
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a model may call. `path`: its parameter in the request, such as `tools[0].function`.
    `parameters`: the JSON schema of its arguments. `strict`: whether that must be followed to the letter."""

    path: str
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
    functions = [_function(f"tools[{at}]", tool) for at, tool in enumerate(tools)]
    names = [function.name for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise refusal("tools", twice, "functions of different names")
    choice = values.get("tool_choice", "auto")
    named = _named(choice, names)
    if choice == "none" or (not functions and choice == "auto"):
        return None
    if not functions:
        raise refusal("tool_choice", choice, "none or auto, unless there are tools")
    called = [function for function in functions if named in (None, function.name)]
    return Tools(_shown(tools), called, choice != "auto", many and named is None)


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


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The calls of an output: `begin`, `opening`, then calls, joined by `between`, then `closing`.

    A call is {"name": NAME, KEY: ARGUMENTS}, where KEY is `arguments`. Without `begin`, an output that begins with {
    is a call. Without `between`, an output has one call. `marks`: what a tokenizer may have as one token. `told_by`:
    what a template of this format has, all of them; `but`: and none of these. `id_prefix`, `id_digits`: of
    calls' ids.
    """

    begin: str
    opening: str
    arguments: str
    between: str | None
    closing: str
    marks: tuple[str, ...]
    told_by: tuple[str, ...]
    but: tuple[str, ...] = ()
    id_prefix: str = "call_"
    id_digits: int = 24

    def id_of(self, task_id: str, choice: int, call: int) -> str:
        """A call's id: a function of the task, so that it is the same however often it is read."""
        digest = hashlib.sha256(f"{task_id}:{choice}:{call}".encode()).hexdigest()
        return f"{self.id_prefix}{digest[: self.id_digits]}"


#: Qwen 2.5 and 3, Hermes, and many that follow them.
HERMES: Final = CallFormat(
    begin="<tool_call>",
    opening="\n",
    arguments="arguments",
    between="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
    marks=("<tool_call>", "</tool_call>"),
    told_by=("<tool_call>", "arguments"),
    but=("<function=", "<arg_key>"),
)

#: Mistral's instruct models up to the third version of its tokenizer, whose templates want ids of nine characters.
MISTRAL: Final = CallFormat(
    begin="[TOOL_CALLS]",
    opening=" [",
    arguments="arguments",
    between=", ",
    closing="]",
    marks=("[TOOL_CALLS]",),
    told_by=("[TOOL_CALLS] [",),
    id_prefix="",
    id_digits=9,
)

#: The same, as Nemo and others write it.
NEMO: Final = replace(MISTRAL, opening="[", told_by=("[TOOL_CALLS][",), but=("[TOOL_CALLS][ARGS]",))

#: Llama 3.1 to 3.3.
LLAMA: Final = CallFormat(
    begin="",
    opening="",
    arguments="parameters",
    between=None,
    closing="",
    marks=(),
    told_by=('"parameters": dictionary of argument name',),
)


def format_of(model: str, template: str) -> CallFormat:
    """The format that the text of a model's chat template speaks of. Raises InvalidTask if that is none of these."""
    for call_format in (HERMES, MISTRAL, NEMO, LLAMA):
        if all(mark in template for mark in call_format.told_by) and not any(
            mark in template for mark in call_format.but
        ):
            return call_format
    raise InvalidTask(
        f"the chat template of model {shown(model)} has no tools, or another way to call them than Hermes' and Qwen's "
        "(<tool_call>), Mistral's ([TOOL_CALLS]) and Llama 3's; leave tools out, or ask for a json_schema",
        param="tools",
        code="unsupported_model",
    )


@dataclass(frozen=True, slots=True)
class Calling:
    """A request's way to call tools."""

    format: CallFormat
    grammar: str
    begin: int | None
    """The token that begins calls; None if that is text."""
    must: bool
    """Whether the output has to be calls."""


def schemas(tools: Tools) -> list[tuple[str, str]]:
    """The forms of the functions' arguments that `make_calling` judges."""
    return [_form(function) for function in tools.callable]


def make_calling(tools: Tools, template: str, tokenizer: Tokenizer, style: CallFormat, judge: Judge) -> Calling:
    """Make the grammar; takes milliseconds. `template`: the chat template's text. `judge`: of forms. Raises InvalidTask
    for tools that cannot be followed."""
    added = tokenizer.added_tokens()
    single = {mark: added[mark].id for mark in style.marks if mark in added}
    # Tokens that are no text to llguidance, and that a model may write all the same, such as <think>.
    free = [token.id for text, token in added.items() if not token.special and text in template and text not in single]
    grammar = _grammar(tools, style, single, free, judge)
    if len(grammar) > MAX_GRAMMAR:
        raise too_large(len(grammar), MAX_GRAMMAR)
    return Calling(style, grammar, single.get(style.begin), tools.must)


def _grammar(tools: Tools, style: CallFormat, single: dict[str, int], free: Sequence[int], judge: Judge) -> str:
    """`single`: the marks that are one token. `free`: the tokens that may stand in text, beside plain ones."""
    repeated = f"({_literal(style.between, single)} function)*" if tools.many and style.between else ""
    calls = f"{_literal(style.opening, single)} function {repeated} {_literal(style.closing, single)}"
    functions = " | ".join(_call(style.arguments, function, judge) for function in tools.callable)
    rules = [f"function: {functions}"]
    begin = _literal(style.begin, single)
    if tools.must:
        return "\n".join([f"start: {begin} {calls}", *rules])
    if not begin:
        return "\n".join([f"start: PLAIN | {calls}", r"PLAIN: /[^{](.|\n)*/", *rules])
    before = "(TEXT added)* " if free else ""
    if free:
        rules.append(f"added: {' | '.join(f'<[{function}]>' for function in free)}")
    rules.append(r"TEXT: /(.|\n)*/")
    if style.begin in single:
        return "\n".join([f"start: {before}TEXT | {before}TEXT {begin} {calls}", *rules])
    return "\n".join([f"start: {before}TEXT | {before}begun {calls}", rf"begun[lazy]: /(.|\n)*/ {begin}", *rules])


def _call(key: str, function: Function, judge: Judge) -> str:
    """A call of a function. Each schema is a document of its own, in which its references hold."""
    head = json.dumps(f'{{"name": "{function.name}", "{key}": ')
    schema = json.dumps(_lean(_followed(function, judge)))
    return f'{head} %json {{{SPACE}, {schema[1:]} "}}"'


def _lean(schema: Any) -> Any:
    """Returns a schema without annotations, which a prompt has and a grammar has no use for."""
    if isinstance(schema, list):
        return [_lean(element) for element in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _part(name, value) for name, value in schema.items() if name not in _ANNOTATIONS}


def _part(name: str, value: Any) -> Any:
    if name in _BY_NAME and isinstance(value, dict):
        return {key: _lean(schema) for key, schema in value.items()}
    return value if name in ("enum", "const") else _lean(value)


def _followed(function: Function, judge: Judge) -> dict[str, object]:
    """The schema of a function's arguments; of one that is not strict, any object if the schema cannot be followed.

    Raises InvalidTask, also if it takes too long to find out.
    """
    try:
        judge(*_form(function))
    except RequestError as error:
        if not function.strict and error.code != STOPPED:
            return {"type": "object"}
        parameter = f"{function.path}.parameters"
        raise InvalidTask(str(error).replace("json_schema", parameter), param=parameter, code=error.code) from None
    return function.parameters


def _form(function: Function) -> tuple[str, str]:
    return "json_schema", json.dumps(function.parameters)


def _literal(text: str, single: dict[str, int]) -> str:
    """A text in a grammar; marks that are one token are named by it."""
    parts = re.split(f"({'|'.join(map(re.escape, single))})", text) if single else [text]
    return " ".join(f"<[{single[part]}]>" if part in single else json.dumps(part) for part in parts if part)
