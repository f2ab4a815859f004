"""Reasoning comes apart from the answer, is bounded, and stands before a form, however its marks are written."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from engine.grammar.matcher import Grammars, Matcher
from engine.grammar.trial import Trials
from engine.params import SamplingParams
from engine.text import Tokenizer
from producers import AsyncClient
from producers.contract import keys
from producers.contract.record import Record
from producers.contract.stream import Token
from producers.contract.task import Task
from producers.errors import InvalidTask
from producers.gateway.batch_endpoints import LineEndpoints
from producers.gateway.http.errors import Problem
from producers.gateway.openai.answer import Output
from producers.gateway.openai.batch_lines import CHATS, RESPONSES
from producers.gateway.openai.call_formats import HARMONY, CallSyntax
from producers.gateway.openai.output_parser import OutputSyntax, ParsedChoice
from producers.gateway.openai.reasoning import (
    HARMONY_MARKS,
    MARKS,
    Marks,
    ReasoningModel,
    ReasoningRequest,
    ReasoningSyntax,
    marks_of,
    opened_in,
)
from producers.gateway.openai.responses.view import EventWriter, ResponseMetadata
from producers.gateway.openai.tool_call_parser import CallArguments, CallStart, OutputPart, ReasoningText
from producers.gateway.openai.tools import make_calling, read_tools
from producers.sweeper.batches.endpoint import Answer, Finished, PlannedTask
from tests.histories import examples
from tests.producers.gateway.conftest import CARD, TINY, Door
from tests.producers.gateway.openai.conftest import MESSAGES, Answering, chunks, says, send
from tests.producers.gateway.openai.test_batch_lines import events as events_of

THINK, MISTRAL = MARKS
TRIALS = Trials()
#: As Qwen 3's in short: the model opens its reasoning itself, and the template closes it where it is told to.
TEMPLATE = """{% if tools %}<tool_call> arguments {{ tools | tojson }}{% endif %}{% for message in messages %}
{{ message.role }}: {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}{% endfor %}
assistant: {% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}"""
#: As DeepSeek R1's: the template opens it.
OPENING = "{% for message in messages %}{{ message.content.split('</think>')[-1] }}{% endfor %}Assistant: <think>\n"
TOOLS = [{"type": "function", "function": {"name": "now"}}]


def tokenizer_of(*marks: str, special: bool = False, eos: Sequence[str] = ()) -> Tokenizer:
    """The bundled model's, with marks as tokens. `eos`: those of them that end an output, if not the model's."""
    files = {path.name: path.read_bytes() for path in TINY.glob("*.json")}
    backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(mark, special=special) for mark in marks])
    if eos:
        ends = {"eos_token_id": [backend.token_to_id(mark) for mark in eos]}
        files["generation_config.json"] = json.dumps(ends).encode()
    return Tokenizer(files | {"tokenizer.json": backend.to_str().encode()})


@dataclass(frozen=True)
class Case:
    """A model's marks: as tokens with text, as tokens without, as text."""

    marks: Marks
    tokenizer: Tokenizer

    @property
    def model(self) -> ReasoningModel:
        return ReasoningModel("m", TEMPLATE, self.tokenizer, self.marks)

    def tokens(self, text: str) -> list[Token]:
        detokenizer = self.tokenizer.new_detokenizer()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        texts = [detokenizer.push(token_id) for token_id in ids]
        texts[-1] += detokenizer.flush()
        return [Token(0, 0, at, *pair) for at, pair in enumerate(zip(ids, texts, strict=True))]

    def grammar(self, task: Task, request: ReasoningRequest, opened: bool) -> str:
        reasoned = self.model.reasoning(request, opened).applied(task, {}, calling=task.grammar is not None)
        assert reasoned.task.grammar is not None
        return reasoned.task.grammar

    def matcher(self, grammar: str) -> Matcher:
        grammars = Grammars(self.tokenizer.to_json, self.tokenizer.vocab_size, self.tokenizer.eos_token_ids)
        return grammars.maker(SamplingParams(grammar=grammar))()


