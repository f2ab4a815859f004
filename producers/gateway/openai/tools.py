"""Tools: functions that a model may call, in chat completions and responses.

request: `tools`, `tool_choice`, `parallel_tool_calls`, checked ─▶ the format in which the model writes calls ─▶ grammar

A model's chat template says which format it has. The grammar says what an output with tools may be: an answer (text, or
JSON of a schema), calls, or text and then calls, each of a function's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from engine.errors import renamed
from engine.grammar.schema import Budget, bounded, rules_of
from engine.grammar.source import SPACE
from engine.grammar.trial import STOPPED
from engine.params import FORMS, MAX_GRAMMAR, MAX_SCHEMA
from engine.text import RequestError, Tokenizer, lists_tools
from producers.contract.fields import checked_form
from producers.errors import InvalidTask
from producers.gateway.context import Gateway
from producers.gateway.http.errors import invalid_value
from producers.gateway.http.request_state import Work
from producers.gateway.openai.call_formats import EXAMPLE, FORMATS, HERMES, CallFormat, CallSyntax, format_of
from producers.gateway.openai.parameters import TextRequest, check_chats, flag, refusal, refused
from producers.gateway.openai.response_format import DESCRIBED, MAX_NAME, check_known, described
from producers.gateway.text.forms import TO_THE_LETTER, Judge

#: Most tools of a request, as with OpenAI.
MAX_TOOLS: Final = 128
#: Most characters of their parameters without annotations. Some of that, such as keywords that cannot be followed, does
#: not get into the grammar, which has MAX_GRAMMAR at most.
MAX_LEAN: Final = 2 * MAX_GRAMMAR
#: The parameter that names the format in which the model writes calls.
_FORMAT: Final = "tool_call_format"
CHOICES: Final = ("none", "auto", "required")
#: The type of a choice that leaves some of the tools, and its modes.
_ALLOWED: Final = "allowed_tools"
_MODES: Final = ("auto", "required")
#: What a choice asks for that names a function.
NAMED: Final = "named"
#: The arguments of a function without parameters.
_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_FUNCTION: Final = ("name", "description", "parameters", "strict")
_PARAMETERS: Final[dict[str, Any]] = {**DESCRIBED, "parameters": {"type": "object"}}


def _schemas_of(required: list[str], tool: dict[str, Any], *, flat: bool) -> dict[str, Any]:
    """The parameters' JSON schemas. `required`, `tool`: the members of a tool, and of a choice that names one."""
    allowed: dict[str, Any] = {
        "required": ["mode", "tools"],
        "properties": {"mode": {"enum": list(_MODES)}, "tools": {"type": "array", "items": {"type": "object"}}},
    }
    if not flat:
        allowed = {"required": [_ALLOWED], "properties": {_ALLOWED: {"type": "object", **allowed}}}
    return {
        "tools": {
            "type": "array",
            "maxItems": MAX_TOOLS,
            "items": {
                "type": "object",
                "required": ["type", *required],
                "properties": {"type": {"const": "function"}, **tool},
            },
        },
        "tool_choice": {
            "anyOf": [
                {"enum": list(CHOICES)},
                {"type": "object", "required": ["type", *required], "properties": {"type": {"const": "function"}}},
                {
                    "type": "object",
                    "required": ["type", *allowed["required"]],
                    "properties": {"type": {"const": _ALLOWED}, **allowed["properties"]},
                },
            ]
        },
        "parallel_tool_calls": {"type": "boolean"},
        _FORMAT: {"enum": [call_format.name for call_format in FORMATS]},
    }


