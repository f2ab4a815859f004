"""Whatever the grammar of a request's tools is parsed as content and calls of those tools, in each format."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.matcher import Grammars, Matcher
from engine.grammar.schema import Budget, bounded
from engine.grammar.trial import Trials
from engine.params import MAX_SCHEMA, SamplingParams
from engine.text import Tokenizer
from producers.contract.stream import Token
from producers.errors import InvalidTask
from producers.gateway.http.errors import Problem
from producers.gateway.openai import tools as tools_module
from producers.gateway.openai.call_formats import (
    DEEPSEEK,
    DEEPSEEK_V3_1,
    EXAMPLE,
    FORMATS,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    NEMO,
    CallFormat,
    CallSyntax,
    format_of,
)
from producers.gateway.openai.chat import read_chat
from producers.gateway.openai.tool_call_parser import CallArguments, CallEnd, CallStart, ParsedPart, ToolCallParser
from producers.gateway.openai.tools import MAX_LEAN, Calling, Tools, make_calling, read_tools
from tests.exhaustive import few
from tests.histories import examples
from tests.processes import ROOT
from tests.producers.gateway.conftest import TINY

WEATHER = {
    "type": "object",
    "description": "Where and when.",
    "properties": {
        "place": {"$ref": "#/$defs/place"},
        "days": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string", "pattern": '^[a-z{}"]{1,5}$'}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
TRIALS = Trials()
SCHEMAS = {"weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
#: What the templates of models have, in which the format shows.
TEMPLATES = {
    "hermes": (
        HERMES,
        '{{ tools }}<think> <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    ),
    "mistral": (MISTRAL, '{{ tools }}<think> {{- "[TOOL_CALLS] [" }}'),
    "nemo": (NEMO, '{{ tools }}<think> {{- "[TOOL_CALLS][" }}'),
    "mistral_args": (MISTRAL_ARGS, '{{ tools }}<think> {{- "[TOOL_CALLS]" }}name{{- "[ARGS]" }}'),
    "deepseek": (DEEPSEEK, "{{ tools }}<think> <｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n{}\n```"),
    "deepseek_v3_1": (DEEPSEEK_V3_1, "{{ tools }}<think> <｜tool▁call▁begin｜>name<｜tool▁sep｜>{}"),
    "llama": (
        LLAMA,
        '{{ tools }}format {"name": function name, "parameters": dictionary of argument name and its value}.',
    ),
}


@dataclass(frozen=True)
class Model:
    """The bundled model's tokenizer, with the format's marks as tokens or without."""

    style: CallFormat
    template: str
    tokenizer: Tokenizer

    def calling(self, **own: Any) -> Calling:
        tools = read_tools({"tools": TOOLS, **own})
        assert isinstance(tools, Tools)
        return make_calling(tools, self.template, self.tokenizer, TRIALS.check)

    def matcher(self, made: Calling) -> Matcher:
        grammars = Grammars(self.tokenizer.to_json, self.tokenizer.vocab_size, self.tokenizer.eos_token_ids)
        return grammars.maker(SamplingParams(grammar=made.grammar))()


MODELS = [f"{name}{marks}" for name in TEMPLATES for marks in ("", "-marks")]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return model_of(request.param)


@cache
def model_of(which: str) -> Model:
    name, _, marks = which.partition("-")
    style, template = TEMPLATES[name]
    files = {one.name: one.read_bytes() for one in TINY.glob("*.json")}
    if marks:
        backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
        # As Qwen and Mistral have them: text, and no text.
        added = [tokenizers.AddedToken(mark, special=mark.startswith("[")) for mark in style.marks]
        backend.add_tokens([*added, tokenizers.AddedToken("<think>", special=False)])
        files["tokenizer.json"] = backend.to_str().encode()
    return Model(style, template, Tokenizer(files))


def drawn(model: Model, made: Calling, seed: int) -> list[int]:
    """A random output that the grammar allows, up to its end."""
    draw, output = random.Random(seed), []
    matcher = model.matcher(made)
    while len(output) < 3000:
        mask = np.zeros(-(-model.tokenizer.vocab_size // 32), np.int32)
        matcher.allow(mask)
        token_id = draw.choice(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())
        if token_id in model.tokenizer.eos_token_ids:
            break
        output.append(token_id)
        if matcher.push(token_id):
            break
    return output


def parsed(model: Model, made: Calling, output: Sequence[int], seed: int) -> tuple[str, list[tuple[str, str]]]:
    """Content, and calls by name and arguments; the tokens come in random pieces."""
    draw, detokenizer, parser = random.Random(seed), model.tokenizer.new_detokenizer(), ToolCallParser(made.syntax)
    parts: list[ParsedPart] = []
    texts = [detokenizer.push(token_id) for token_id in output]
    texts[-1] += detokenizer.flush()
    tokens = [Token(0, 0, at, *one) for at, one in enumerate(zip(output, texts, strict=True))]
    while tokens:
        size = draw.randint(1, 5)
        parts += parser.feed(tokens[:size])
        tokens = tokens[size:]
    parts += parser.end()
    assert [one.index for one in parts if isinstance(one, CallStart)] == [*range(parser.calls)]
    calls = [(one.name, one.index) for one in parts if isinstance(one, CallStart)]
    texts = [
        "".join(part.text for part in parts if isinstance(part, CallArguments) and part.index == at) for _, at in calls
    ]
    return "".join(one for one in parts if isinstance(one, str)), [
        (name, text) for (name, _), text in zip(calls, texts, strict=True)
    ]


@pytest.mark.parametrize("seed", [1])
def test_a_call_that_must_be_made_is_one_of_the_tools(model: Model, seed: int) -> None:
    made = model.calling(tool_choice="required")
    content, calls = parsed(model, made, drawn(model, made, seed), seed)
    assert content == ""
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    one = model.calling(tool_choice="required", parallel_tool_calls=False)
    assert len(parsed(model, one, drawn(model, one, seed), seed)[1]) == 1
    named = model.calling(tool_choice={"type": "function", "function": {"name": "now"}})
    assert [name for name, _ in parsed(model, named, drawn(model, named, seed), seed)[1]] == ["now"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", few([200, 10_000], 200))
def test_no_required_call_is_malformed(count: int) -> None:
    """Whatever the weights are: tokens are drawn at random from those that the grammar allows."""
    calls = 0
    for seed in itertools.count():
        model = model_of(MODELS[seed % len(MODELS)])
        made = model.calling(tool_choice="required")
        content, written = parsed(model, made, drawn(model, made, seed), seed)
        assert content == ""
        assert written
        for name, arguments in written:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        calls += len(written)
        if calls >= count:
            break


@given(
    which=st.sampled_from(sorted(TEMPLATES)),
    content=st.text(st.sampled_from("ab {}<[\n"), max_size=8),
    names=st.lists(st.sampled_from(["now", "weather"]), max_size=3),
    text=st.text(st.sampled_from('a"{}[]\\\n<é'), max_size=8),
    draws=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(60, 3000), deadline=None)
def test_the_parts_of_a_text_do_not_depend_on_its_pieces(
    which: str, content: str, names: list[str], text: str, draws: random.Random
) -> None:
    style, _ = TEMPLATES[which]
    arguments = json.dumps({"place": text}, ensure_ascii=False)
    if style.between is None:
        content, names = "", names[:1]
    content = content.rstrip()
    written = content + style.calls_of([(name, arguments) for name in names]) if names else content

    def parts_of(cuts: Sequence[int]) -> tuple[str, list[tuple[str, str]], bool]:
        parser, parts = ToolCallParser(CallSyntax(style, None, False)), list[ParsedPart]()
        for at, (start, end) in enumerate(itertools.pairwise([0, *cuts, len(written)])):
            parts += parser.feed([Token(0, 0, at, 0, written[start:end])])
        parts += parser.end()
        calls = [
            (part.name, "".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == part.index))
            for part in parts
            if isinstance(part, CallStart)
        ]
        return "".join(part for part in parts if isinstance(part, str)), calls, parser.called

    expected = parts_of([])
    if style.begin or names:
        assert expected == (content, [(name, arguments) for name in names], bool(names))
    assert parts_of(range(1, len(written))) == expected
    assert parts_of(sorted(draws.sample(range(len(written) + 1), min(4, len(written))))) == expected


def test_text_may_come_before_calls(model: Model) -> None:
    made, style = model.calling(), model.style
    two = [("now", "{}"), ("weather", '{"place": "{\\"}", "days": [1]}')]
    several = two[: 1 if style.between is None else 2]
    calls = style.calls_of(several)
    for text in ("", "Let me see. <tool [TOOL\n"):
        if text and not style.begin:
            continue
        output = model.tokenizer.encode(text + calls, add_special_tokens=False)
        assert follows(model.matcher(made), output)
        for seed in range(4):
            assert parsed(model, made, output, seed) == (text.rstrip(), several)


def test_an_answer_may_be_text_alone(model: Model) -> None:
    made = model.calling()
    for text in (
        "Hello, <tool_cal world [TOOL_CALL",
        "It is 5 < 6 {}. \n",
        *(["<think> x"] if model.style.begin else []),
    ):
        output = model.tokenizer.encode(text, add_special_tokens=False)
        assert follows(model.matcher(made), output)
        assert parsed(model, made, output, 1) == (text, [])


def test_what_is_no_call_of_a_tool_cannot_be_said(model: Model) -> None:
    style = model.style
    for wrong in (
        style.head_of("other"),
        style.head_of("weather") + '{"town"',
        "!" if style.begin else "{ ",
    ):
        output = model.tokenizer.encode(style.begin + style.opening + wrong, add_special_tokens=False)
        assert not follows(model.matcher(model.calling()), output)


def test_a_mark_that_is_spelled_is_text_where_it_is_a_token(model: Model) -> None:
    made = model.calling()
    if made.syntax.begin is None:
        return
    pieces = (model.style.begin[:5], model.style.begin[5:], '{"name": "now", "arguments": {}} and so on')
    output = [one for piece in pieces for one in model.tokenizer.encode(piece, add_special_tokens=False)]
    assert made.syntax.begin not in output
    assert follows(model.matcher(made), output)
    assert parsed(model, made, output, 1) == ("".join(pieces), [])


def test_text_that_comes_after_the_mark_was_said_before_it(model: Model) -> None:
    """Text is held back while it may be the beginning of a stop string, or of a character."""
    made, style = model.calling(), model.style
    if made.syntax.begin is None:
        return
    shown = style.begin if style.begin.startswith("<") else ""
    call = f"{style.opening}{style.call_of('now', '{}')}{style.closing}"
    parser = ToolCallParser(made.syntax)
    parts = parser.feed(
        [Token(0, 0, 0, 5, "Hi"), Token(1, 0, 1, made.syntax.begin, ""), Token(2, 0, 2, 7, f"!!{shown}{call}")]
    )
    assert parts == ["Hi", "!!", CallStart(0, "now"), CallArguments(0, "{}"), CallEnd(0)]
    assert (parser.end(), parser.called) == ([], True)


def test_an_answer_of_a_schema_may_say_the_mark(model: Model) -> None:
    tools = read_tools({"tools": TOOLS})
    assert tools is not None
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    made = make_calling(replace(tools, answer=schema), model.template, model.tokenizer, TRIALS.check)
    style = made.syntax.format
    call = f"{style.begin}{style.opening}{style.call_of('now', '{}')}"
    answers = [json.dumps({"a": f"{said} x"}, ensure_ascii=False) for said in (style.begin, call)]
    mark = re.compile("|".join(map(re.escape, style.marks)) or "(?!)")
    assert CallSyntax.from_json(made.syntax.to_json()) == made.syntax
    for seed in range(9):
        for answer in answers:
            # Spelled: a mark that is one token is no text to the grammar.
            cuts = [0, *(match.start() + 3 for match in mark.finditer(answer)), len(answer)]
            output = [
                token
                for start, end in itertools.pairwise(cuts)
                for token in model.tokenizer.encode(answer[start:end], add_special_tokens=False)
            ]
            assert parsed(model, made, output, seed) == (answer, [])
        output = model.tokenizer.encode(f"\n{call}{style.closing}", add_special_tokens=False)
        assert parsed(model, made, output, seed) == ("", [("now", "{}")])


def test_a_call_that_is_broken_off_is_not_called(model: Model) -> None:
    made, style = model.calling(tool_choice="required"), model.style
    output = model.tokenizer.encode(f'{style.begin}{style.opening}{style.head_of("weather")}{{"pl')
    detokenizer = model.tokenizer.new_detokenizer()
    tokens = [Token(0, 0, at, one, detokenizer.push(one)) for at, one in enumerate(output)]
    parser = ToolCallParser(made.syntax)
    parts = parser.feed(tokens[:3])
    assert (parts, parser.end()) == ([], [])
    parser = ToolCallParser(made.syntax)
    parser.feed(tokens)
    assert (parser.calls, parser.called) == (1, False)


def test_what_describes_a_schema_is_left_out_but_for_its_names(model: Model) -> None:
    words = {"description": "d" * 9999, "title": "t", "examples": [1]}
    parameters = {"type": "object", "properties": {"title": True, "description": words}, "required": ["title"], **words}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    made = model.calling(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert len(made.grammar) < 1000
    ((_, arguments),) = parsed(model, made, drawn(model, made, 1), 1)[1]
    assert "title" in json.loads(arguments)
    assert re.search(r"\s{21}", re.sub(r'"(\\.|[^"\\])*"', "s", arguments)) is None
    guided = {"type": "object", "x-guidance": {"item_separator": ";"}}
    with pytest.raises(InvalidTask, match="x-guidance"):
        model.calling(tools=[{"type": "function", "function": {"name": "f", "parameters": guided, "strict": True}}])


def follows(matcher: Matcher, output: Sequence[int]) -> bool:
    for token_id in output:
        matcher.push(token_id)
    return not matcher.error


def test_the_format_is_that_of_the_template() -> None:
    tools = read_tools({"tools": TOOLS})
    assert tools is not None
    for style, template in TEMPLATES.values():
        assert format_of(template) is style
        assert tools.format_in(template) is style
        assert tools.variables(template) == {"tools": TOOLS, "tools_as_text": False}
    for other in (
        "{{ messages }}",
        "{{ tools }}<tool_call>\n<function=name> arguments",
        "{{ tools }}[TOOL_CALLS]name[CALL_ID]id[ARGS]{}",
    ):
        assert tools.format_in(other) is HERMES, "the model is told of it"
        assert tools.variables(other)["tools_as_text"] is True


def test_a_template_that_lists_no_tools_is_told_of_them_in_its_own_form() -> None:
    tools = read_tools({"tools": TOOLS})
    assert tools is not None
    template = "{{ message['tool_calls'] }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json"
    assert tools.format_in(template) is DEEPSEEK
    call = f"function<｜tool▁sep｜><function-name>\n```json\n{EXAMPLE}\n```"
    assert call in tools.variables(template)["tools_as_text"]


def test_a_caller_may_name_the_format() -> None:
    template = "{% for tool in tools %}{{ tool }}{% endfor %} say it in your own way"
    page = (ROOT / "docs" / "use" / "http.md").read_text("utf-8")
    for call_format in FORMATS:
        assert call_format.name in page, "documented"
        tools = read_tools({"tools": TOOLS, "tool_call_format": call_format.name})
        assert tools is not None
        assert tools.format_in(template) is call_format
        assert tools.variables(template)["tools_as_text"] is False
        assert call_format.begin in str(tools.variables("{{ messages }}")["tools_as_text"]), "and how to call them"
    for wrong in ("xml", 5):
        with pytest.raises(Problem, match=r"tool_call_format is .* one of hermes, mistral"):
            read_tools({"tools": TOOLS, "tool_call_format": wrong})


def test_calls_without_a_mark_have_one_beside_an_answer_in_json() -> None:
    """Llama 3's, which begin as JSON of a schema does."""
    _, template = TEMPLATES["llama"]
    for choice, own in (("auto", False), ("required", True)):
        tools = read_tools({"tools": TOOLS, "tool_choice": choice})
        assert tools is not None
        both = replace(tools, answer={"type": "object"})
        assert both.format_in(template) is (LLAMA if own else HERMES)
        assert both.variables(template)["tools_as_text"] is not own


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_may_leave_some_of_the_tools(flat: bool, mode: str) -> None:
    """The prompt has all of them, so that its beginning stays in the cache."""
    written = [{"type": "function", **tool["function"]} for tool in TOOLS] if flat else TOOLS
    now = {"type": "function", "name": "now"} if flat else {"type": "function", "function": {"name": "now"}}
    allowed = {"mode": mode, "tools": [now]}
    choice = {"type": "allowed_tools", **(allowed if flat else {"allowed_tools": allowed})}
    tools = read_tools({"tools": written, "tool_choice": choice}, flat=flat)
    assert tools is not None
    assert [function.name for function in tools.callable] == ["now"]
    assert (len(tools.shown), tools.must, tools.many) == (2, mode == "required", True)