CASES = {
    "tokens": Case(THINK, tokenizer_of("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "special": Case(MISTRAL, tokenizer_of("[THINK]", "[/THINK]", special=True)),
    "text": Case(THINK, tokenizer_of()),
}
TOKENS = [case for name, case in CASES.items() if name != "text"]


def syntax_of(case: Case, *, opened: bool = False) -> OutputSyntax:
    syntax = case.model.reasoning(ReasoningRequest(), opened).syntax
    assert syntax is not None
    return OutputSyntax(None, syntax)


def joined(parts: Sequence[OutputPart]) -> tuple[str, str]:
    """Reasoning and content."""
    thoughts = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    return thoughts, "".join(part for part in parts if isinstance(part, str))


def parsed(syntax: OutputSyntax, tokens: Sequence[Token], sizes: Iterator[int]) -> list[OutputPart]:
    parser, parts, tokens = syntax.parser(), list[OutputPart](), list(tokens)
    while tokens:
        size = next(sizes)
        parts += parser.feed(tokens[:size])
        tokens = tokens[size:]
    return [*parts, *parser.end()]


#: What a model writes, marks as {0} and {1}; whether the prompt opened the reasoning; reasoning and content.
OUTPUTS = [
    ("{0}\nLet me see.\n\n{1}\n\nIt is 4.\n", False, ("Let me see.", "It is 4.\n")),
    ("\n {0}a < b{1}c", False, ("a < b", "c")),
    ("Let me see.\n{1}\n\nIt is 4.", True, ("Let me see.", "It is 4.")),
    ("{0}\n\n{1}\n\nIt is 4.", False, ("", "It is 4.")),
    ("It is 4 <th", False, ("", "It is 4 <th")),
    ("  It is {0} 4 {1}", False, None),
    ("{0}broken off </thi", False, ("broken off </thi", "")),
    ("broken off\n", True, ("broken off", "")),
    ("{0}a{1}", False, ("a", "")),
    ("{0}a{1}b{1}c{0}", False, None),
    ("\n", False, ("", "\n")),
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("text", "opened", "expected"), OUTPUTS)
def test_reasoning_and_content_are_told_apart(
    name: str, text: str, opened: bool, expected: tuple[str, str] | None
) -> None:
    case = CASES[name]
    tokens = case.tokens(text.format(case.marks.begin, case.marks.end))
    syntax = syntax_of(case, opened=opened)
    alone = joined(parsed(syntax, tokens, iter(lambda: 1, 0)))
    assert joined(parsed(syntax, tokens, iter(lambda: len(tokens), 0))) == alone, "in one piece"
    if expected is not None:
        assert alone == expected


@given(
    pieces=st.lists(st.sampled_from(["a", " ", "\n", "<", "</think", "{0}", "{1}", "é", "🗼"]), max_size=12),
    opened=st.booleans(),
    name=st.sampled_from(sorted(CASES)),
    draws=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(60, 2000), deadline=None)
def test_the_parts_are_a_function_of_the_text(pieces: list[str], opened: bool, name: str, draws: random.Random) -> None:
    """However it comes: one token at a time or several, and text held back for a while."""
    case = CASES[name]
    written = "".join(pieces).replace("{0}", case.marks.begin).replace("{1}", case.marks.end)
    if not written:
        return
    tokens = case.tokens(written)
    syntax = syntax_of(case, opened=opened)
    expected = joined(parsed(syntax, tokens, iter(lambda: 1, 0)))
    assert joined(parsed(syntax, tokens, iter(lambda: draws.randint(1, 4), 0))) == expected
    if name == "text":  # the same text in other pieces
        letters = [Token(0, 0, at, 0, character) for at, character in enumerate(written)]
        assert joined(parsed(syntax, letters, iter(lambda: draws.randint(1, 4), 0))) == expected
    if name == "tokens":  # the end of each piece comes with the next one, as where it may begin a stop string
        late, held = list[Token](), ""
        for token in tokens:
            shown = held + token.text
            size = draws.randint(0, min(3, len(shown)))
            late.append(replace(token, text=shown[: len(shown) - size]))
            held = shown[len(shown) - size :]
        late[-1] = replace(late[-1], text=late[-1].text + held)
        assert joined(parsed(syntax, late, iter(lambda: 1, 0))) == expected
    kept = OutputSyntax.of_record(syntax.fields)
    assert kept == syntax


def test_a_record_of_a_later_release_has_no_syntax() -> None:
    assert ReasoningSyntax.from_json('["other", 1, 2, false, true, true]') is None
    assert OutputSyntax.of_record({}) is None


def test_calls_come_after_reasoning() -> None:
    case = CASES["tokens"]
    tools = read_tools({"tools": TOOLS})
    assert tools is not None
    calling = make_calling(tools, TEMPLATE, case.tokenizer, TRIALS.check, ("<think>", "</think>"))
    syntax = OutputSyntax(calling.syntax, syntax_of(case).reasoning)
    text = '<think>I call\n<tool_call> it</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    parser = syntax.parser()
    parts = [*parser.feed(case.tokens(text)), *parser.end()]
    assert joined(parts) == ("I call\n<tool_call> it", "")
    assert [part for part in parts if isinstance(part, CallStart)] == [CallStart(0, "now")]
    assert [part.text for part in parts if isinstance(part, CallArguments)] == ["{}"]
    assert parser.called
    assert parser.reasoning_tokens == len(case.tokens(text.partition("\n\n")[0]))


@pytest.mark.parametrize("before", ["", "\n", "[THINK]I look.[/THINK]\n"])
def test_a_call_may_begin_an_output_whose_marks_have_no_text(before: str) -> None:
    """As Magistral's."""
    case = Case(MISTRAL, tokenizer_of("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", special=True))
    tools = read_tools({"tools": TOOLS, "tool_call_format": "mistral_args"})
    assert tools is not None
    calling = make_calling(tools, TEMPLATE, case.tokenizer, TRIALS.check, ("[THINK]", "[/THINK]"))
    parser = OutputSyntax(calling.syntax, syntax_of(case).reasoning).parser()
    parts = [*parser.feed(case.tokens(f"{before}[TOOL_CALLS]now[ARGS]{{}}")), *parser.end()]
    assert joined(parts) == ("I look." if "THINK" in before else "", "")
    assert [part for part in parts if isinstance(part, CallStart)] == [CallStart(0, "now")]
    assert parser.called


def output_of(case: Case, grammar: str, seed: int, *, ahead: int = 0, avoid: Sequence[int] = ()) -> list[int]:
    """A random output that a grammar allows. `ahead`: tokens that are guessed ahead at each step. `avoid`: tokens that
    are drawn only where there is no other."""
    draw, matcher, output = random.Random(seed), case.matcher(grammar), list[int]()
    words = -(-case.tokenizer.vocab_size // 32)

    def allowed(*guessed: int) -> list[int]:
        mask = np.zeros(words, np.int32)
        matcher.allow(mask, guessed)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: case.tokenizer.vocab_size]
        found: list[int] = bits.nonzero()[0].tolist()
        return found

    while len(output) < 400:
        usual = allowed()
        for guesses in range(ahead):
            allowed(*(draw.choice(usual) for _ in range(guesses + 1)))
        assert allowed() == usual, "the same after tokens were guessed ahead"
        token_id = draw.choice([token for token in usual if token not in avoid] or usual)
        if token_id in case.tokenizer.eos_token_ids:
            break
        output.append(token_id)
        if matcher.push(token_id):
            break
    assert not matcher.error
    return output


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": SCHEMA},
    "regex": {"regex": "a/b|[0-9]\\/"},
    "choice": {"choice": ["yes", "no"]},
    "plain": {},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", TOKENS, ids=lambda case: str(case.marks.name))
def test_a_budget_closes_the_reasoning_before_a_form(case: Case, form: str) -> None:
    task = Task(model="m", prompt=[1], max_tokens=50, **FORMS[form])
    for opened, budget in ((True, 3), (False, 3), (True, 0)):
        grammar = case.grammar(task, ReasoningRequest(budget=budget, parameter="thinking_budget"), opened)
        syntax = syntax_of(case, opened=opened)
        assert syntax.reasoning is not None
        begin, end = syntax.reasoning.begin, syntax.reasoning.end
        assert begin is not None
        assert end is not None
        output = output_of(case, grammar, budget, ahead=2, avoid=(end,)) if form != "plain" else None
        if output is None:  # random text has no end
            matcher = case.matcher(grammar)
            (word,) = case.tokenizer.encode("a", add_special_tokens=False)
            for token in [*([] if opened else [begin]), *[word] * budget]:
                matcher.push(token)
            mask = np.zeros(-(-case.tokenizer.vocab_size // 32), np.int32)
            matcher.allow(mask)
            assert np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist() == [end]
            continue
        thoughts = output[: output.index(end)] if end in output else []
        if opened:
            assert end in output
        # A character that has begun is finished.
        assert len(thoughts) <= budget + (0 if opened else 1) + 4
        detokenizer = case.tokenizer.new_detokenizer()
        tokens = [Token(0, 0, at, token, detokenizer.push(token)) for at, token in enumerate(output)]
        _, content = joined(parsed(syntax, tokens, iter(lambda: 1, 0)))
        if form == "json_schema":
            assert json.loads(content) in ({"n": 1}, {"n": 2})
        else:
            assert content in ("yes", "no", "a/b") or content.endswith("/")


def test_without_a_budget_reasoning_may_stand_before_a_form() -> None:
    for name in CASES:
        case = CASES[name]
        for opened in (True, False):
            task = Task(model="m", prompt=[1], json_schema=SCHEMA)
            matcher = case.matcher(case.grammar(task, ReasoningRequest(), opened))
            begin = "" if opened else case.marks.begin
            text = f'{begin}one, two, three.\n{case.marks.end}\n\n{{"n": 1}}'
            for token_id in case.tokenizer.encode(text, add_special_tokens=False):
                matcher.push(token_id)
            assert not matcher.error
        matcher = case.matcher(case.grammar(task, ReasoningRequest(), False))
        for token_id in case.tokenizer.encode('{"n": 2}', add_special_tokens=False):
            matcher.push(token_id)
        assert not matcher.error, "the model need not reason"


@pytest.mark.parametrize("regex", ["\\\\\nn", "a\nb", "a\\\nb", "a\\/b/c"])
def test_a_regex_behind_reasoning_is_the_same(regex: str) -> None:
    case = CASES["tokens"]
    matcher = case.matcher(case.grammar(Task(model="m", prompt=[1], regex=regex), ReasoningRequest(), True))
    text = re.sub(r"\\(.)", r"\1", regex, flags=re.DOTALL)
    assert re.fullmatch(regex, text)
    for token_id in case.tokenizer.encode(f"Hm{case.marks.end}{text}", add_special_tokens=False):
        matcher.push(token_id)
    assert not matcher.error


def test_a_required_call_comes_after_the_mark_is_forced() -> None:
    case = CASES["tokens"]
    tools = read_tools({"tools": TOOLS, "tool_choice": "required"})
    assert tools is not None
    calling = make_calling(tools, TEMPLATE, case.tokenizer, TRIALS.check, ("<think>", "</think>"))
    task = Task(model="m", prompt=[1], grammar=calling.grammar)
    grammar = case.grammar(task, ReasoningRequest(budget=5, parameter="thinking_budget"), True)
    syntax = OutputSyntax(calling.syntax, syntax_of(case, opened=True).reasoning)
    for seed in range(4):
        output = output_of(case, grammar, seed)
        detokenizer, parser = case.tokenizer.new_detokenizer(), syntax.parser()
        parts = parser.feed([Token(0, 0, at, one, detokenizer.push(one)) for at, one in enumerate(output)])
        assert joined(parts)[1] == ""
        assert parser.called
        assert parser.reasoning_tokens <= 5 + 1 + 4


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    asking = ReasoningRequest(budget=5, parameter="thinking_budget")
    with pytest.raises(Problem, match='thinking_budget cannot be kept by model "m": its tokenizer has no tokens for'):
        CASES["text"].model.reasoning(asking, True)
    task = Task(model="m", prompt=[1], grammar="start: /a/")
    reasoning = CASES["tokens"].model.reasoning(asking, True)
    with pytest.raises(InvalidTask, match="thinking_budget is given beside a grammar"):
        reasoning.applied(task, {}, calling=False)
    whole = CASES["tokens"].model.reasoning(ReasoningRequest(), True).applied(task, {}, calling=False)
    assert (whole.task, whole.syntax) == (task, None), "a caller's grammar is that of the whole output"


def test_a_message_that_goes_on_says_whether_it_reasons() -> None:
    cases = {"": False, "<think>a": True, "<think>a</think>": None, "a": None, "<think>a</think>b": None}
    for text, opened in cases.items():
        assert opened_in(text, THINK) is opened, text


# ---- harmony

HARMONY_TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }} to=functions.NAME{% endfor %}
{%- for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}
{#- <|channel|> -#}<|start|>assistant"""
HARMONY_CASE = Case(
    HARMONY_MARKS,
    tokenizer_of(
        *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"),
        special=True,
        eos=("<|call|>", "<|return|>"),
    ),
)
HARMONY_MODEL = ReasoningModel("m", HARMONY_TEMPLATE, HARMONY_CASE.tokenizer, HARMONY_MARKS)
ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL_OF_NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"


def harmony_syntax() -> OutputSyntax:
    assert marks_of(HARMONY_TEMPLATE, HARMONY_CASE.tokenizer) is HARMONY_MARKS
    syntax = HARMONY_MODEL.reasoning(ReasoningRequest(), False).syntax
    assert syntax is not None
    assert OutputSyntax.of_record(OutputSyntax(None, syntax).fields) == OutputSyntax(None, syntax)
    return OutputSyntax(None, syntax)


@pytest.mark.parametrize(
    ("text", "thoughts", "content", "calls"),
    [
        (f"{ANALYSIS}<|channel|>final<|message|>It is 4.<|return|>", "Let me see.", "It is 4.", []),
        (f"{ANALYSIS}{CALL_OF_NOW}<|call|>", "Let me see.", "", [("now", "{}")]),
        (f"{ANALYSIS}{CALL_OF_NOW}", "Let me see.", "", [("now", "{}")]),
        (f"{PREAMBLE}{CALL_OF_NOW}", "", "I look.", [("now", "{}")]),
        ("<|channel|>analysis<|message|>broken off", "broken off", "", []),
        ("<|channel|>final<|message|>", "", "", []),
        ("It is 4.<|return|>", "", "It is 4.", []),
        ("<|channel|>ana", "", "", []),
    ],
)
def test_harmony_is_told_apart_by_channels(
    text: str, thoughts: str, content: str, calls: list[tuple[str, str]]
) -> None:
    tokens = HARMONY_CASE.tokens(text)
    for size in (1, 2, len(tokens)):
        parser = replace(harmony_syntax(), calls=CallSyntax(HARMONY, None, False)).parser()
        parts = [part for at in range(0, len(tokens), size) for part in parser.feed(tokens[at : at + size])]
        parts += parser.end()
        assert joined(parts) == (thoughts, content)
        starts = [part for part in parts if isinstance(part, CallStart)]
        read = [
            "".join(part.text for part in parts if isinstance(part, CallArguments) and part.index == start.index)
            for start in starts
        ]
        assert [(start.name, each) for start, each in zip(starts, read, strict=True)] == calls
        assert parser.called is bool(calls)
        assert (parser.reasoning_tokens > 0) is bool(thoughts)


def test_without_tools_a_message_to_a_function_is_content_in_harmony() -> None:
    choice = ParsedChoice(None, harmony_syntax(), "t", 0)
    choice.take(Output(HARMONY_CASE.tokens(f"{ANALYSIS}{CALL_OF_NOW}<|call|>"), "stop"))
    message = json.loads(b"{" + b"".join(choice.members()) + b"}")
    assert (message["reasoning_content"], message["content"], choice.reason) == ("Let me see.", "{}", "stop")
    assert "tool_calls" not in message


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_in_harmony_are_of_the_tools(choice: str) -> None:
    tools = read_tools({"tools": TOOLS, "tool_choice": choice})
    assert tools is not None
    calling = make_calling(tools, HARMONY_TEMPLATE, HARMONY_CASE.tokenizer, TRIALS.check)
    assert calling.syntax.format is HARMONY
    reasoning = HARMONY_MODEL.reasoning(ReasoningRequest(budget=4, parameter="thinking_budget"), False)
    grammar = reasoning.applied(Task(model="m", prompt=[1], grammar=calling.grammar), {}, calling=True).task.grammar
    assert grammar is not None
    answer = "<|channel|>final<|message|>It is"
    short = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    for text in (f"{short}{CALL_OF_NOW}", CALL_OF_NOW, answer):
        matcher = HARMONY_CASE.matcher(grammar)
        for token_id in HARMONY_CASE.tokenizer.encode(text, add_special_tokens=False):
            matcher.push(token_id)
        assert bool(matcher.error) is (text == answer and choice == "required"), text
    if choice == "auto":
        return
    syntax = OutputSyntax(calling.syntax, reasoning.syntax)
    for seed in range(4):
        output = output_of(HARMONY_CASE, grammar, seed, ahead=1)
        parser, detokenizer = syntax.parser(), HARMONY_CASE.tokenizer.new_detokenizer()
        parts = parser.feed([Token(0, 0, at, one, detokenizer.push(one)) for at, one in enumerate(output)])
        parts += parser.end()
        assert joined(parts)[1] == ""
        assert parser.called
        assert parser.reasoning_tokens <= 4 + 10, "its head, its end, and a character that has begun"


def test_a_form_in_harmony_is_that_of_the_last_message() -> None:
    task = Task(model="m", prompt=[1], json_schema=SCHEMA)
    for budget in (None, 0, 3):
        reasoned = HARMONY_MODEL.reasoning(ReasoningRequest(budget=budget), False).applied(task, {}, calling=False)
        assert reasoned.task.grammar is not None
        matcher = HARMONY_CASE.matcher(reasoned.task.grammar)
        text = f'{ANALYSIS if budget is None else ""}<|channel|>final<|message|>{{"n": 1}}'
        for token_id in HARMONY_CASE.tokenizer.encode(text, add_special_tokens=False):
            matcher.push(token_id)
        assert not matcher.error


def test_a_response_in_harmony_has_items_in_the_order_of_its_messages() -> None:
    syntax = harmony_syntax()
    fields = {"response": json.dumps({"fields": {"background": False}, "items": []}), **syntax.fields}
    record = Record("t", fields | {"status": "completed", "reasons": '["stop"]', "task": "{}"})
    tokens = HARMONY_CASE.tokens(f"{ANALYSIS}{PREAMBLE}{ANALYSIS}<|channel|>final<|message|>It is 4.<|return|>")

    def written(size: int) -> bytes:
        writer = EventWriter(ResponseMetadata.of("t", fields), None)
        events = b"".join(writer.deltas(tokens[at : at + size]) for at in range(0, len(tokens), size))
        return events + b"".join(writer.end(record))

    assert written(1) == written(3) == written(len(tokens))
    output = json.loads(written(1).rpartition(b"data: ")[2])["response"]["output"]
    assert [(item["type"], item["content"][0]["text"]) for item in output] == [
        *(("reasoning", "Let me see."), ("message", "I look.")),
        *(("reasoning", "Let me see."), ("message", "It is 4.")),
    ]
    assert len({item["id"] for item in output}) == 4


# ---- over HTTP


@contextmanager
def thinking(valkey: Redis, template: str) -> Iterator[None]:
    """The model, with a template that reasons."""
    digest = hashlib.sha256(template.encode()).hexdigest()
    valkey.set(keys.blob(digest), template)
    card = replace(CARD, files={**CARD.files, "chat_template.jinja": digest})
    valkey.hset(keys.MODELS, CARD.name, card.to_json())
    yield


@pytest.fixture
def thinker(valkey: Redis, shared_door: Door, model: str) -> Iterator[str]:
    """The gateway remembers no card of another test."""
    directory = shared_door.app.state.gateway.client.directory
    with thinking(valkey, TEMPLATE):
        directory.forget(model)
        yield model
    directory.forget(model)


PIECES = ("<th", "ink>\nLet me", " see.\n", "</thi", "nk>\n\n", "It is", " 4.")


def test_chat_has_reasoning_apart(thinker: str, http: httpx.Client, door: Door, answering: Answering) -> None:
    answering.scripts = [says(*PIECES)]
    asked = {"model": thinker, "messages": MESSAGES}
    answer = send(http, "/v1/chat/completions", asked).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "It is 4.")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, usage, _ = chunks(send(http, "/v1/chat/completions", asked | options))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Let me see."
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is 4."
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    left_out = send(http, "/v1/chat/completions", asked | {"include_reasoning": False}).json()["choices"][0]["message"]
    assert (left_out["content"], "reasoning_content" in left_out) == ("It is 4.", False)
    typed: Any = door.openai.chat.completions.create(model=thinker, messages=MESSAGES)  # type: ignore[arg-type]
    assert typed.choices[0].message.reasoning_content == "Let me see."


def test_reasoning_that_is_sent_back_is_in_the_prompt(thinker: str, http: httpx.Client, answering: Answering) -> None:
    answering.scripts = [says(*PIECES)]
    asked = {"model": thinker, "messages": MESSAGES}
    message = send(http, "/v1/chat/completions", asked).json()["choices"][0]["message"]
    again = [*MESSAGES, message, {"role": "user", "content": "Sure?"}]
    assert send(http, "/v1/chat/completions", {**asked, "messages": again}).status_code == 200
    prompt = Tokenizer.from_folder(TINY).decode(answering.records[-1].task["prompt"])
    assert "<think>Let me see.</think>It is 4." in prompt


def test_an_effort_is_a_budget(thinker: str, http: httpx.Client, answering: Answering) -> None:
    answering.scripts = [says("It is 4.")]
    asked = {"model": thinker, "messages": MESSAGES}
    refused = send(http, "/v1/chat/completions", asked | {"reasoning_effort": "low"})
    assert refused.status_code == 400, "the bundled tokenizer has no marks"
    assert refused.json()["error"]["param"] == "reasoning_effort"
    assert send(http, "/v1/chat/completions", asked | {"reasoning_effort": "high"}).status_code == 200
    assert send(http, "/v1/chat/completions", asked | {"reasoning_effort": "none"}).status_code == 200
    high, none = (record.task for record in answering.records)
    assert len(none["prompt"]) > len(high["prompt"]), "the template closes the reasoning"


def test_a_budget_of_minus_one_is_none_whatever_the_effort(
    thinker: str, http: httpx.Client, answering: Answering
) -> None:
    answering.scripts = [says("It is 4.")]
    asked = {"model": thinker, "messages": MESSAGES, "thinking_token_budget": -1}
    for effort in ({}, {"reasoning_effort": "low"}, {"reasoning_effort": "none"}):
        answer = send(http, "/v1/chat/completions", asked | effort)
        assert answer.status_code == 200, answer.text
    tasks = [record.task for record in answering.records]
    assert not any("grammar" in task for task in tasks)
    assert len({len(task["prompt"]) for task in tasks}) == 1, "none closes the reasoning"


def test_a_budget_of_minus_one_asks_nothing_of_a_model_without_reasoning(
    model: str, http: httpx.Client, answering: Answering
) -> None:
    asked = {"model": model, "thinking_token_budget": -1}
    assert send(http, "/v1/chat/completions", {**asked, "messages": MESSAGES}).status_code == 200
    assert send(http, "/v1/completions", {**asked, "prompt": "2 + 2"}).status_code == 200


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"thinking_budget": "5"}, "thinking_budget"),
        ({"thinking_budget": 5, "thinking_token_budget": 5}, "thinking_token_budget"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_wrong_parameters_are_refused_and_those_for_a_model_without_reasoning(
    model: str, http: httpx.Client, answering: Answering, asked: dict[str, Any], param: str
) -> None:
    refused = send(http, "/v1/chat/completions", {"model": model, "messages": MESSAGES, **asked})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert answering.records == []


def test_a_prompt_may_open_the_reasoning(valkey: Redis, model: str, open_door: Any, answering: Answering) -> None:
    with thinking(valkey, OPENING):
        http = open_door().http  # of its own: a gateway remembers a card
        answering.scripts = [says("Let me see.\n", "</think>", "\n\nIt is 4.")]
        answer = send(http, "/v1/chat/completions", {"model": model, "messages": MESSAGES}).json()["choices"][0]
        message = answer["message"]
        assert (message["reasoning_content"], message["content"]) == ("Let me see.", "It is 4.")
        asked = {"model": model, "messages": [*MESSAGES, {"role": "assistant", "content": "It is"}]}
        going_on = asked | {"continue_final_message": True}
        answering.scripts = [says(" 4.")]
        message = send(http, "/v1/chat/completions", going_on).json()["choices"][0]["message"]
        assert (message["content"], "reasoning_content" in message) == (" 4.", False)


# ---- responses, and lines of batches


def test_a_response_has_reasoning_as_an_item(thinker: str, door: Door, answering: Answering) -> None:
    answering.scripts = [says(*PIECES)]
    asked: Any = {"model": thinker, "input": "2 + 2?"}
    live = [event.to_dict() for event in door.openai.responses.create(**asked, stream=True)]
    whole = door.openai.responses.retrieve(live[0]["response"]["id"]).to_dict()
    assert live[-1]["response"] == whole
    thought, said = whole["output"]
    assert (thought["type"], thought["status"], thought["summary"]) == ("reasoning", "completed", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert said["content"][0]["text"] == "It is 4."
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
    kinds = [event["type"].removeprefix("response.") for event in live[2:-1]]
    assert [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
    ]
    with door.openai.responses.stream(**asked) as events:
        assert events.get_final_response().output_text == "It is 4."


def test_a_conversation_goes_on_after_reasoning(thinker: str, door: Door, answering: Answering) -> None:
    """By the response before it, and by all items sent back as they came."""
    answering.scripts = [says(*PIECES)]
    first = door.openai.responses.create(model=thinker, input="2 + 2?")
    items: Any = [{"role": "user", "content": "2 + 2?"}, *(item.to_dict() for item in first.output)]
    more: Any = {"role": "user", "content": "Sure?"}
    door.openai.responses.create(model=thinker, input=[more], previous_response_id=first.id)
    again = door.openai.responses.create(model=thinker, input=[*items, more])
    prompts = {Tokenizer.from_folder(TINY).decode(record.task["prompt"]) for record in answering.records[1:]}
    (prompt,) = prompts
    assert "<think>Let me see.</think>It is 4." in prompt
    page = door.openai.responses.input_items.list(again.id, order="asc").data
    assert [item.type for item in page] == ["message", "reasoning", "message", "message"]


def test_a_call_after_reasoning_is_fed_back_with_it(thinker: str, door: Door, answering: Answering) -> None:
    call = '\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    answering.scripts = [says("<think>I look.</think>", call), says("Noon.")]
    tool: Any = {"type": "function", "name": "now"}
    first = door.openai.responses.create(model=thinker, input="What time is it?", tools=[tool])
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    output: Any = {"type": "function_call_output", "call_id": first.output[1].to_dict()["call_id"], "output": "12:00"}
    door.openai.responses.create(model=thinker, input=[output], previous_response_id=first.id, tools=[tool])
    prompt = Tokenizer.from_folder(TINY).decode(answering.records[-1].task["prompt"])
    assert "<think>I look.</think>" in prompt


@pytest.mark.parametrize("url", [CHATS, RESPONSES])
async def test_a_line_of_a_batch_has_reasoning_apart(
    valkey_url: str, door: Door, http: httpx.Client, thinker: str, answering: Answering, valkey: Redis, url: str
) -> None:
    body = {"model": thinker, **({"messages": MESSAGES} if url == CHATS else {"input": "x"})}
    answering.scripts = [says(*PIECES)]
    await asyncio.to_thread(lambda: send(http, url, body))
    (asked,) = answering.records
    all_events = await asyncio.to_thread(lambda: door.run(events_of(door, asked.id)))
    async with AsyncClient(valkey_url) as client:
        endpoints = LineEndpoints(client)
        planned, refused = await endpoints.tasks(url, [body, body | {"thinking_budget": 5}])
        assert isinstance(planned, PlannedTask)
        fields = Record.parse(asked.id, valkey.hgetall(keys.task(asked.id))).fields
        kept = Record(asked.id, dict(fields) | {name: str(value) for name, value in planned.more.items()})
        (made,) = await endpoints.answers(url, [Finished(body, kept, all_events)])
        endpoints.close()
    assert isinstance(refused, Answer)
    assert b"thinking_budget cannot be kept" in refused.body
    answer = json.loads(made.body)
    if url == CHATS:
        assert answer["choices"][0]["message"]["reasoning_content"] == "Let me see."
    else:
        assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