#: Those of chat completions, where a function is a member of its tool.
TOOL_PARAMETERS: Final = _schemas_of(
    ["function"], {"function": {"type": "object", "required": ["name"], "properties": _PARAMETERS}}, flat=False
)
#: Those of responses, where a tool has its function's members itself.
FLAT_TOOL_PARAMETERS: Final = _schemas_of(["name"], _PARAMETERS, flat=True)
#: Members of a flat tool that clients send, with the value that asks for nothing.
_NEUTRAL: Final = {"defer_loading": False, "async": False}
#: Members of a schema that only describe it.
_ANNOTATIONS: Final = ("title", "description", "default", "examples", "$schema", "$comment")
#: Members that have schemas by names of the caller's own.
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a model may call. `path`: that of its parameters in the request, such as
    `tools[0].function.parameters`. `parameters`: the JSON schema of its arguments; of one that may be called, a schema
    whose outputs end (`engine.grammar.schema`). `strict`: whether all of the caller's must be followed. `dropped`: the
    keywords of it that are not."""

    path: str
    name: str
    parameters: dict[str, Any]
    strict: bool
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tools:
    """A request's tools. `shown`: as chat templates take them. `must`: whether the output has to be a call. `format`:
    in which the caller says that the model writes calls; None: as its chat template says.

    `callable`: those that may be called. `many`: whether several calls may be made. `answer`: the JSON schema of an
    answer that is no call, if it has one. `budget`: what is left for bounding schemas.
    """

    shown: list[dict[str, Any]]
    callable: list[Function]
    must: bool
    many: bool
    answer: dict[str, Any] | None = None
    format: CallFormat | None = None
    budget: Budget = field(default_factory=Budget, compare=False)

    def format_in(self, template: str) -> CallFormat:
        """The format in which a model calls these tools. `template`: the text of its chat template."""
        return self._own_format(template) or HERMES

    def variables(self, template: str) -> dict[str, Any]:
        """The template's variables, beside messages. `template`: its text."""
        call_format = self._own_format(template)
        if call_format is not None and not lists_tools(template):
            return {"tools": self.shown, "tools_as_text": call_format.calls_of([("<function-name>", EXAMPLE)])}
        return {"tools": self.shown, "tools_as_text": call_format is None}

    def _own_format(self, template: str) -> CallFormat | None:
        """The format that a template's text speaks of. None: the model is told of Hermes' format in the messages,
        because the template has no tools, or none that are known here, or calls without a mark, which could not be told
        from an answer in JSON."""
        call_format = self.format or format_of(template)
        unmarked = call_format is not None and not call_format.begin and self.answer is not None and not self.must
        return None if unmarked else call_format


def read_tools(values: Mapping[str, Any], *, flat: bool = False, open_objects: bool = False) -> Tools | None:
    """The tools in a request's own parameters; None if none may be called. `flat`: they are written as in responses.
    `open_objects`: as of a task.

    Raises Problem and InvalidTask.
    """
    many = flag(values, "parallel_tool_calls", True)
    call_format = _format_named(values.get(_FORMAT))
    tools = values.get("tools", [])
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise refusal("tools", tools, f"a list of at most {MAX_TOOLS} tools", code="invalid_type")
    written = [_written(f"tools[{at}]", tool, flat) for at, tool in enumerate(tools)]
    choice = values.get("tool_choice", "auto")
    return tools_of(
        written,
        choice,
        lambda names: _chosen(choice, names, flat),
        many=many,
        call_format=call_format,
        open_objects=open_objects,
    )