def test_a_mistral_call_has_an_id_that_its_template_takes() -> None:
    assert len({MISTRAL.id_of("task", choice, call) for choice in range(3) for call in range(3)}) == 9
    assert MISTRAL.id_of("task", 0, 0).isalnum()
    assert len(MISTRAL.id_of("task", 0, 0)) == 9
    assert HERMES.id_of("task", 0, 0).startswith("call_")


def test_of_tools_that_are_not_strict_what_cannot_be_followed_is_left_out(model: Model) -> None:
    kept = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    odd = {"name": "odd", "parameters": {**kept, "not": {}}}
    once = {"tool_choice": "required", "parallel_tool_calls": False}
    made = model.calling(tools=[{"type": "function", "function": odd}], **once)
    ((name, arguments),) = parsed(model, made, drawn(model, made, 2), 2)[1]
    assert (name, json.loads(arguments)["n"] in (1, 2)) == ("odd", True)
    assert made.warnings == ("tools[0].function.parameters: these keywords are not followed: not",)
    never = {"name": "never", "parameters": {**kept, "allOf": [{"type": "null"}]}}
    made = model.calling(tools=[{"type": "function", "function": never}], **once)
    ((_, arguments),) = parsed(model, made, drawn(model, made, 2), 2)[1]
    assert isinstance(json.loads(arguments), dict)
    (warning,) = made.warnings
    assert re.fullmatch(r"tools\[0\]\.function\.parameters cannot be followed: .*; any object is taken", warning)
    assert model.calling().warnings == ()
    with pytest.raises(InvalidTask, match=r"tools\[0\]\.function\.parameters cannot be followed: Unimplemented keys"):
        model.calling(tools=[{"type": "function", "function": odd | {"strict": True}}])
    choice = {"type": "function", "function": {"name": "odd"}}
    with pytest.raises(InvalidTask, match=r"tools\[1\]"):
        model.calling(tools=[TOOLS[1], {"type": "function", "function": odd | {"strict": True}}], tool_choice=choice)


