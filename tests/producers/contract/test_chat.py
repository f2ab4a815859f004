"""Messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest

from producers.contract import chat
from producers.contract.chat import MAX_ARGUMENTS, read_messages
from producers.contract.json_parts import MAX_PARTS
from producers.errors import InvalidTask


def called(*arguments: str) -> list[dict[str, Any]]:
    """A message with calls of these arguments."""
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": text}} for text in arguments]
    return [{"role": "assistant", "content": "", "tool_calls": calls}]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (['{"a": [' + "{}," * 200_000 + "1]}"], "too_many_parts"),
        (['{"a": [' + "[]," * 20_000 + "1]}"] * 5, "too_many_parts"),
        (["[" * 900_000], "too_many_parts"),
        (['{"a": "' + "x" * MAX_ARGUMENTS + '"}'], "invalid_value"),
        (['{"a": [' + "1," * 30_000 + "1]}"] * 20, "invalid_value"),
    ],
    ids=["objects", "lists of several calls", "depth", "text", "numbers of several calls"],
)
def test_arguments_of_too_many_parts_are_not_parsed(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: str
) -> None:
    """A body counts each of them as one string."""
    monkeypatch.setattr(chat.json, "loads", lambda text: pytest.fail(f"{len(text)} characters were parsed"))
    with pytest.raises(InvalidTask, match="arguments of tool calls") as refused:
        read_messages(called(*arguments))
    assert (refused.value.param, refused.value.code) == ("messages", code)


def test_arguments_with_much_text_are_taken() -> None:
    code = 'if (a[0] == "{") { b = ["}"]; }\n' * 20_000
    (message,) = read_messages(called(chat.json.dumps({"content": code}), "{}"))
    assert message["tool_calls"][0]["function"]["arguments"] == {"content": code}
    many = {"a": [{}] * (MAX_PARTS - 10)}
    (message,) = read_messages(called(chat.json.dumps(many)))
    assert message["tool_calls"][0]["function"]["arguments"] == many


@pytest.mark.parametrize("text", ['{"place": "Be', "{", "[1]", "5", '"{}"', "no JSON", "[" * 60_000])
def test_arguments_that_are_no_object_stay_text(text: str) -> None:
    """As in the history of an agent whose call was cut."""
    (message,) = read_messages(called(text))
    assert message["tool_calls"][0]["function"]["arguments"] == text
    assert read_messages([message]) == [message], "a batch's line is read twice"


def test_arguments_are_read_as_clients_send_them() -> None:
    for nothing in (None, "", "{}", {}):
        (message,) = read_messages(called(nothing))  # type: ignore[arg-type]
        assert message["tool_calls"][0]["function"]["arguments"] == {}
    (message,) = read_messages(called([1]))  # type: ignore[arg-type]
    assert message["tool_calls"][0]["function"]["arguments"] == "[1]"
    with pytest.raises(InvalidTask, match="lone surrogate") as refused:
        read_messages(called("{\ud800"))
    assert refused.value.param == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}], ids=str)
def test_an_answer_and_a_tools_output_may_have_no_text(content: dict[str, Any]) -> None:
    """As clients send what a model called without a word, and what a tool gave that gives nothing."""
    (call,) = called("{}")
    del call["content"]
    sent = [call | content, {"role": "tool", "tool_call_id": "a"} | content, {"role": "assistant"} | content]
    assert [message["content"] for message in read_messages(sent)] == [None, "", ""]
    with pytest.raises(InvalidTask, match=r"messages\[0\]\.content"):
        read_messages([{"role": "user"} | content])
