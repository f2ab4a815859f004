"""Token streams of well-known chat templates: the same as transformers' `apply_chat_template` makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from engine.errors import RequestError
from engine.text import ChatTemplate, ConfinedTemplate, TemplateSource, Tokenizer
from engine.text.confined_template import Limits
from tests.engine.text.well_known import KNOWN, Known

USER = {"role": "user", "content": "  What is <b>2 + 2</b>? 🗼 "}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
ANSWER = {"role": "assistant", "content": "It is 4. "}
THOUGHT = {"role": "assistant", "content": "<think>\nadd them\n</think>\n\nFour."}
REASONED = {"role": "assistant", "content": "Four.", "reasoning_content": "\nadd them\n"}
MORE = {"role": "user", "content": "And 3 + 3?"}

CHATS = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, MORE],
    "system and turns": [SYSTEM, USER, ANSWER, MORE],
    "thoughts": [USER, THOUGHT, MORE, REASONED],
    "ends with an answer": [USER, ANSWER],
    "ends with a blank": [USER, {"role": "assistant", "content": "It is \n"}],
}
OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"add_generation_prompt": True, "enable_thinking": False, "thinking": True, "controls": {"b": "é", "a": 1}},
    {"add_generation_prompt": True, "date_string": "26 Jul 2024"},
]


class Pair:
    """A template, by transformers and by us."""

    def __init__(self, known: Known, backend: tokenizers.Tokenizer) -> None:
        backend = tokenizers.Tokenizer.from_str(backend.to_str())
        backend.add_special_tokens([AddedToken(token, special=True) for token in (known.bos, known.eos) if token])
        backend.add_special_tokens([AddedToken(token, special=True) for token in known.special])
        tokens = {"bos_token": known.bos, "eos_token": known.eos}
        self.theirs = PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=known.source, **{k: v for k, v in tokens.items() if v}
        )
        self.ours = ChatTemplate(known.source, tokens)
        self.tokenizer = Tokenizer({"tokenizer.json": backend.to_str().encode()})

    def right(self, chat: list[dict[str, Any]], options: dict[str, Any]) -> list[int] | None:
        """Token ids; None where the template refuses the chat."""
        try:
            ids = self.theirs.apply_chat_template(chat, tools=None, return_dict=False, **options)
        except Exception:
            return None
        return list(ids)

    def made(self, chat: list[dict[str, Any]], options: dict[str, Any]) -> list[int] | None:
        try:
            text = self.ours.render(chat, tools=None, **options)
        except RequestError:
            return None
        return self.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="session")
def pairs(byte_level: tokenizers.Tokenizer, byte_fallback: tokenizers.Tokenizer) -> dict[str, Pair]:
    return {name: Pair(known, byte_fallback if known.words else byte_level) for name, known in KNOWN.items()}


@pytest.mark.parametrize("name", KNOWN)
def test_token_streams_equal_transformers(pairs: dict[str, Pair], name: str) -> None:
    pair, taken = pairs[name], 0
    for chat in CHATS.values():
        for options in OPTIONS:
            right = pair.right(chat, options)
            made = pair.made(chat, options)
            # Some write the date, and midnight may have passed between the two.
            assert made == right or made == pair.right(chat, options), (chat, options)
            taken += right is not None
    # What a template refuses (a system role, two messages of one role) is refused by both.
    assert taken > len(CHATS) * len(OPTIONS) // 2


@pytest.mark.parametrize("name", KNOWN)
def test_a_message_that_goes_on_is_a_beginning_of_the_whole(pairs: dict[str, Pair], name: str) -> None:
    begun = [USER, {"role": "assistant", "content": "It is four"}]
    text = pairs[name].ours.render(begun, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("It is four")
    assert pairs[name].ours.render(begun, add_generation_prompt=False).startswith(text)


def test_the_whole_table_through_one_process_each(pairs: dict[str, Pair]) -> None:
    """As a gateway renders: the confinement changes no text."""
    for name in ("Llama 3.1", "Qwen 3", "Command-R"):
        known = KNOWN[name]
        source = TemplateSource(known.source, {"bos_token": known.bos, "eos_token": known.eos})
        # A busy machine may stop it for longer than a gateway waits.
        there = ConfinedTemplate(source, Limits(wall=100.0))
        try:
            for chat in CHATS.values():
                right = pairs[name].ours.render(chat)
                assert there.render(chat) in (right, pairs[name].ours.render(chat))
        finally:
            there.close()


@pytest.mark.parametrize(
    "content", [[{"type": "text", "text": "a "}], [{"type": "image"}, {"type": "text", "text": "b"}]]
)
def test_a_content_of_parts_goes_on_from_its_last_text(pairs: dict[str, Pair], content: list[dict[str, str]]) -> None:
    chat = [USER, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    right = pairs["Gemma 3"].right(chat, options)
    assert right is not None
    assert pairs["Gemma 3"].made(chat, options) == right


@pytest.mark.parametrize(
    ("source", "chat", "says"),
    [
        ("{{ messages[0].content }}", [], "needs a last message"),
        ("{{ messages[0].role }}", [USER], "changes or leaves out"),
        ("{{ messages[0].content | upper }}", [USER], "changes or leaves out"),
        ("{{ messages[0].content }}", [{"role": "assistant", "content": None}], "needs a last message"),
        ("{{ messages[0].content }}", [{"role": "assistant", "content": [{"type": "image"}]}], "needs a last message"),
    ],
)
def test_what_cannot_go_on_is_refused(source: str, chat: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        ChatTemplate(source).render(chat, add_generation_prompt=False, continue_final_message=True)


def test_tools_are_written_as_transformers_does(pairs: dict[str, Pair]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]
    right = pairs["Qwen 2.5"].theirs.apply_chat_template([USER], tools=tools, tokenize=False)
    assert pairs["Qwen 2.5"].ours.render([USER], add_generation_prompt=False, tools=tools) == right
    assert json.dumps("<é>", ensure_ascii=False) in right