def tools_of(
    written: Sequence[tuple[str, dict[str, Any]]],
    choice: Any,
    chosen: Callable[[Sequence[str]], tuple[str, Sequence[str]]],
    *,
    many: bool,
    call_format: CallFormat | None = None,
    open_objects: bool = False,
    schema: str = "parameters",
    longest: int = MAX_NAME,
) -> Tools | None:
    """The tools of functions as they are written, each with its path; None if none may be called.

    `choice`: the request's. `chosen`: reads from it the mode, one of CHOICES or NAMED, and the names of the functions
    that it leaves, given all. `schema`: the name of a function's parameters in the request. `longest`: the most
    characters of a name. Raises Problem and InvalidTask.
    """
    functions = [_read(parameter, function, schema, longest) for parameter, function in written]
    names = [function.name for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise refusal("tools", twice, "functions of different names")
    mode, allowed = chosen(names)
    if mode == "none" or (not functions and mode == "auto"):
        return None
    if not functions:
        raise refusal("tool_choice", choice, "none or auto, unless there are tools")
    called = [function for function in functions if function.name in allowed]
    _check_sizes(called)
    budget = Budget()
    called = [_bounded(function, open_objects, budget) for function in called]
    shown = [{"type": "function", "function": function} for _, function in written]
    return Tools(shown, called, mode != "auto", many and mode != NAMED, format=call_format, budget=budget)


def _format_named(name: Any) -> CallFormat | None:
    """The format that a request names. Raises Problem."""
    if name is None:
        return None
    named = next((call_format for call_format in FORMATS if call_format.name == name), None)
    if named is None:
        raise refusal(_FORMAT, name, f"one of {', '.join(call_format.name for call_format in FORMATS)}")
    return named


def _written(parameter: str, tool: Any, flat: bool) -> tuple[str, dict[str, Any]]:
    """A tool's function as it is written, without what is null, and its parameter. Raises Problem."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise refused(f"{parameter}.type", kind, ("function",))
    function = tool.get("function") if isinstance(tool, dict) and not flat else tool
    if kind is None or not isinstance(function, dict):
        members = "name" if flat else "function"
        raise refusal(parameter, tool, f'an object with type "function" and {members}', code="invalid_type")
    if flat:
        neutral = {"type": kind, **_NEUTRAL}
        function = {name: value for name, value in function.items() if name not in neutral or value != neutral[name]}
    else:
        parameter = f"{parameter}.function"
    function = {name: value for name, value in function.items() if value is not None}
    check_known(parameter, function, _FUNCTION)
    return parameter, function


def _read(parameter: str, function: Mapping[str, Any], schema: str, longest: int) -> Function:
    """A function with the caller's own parameters. Raises Problem and InvalidTask."""
    name, strict = described(parameter, function, longest)
    path, parameters = f"{parameter}.{schema}", function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise refusal(path, parameters, "a JSON schema, which is an object", code="invalid_type")
    if parameters and parameters.get("type", "object") != "object":
        raise refusal(f"{path}.type", parameters["type"], '"object"')
    return Function(path, name, {"type": "object", **parameters} if parameters else _NOTHING, strict, ())


def _check_sizes(functions: Sequence[Function]) -> None:
    """Raise InvalidTask for parameters that are too large, before anything takes longer than to write them down."""
    size = 0
    for function in functions:
        parameter = function.path
        try:
            whole = len(json.dumps(function.parameters, ensure_ascii=False))
            if whole > MAX_SCHEMA:
                message = f"{parameter} have {whole} characters as JSON; at most {MAX_SCHEMA} are taken"
                raise InvalidTask(message, param=parameter)
            size += len(json.dumps(_lean(function.parameters), separators=(",", ":"), ensure_ascii=False))
        except RecursionError:
            raise InvalidTask(f"{parameter} are nested too deeply", param=parameter) from None
        if size > MAX_LEAN:
            raise too_large(size, MAX_LEAN)


def _bounded(function: Function, open_objects: bool, budget: Budget) -> Function:
    bounded_schema = bounded(function.parameters, open_objects=open_objects, drop=not function.strict, budget=budget)
    return replace(function, parameters=bounded_schema.schema, dropped=bounded_schema.dropped)


def _chosen(choice: Any, names: Sequence[str], flat: bool) -> tuple[str, Sequence[str]]:
    """The mode of `tool_choice`, one of CHOICES or NAMED, and the functions that it leaves. Raises Problem."""
    if isinstance(choice, str) and choice in CHOICES:
        return choice, names
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == _ALLOWED:
        member, allowed = ("tool_choice", choice) if flat else (f"tool_choice.{_ALLOWED}", choice.get(_ALLOWED))
        if not isinstance(allowed, dict):
            raise refusal(member, allowed, "an object with mode and tools", code="invalid_type")
        mode, tools = allowed.get("mode"), allowed.get("tools")
        if mode not in _MODES:
            raise refusal(f"{member}.mode", mode, " or ".join(_MODES))
        if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
            raise refusal(f"{member}.tools", tools, f"a list of 1 to {MAX_TOOLS} tools", code="invalid_type")
        return mode, [_named(f"{member}.tools[{at}]", tool, names, flat) for at, tool in enumerate(tools)]
    if kind is None:
        function = f'an object with type "function" and {"name" if flat else "function"}'
        raise refusal("tool_choice", choice, f"{', '.join(CHOICES)}, or {function}")
    return NAMED, [_named("tool_choice", choice, names, flat, ("function", _ALLOWED))]


def _named(parameter: str, tool: Any, names: Sequence[str], flat: bool, types: Sequence[str] = ("function",)) -> str:
    """The function that a choice names. `types`: those that the choice may have. Raises Problem."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise refused(f"{parameter}.type", kind, types)
    function = tool.get("function") if isinstance(tool, dict) and not flat else tool
    if kind is None or not isinstance(function, dict):
        raise refusal(parameter, tool, f'an object with type "function" and {"name" if flat else "function"}')
    if function.get("name") not in names:
        raise refusal(parameter, function.get("name"), f"one of the tools: {', '.join(names) or 'there are none'}")
    return str(function["name"])


def with_tools(text_request: TextRequest, tools: Tools) -> tuple[TextRequest, Tools]:
    """The request, and its tools with the schema that it asks for: an output has one form. Raises Problem for a form
    beside tools that is no schema, and InvalidTask for a wrong or too large one."""
    if form := next((name for name in FORMS if name != "json_schema" and name in text_request.fields), None):
        parameter = text_request.names.get(form, form)
        raise invalid_value(parameter, f"tools and {parameter} are both given; an output has one form")
    fields = dict(text_request.fields)
    answer = fields.pop("json_schema", None)
    if answer is not None:
        with text_request.naming():
            answer = checked_form("json_schema", answer)
        answer = bounded(answer, open_objects=fields.get("open_objects") is True, budget=tools.budget).schema
    return replace(text_request, fields=fields, names=text_request.names | {"grammar": "tools"}), replace(
        tools, answer=answer
    )


def too_large(size: int, limit: int) -> InvalidTask:
    return InvalidTask(
        f"tools have {size} characters as a form of outputs; at most {limit} are taken: leave some out, or shorten "
        "their parameters",
        param="tools",
    )


@dataclass(frozen=True, slots=True)
class Calling:
    """A request's way to call tools."""

    syntax: CallSyntax
    grammar: str
    variables: Mapping[str, Any]
    """What the chat template is rendered with, beside messages."""
    warnings: tuple[str, ...] = ()
    """What of the functions' schemas the outputs do not follow."""


async def calling_of(
    gateway: Gateway, card: Mapping[str, Any], tools: Tools, work: Work, without: Sequence[str] = ()
) -> Calling:
    """The model's way to call the tools. `without`: see `make_calling`. Raises InvalidTask, and Problem if too many
    forms of the tenant wait."""
    check_chats(card)
    template = await gateway.templates.with_tools(card)
    tokenizer = await gateway.prompts.tokenizer(card)
    return await gateway.forms.run(
        work, schemas(tools), lambda judge: make_calling(tools, template, tokenizer, judge, without)
    )


async def variables_of(gateway: Gateway, card: Mapping[str, Any], tools: Tools | None) -> Mapping[str, Any]:
    """What a model's chat template is rendered with, beside messages, where nothing will be called. Raises as
    `calling_of`."""
    if tools is None:
        return {}
    check_chats(card)
    return tools.variables(await gateway.templates.with_tools(card))


def schemas(tools: Tools) -> list[tuple[str, str]]:
    """The forms that `make_calling` judges: of the functions' arguments, and of an answer."""
    answer = [] if tools.answer is None else [_form(tools.answer)]
    return [*(_form(function.parameters) for function in tools.callable), *answer]


def make_calling(
    tools: Tools, template: str, tokenizer: Tokenizer, judge: Judge, without: Sequence[str] = ()
) -> Calling:
    """Make the grammar; takes milliseconds. `template`: the chat template's text. `judge`: of forms. `without`: tokens,
    by their text, that have no place in it. Raises InvalidTask for tools that cannot be followed."""
    style = tools.format_in(template)
    if tools.answer is not None:
        _check_answer(tools.answer, judge)
    added = tokenizer.added_tokens()
    single = {mark: added[mark].id for mark in style.marks if mark in added}
    if style.answer and len(single) < len(style.marks):
        raise InvalidTask(
            f"the model's tokenizer lacks tokens of the tool calls' format {style.name}; name another one as "
            "tool_call_format",
            param="tools",
        )
    # Tokens that are no text to llguidance, and that a model may write all the same, such as <think>.
    reserved = {*single, *without}
    free = [
        token.id for text, token in added.items() if not token.special and text in template and text not in reserved
    ]
    warnings: list[str] = []
    if tools.answer is not None and rules_of(tools.answer) in (None, 0):
        warnings.append(f"the outputs' schema {TO_THE_LETTER}")
    arguments = [_followed(function, judge, warnings) for function in tools.callable]
    grammar = _grammar(tools, style, single, free, arguments)
    if len(grammar) > MAX_GRAMMAR:
        raise too_large(len(grammar), MAX_GRAMMAR)
    syntax = CallSyntax(style, single.get(style.begin), tools.must, tools.answer is not None)
    return Calling(syntax, grammar, tools.variables(template), tuple(warnings))


def _check_answer(answer: Mapping[str, Any], judge: Judge) -> None:
    """Raise InvalidTask for a schema of an answer that cannot be followed."""
    try:
        judge(*_form(answer))
    except RequestError as error:
        raise InvalidTask(error.message, param=error.param, code=error.code) from None


def _grammar(
    tools: Tools,
    style: CallFormat,
    single: dict[str, int],
    free: Sequence[int],
    arguments: Sequence[Mapping[str, Any]],
) -> str:
    """`single`: the marks that are one token. `free`: the tokens that may stand in text, beside plain ones.
    `arguments`: the schemas that the functions' arguments follow."""
    repeated = f"({_literal(style.between, single)} function)*" if tools.many and style.between else ""
    calls = f"{_literal(style.opening, single)} function {repeated} {_literal(style.closing, single)}"
    each = zip(tools.callable, arguments, strict=True)
    functions = " | ".join(_call(style, function.name, schema, single) for function, schema in each)
    rules = [f"function: {functions}"]
    begin, text = _literal(style.begin, single), _literal(style.answer, single)
    if tools.must:
        return "\n".join([f"start: {begin} {calls}", *rules])
    if tools.answer is not None:
        return "\n".join([f"start: answer | {begin} {calls}", f"answer: {text} {json_rule(tools.answer)}", *rules])
    if text:
        return "\n".join([f"start: {text} TEXT | {begin} {calls}", *rules, r"TEXT: /(.|\n)*/"])
    if not begin:
        return "\n".join([f"start: PLAIN | {calls}", r"PLAIN: /[^{](.|\n)*/", *rules])
    before = "(TEXT added)* " if free else ""
    if free:
        rules.append(f"added: {' | '.join(f'<[{function}]>' for function in free)}")
    rules.append(r"TEXT: /(.|\n)*/")
    if style.begin in single:
        return "\n".join([f"start: {before}TEXT | {before}TEXT {begin} {calls}", *rules])
    return "\n".join([f"start: {before}TEXT | {before}begun {calls}", rf"begun[lazy]: /(.|\n)*/ {begin}", *rules])


def _call(style: CallFormat, name: str, arguments: Mapping[str, Any], single: dict[str, int]) -> str:
    """A call of a function. Each schema is a document of its own, in which its references hold."""
    return " ".join([_literal(style.head_of(name), single), json_rule(arguments), _literal(style.tail, single)])


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON of a schema in a grammar."""
    members = json.dumps(_lean(schema), separators=(",", ":"))[1:]
    return f"%json {{{SPACE}{'' if members == '}' else ', '}{members}"


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


def _followed(function: Function, judge: Judge, warnings: list[str]) -> dict[str, Any]:
    """The schema of a function's arguments; of one that is not strict, any object if the schema cannot be followed.
    Adds to `warnings` what is not.

    Raises InvalidTask, also if it takes too long to find out.
    """
    parameter = function.path
    try:
        judge(*_form(function.parameters))
    except RequestError as error:
        message = renamed(error.message, {"json_schema": parameter})
        if not function.strict and error.code != STOPPED:
            warnings.append(f"{message}; any object is taken")
            return bounded({"type": "object"}).schema
        raise InvalidTask(message, param=parameter, code=error.code) from None
    if function.dropped:
        warnings.append(f"{parameter}: these keywords are not followed: {', '.join(function.dropped)}")
    if rules_of(function.parameters) in (None, 0):
        warnings.append(f"{parameter} {TO_THE_LETTER}")
    return function.parameters


def _form(schema: Any) -> tuple[str, str]:
    return "json_schema", json.dumps(schema)


def _literal(text: str, single: dict[str, int]) -> str:
    """A text in a grammar; marks that are one token are named by it."""
    parts = re.split(f"({'|'.join(map(re.escape, single))})", text) if single else [text]
    return " ".join(f"<[{single[part]}]>" if part in single else json.dumps(part) for part in parts if part)