def _tools_of(count: int, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    functions = [{"name": f"f{at}", "parameters": parameters, "strict": True} for at in range(count)]
    return [{"type": "function", "function": function} for function in functions]


def _numbers(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property_{at}": {"type": "number"} for at in range(count)}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (_tools_of(1, _numbers(3000)), "tools[0].function.parameters"),
        (_tools_of(1, _numbers(1) | {"description": "x" * MAX_SCHEMA}), "tools[0].function.parameters"),
        (_tools_of(128, _numbers(120)), "tools"),
    ],
)
def test_too_large_parameters_are_refused_before_they_are_bounded(
    monkeypatch: pytest.MonkeyPatch, tools: list[dict[str, Any]], param: str
) -> None:
    monkeypatch.setattr(tools_module, "bounded", None)
    with pytest.raises(InvalidTask, match=f"have [0-9]+ characters .* at most ({MAX_SCHEMA}|{MAX_LEAN})") as refused:
        read_tools({"tools": tools})
    assert refused.value.param == param
    assert read_tools({"tools": tools, "tool_choice": "none"}) is None


def test_the_schemas_of_a_request_share_one_budget() -> None:
    both_of = {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]}
    schema = {"type": "object", "properties": {"a": {"anyOf": [both_of] * 9}}, "$defs": {"A": {"properties": {}}}}
    one, all_of_them = (read_tools({"tools": _tools_of(count, schema)}) for count in (1, 10))
    assert one is not None
    assert all_of_them is not None
    taken = Budget().steps - one.budget.steps
    assert taken > 0
    assert Budget().steps - all_of_them.budget.steps == 10 * taken
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": _tools_of(1, schema)}
    both = read_chat(body | {"json_schema": schema}, None).tools
    assert both is not None
    assert Budget().steps - both.budget.steps == 2 * taken


@pytest.mark.parametrize(
    ("answer", "param", "told"),
    [
        ({"json_schema": 5}, "json_schema", "json_schema=5 must be a JSON object"),
        ({"json_schema": True}, "json_schema", "json_schema=True must be a JSON object"),
        ({"guided_json": "{"}, "guided_json", "guided_json='{' must be a JSON object"),
        ({"guided_json": _numbers(3000)}, "guided_json", f"guided_json has [0-9]+ .*{MAX_SCHEMA}"),
    ],
)
def test_a_schema_beside_tools_is_checked_as_without(answer: dict[str, Any], param: str, told: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    with pytest.raises(InvalidTask, match=told) as refused:
        read_chat(body | answer, None)
    assert refused.value.param == param
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    as_object, as_text = (
        read_chat(body | {"guided_json": given}, None).tools for given in (schema, json.dumps(schema))
    )
    assert as_object is not None
    assert as_text is not None
    assert as_object.answer == as_text.answer == bounded(schema).schema
