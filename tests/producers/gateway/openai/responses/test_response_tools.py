"""Tools in responses over real HTTP, read by OpenAI's client: what is queued, what is answered, and what comes next."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from redis import Redis

from producers.contract import chat
from producers.contract.record import Record
from producers.contract.stream import End, Token
from producers.errors import InvalidTask
from producers.gateway.openai.call_formats import HERMES, CallSyntax
from producers.gateway.openai.responses import conversation
from producers.gateway.openai.responses.request import Item, messages_of, read_input
from producers.gateway.openai.responses.view import EventWriter, ResponseMetadata, body
from tests.producers.gateway.conftest import Open
from tests.producers.gateway.openai.conftest import Answering, says
from tests.producers.gateway.openai.test_chat_tools import PIECES, PLACE
from tests.producers.gateway.openai.test_chat_tools import calls as calls  # the fixture: a model with tools

TOOLS: Any = [
    {"type": "function", "name": "weather", "description": None, "parameters": PLACE, "strict": None},
    {"type": "function", "name": "now", "parameters": None, "strict": False, "defer_loading": False},
]
ASKED: dict[str, Any] = {"model": "tiny", "input": "Rain?", "tools": TOOLS}
ARGUMENTS = '{"place": "}{"}'
EVENTS = [
    *("response.created", "response.in_progress"),
    *("response.output_item.added", "response.content_part.added", "response.output_text.delta"),
    *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
    *("response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done"),
    *("response.output_item.added", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done"),
    "response.completed",
]


def of(response: Any) -> list[tuple[str, str]]:
    """An output's items: a message's text, a call's arguments, each with its type or function."""
    return [
        (item.name, item.arguments) if item.type == "function_call" else (item.type, item.content[0].text)
        for item in response.output
    ]


def test_all_ways_of_reading_calls_agree(calls: str, client: OpenAI, answering: Answering) -> None:
    answering.scripts = [says(*PIECES)]
    whole = client.responses.create(**ASKED)
    assert (whole.status, of(whole)) == ("completed", [("message", "Well."), ("weather", ARGUMENTS), ("now", "{}")])
    assert {item.status for item in whole.output} == {"completed"}
    assert len({item.id for item in whole.output}) == 3
    assert len({item.call_id for item in whole.output if item.type == "function_call"}) == 2
    assert client.responses.retrieve(whole.id).to_dict() == whole.to_dict()
    assert whole.tools[0].to_dict() == TOOLS[0]
    assert (whole.tool_choice, whole.parallel_tool_calls) == ("auto", True)
    live = [event.to_dict() for event in client.responses.create(**ASKED, stream=True)]
    assert [event["type"] for event in live] == EVENTS
    assert [event["sequence_number"] for event in live] == list(range(len(EVENTS)))
    assert [event["output_index"] for event in live if "output_index" in event] == [0] * 6 + [1] * 5 + [2] * 4
    response_id = live[0]["response"]["id"]
    for after in range(-1, len(live), 3):
        again = client.responses.retrieve(response_id, stream=True, starting_after=after)
        assert [event.to_dict() for event in again] == live[after + 1 :]
    with client.responses.stream(**ASKED) as stream:
        assert of(stream.get_final_response()) == of(whole)


def test_a_background_response_has_calls(calls: str, client: OpenAI, answering: Answering) -> None:
    answering.scripts = [says(*PIECES)]
    live = [event.to_dict() for event in client.responses.create(**ASKED, background=True, stream=True)]
    assert [event["type"] for event in live] == [EVENTS[0], "response.queued", *EVENTS[1:]]
    assert client.responses.retrieve(live[0]["response"]["id"]).to_dict() == live[-1]["response"]


def test_the_webhook_of_a_response_with_calls(calls: str, open_door: Open, answering: Answering, valkey: Redis) -> None:
    client = open_door(webhook_allow=("127.0.0.0/8",)).openai
    answering.scripts = [says(*PIECES)]
    hook = {"webhook": {"url": "http://127.0.0.1:1/hook"}}
    made = client.responses.create(**ASKED, background=True, extra_body=hook)
    for _ in client.responses.retrieve(made.id, stream=True):
        pass
    (name,) = valkey.keys("penstock:webhooks:row:*")
    assert valkey.hmget(name, "type", "object") == [b"response.completed", made.id.encode()]


def test_what_may_be_called(calls: str, client: OpenAI, answering: Answering) -> None:
    answering.scripts = [says("Hello.")]
    for choice in ("auto", "none", "required", {"type": "function", "name": "now"}):
        made = client.responses.create(**ASKED, tool_choice=choice, parallel_tool_calls=False)
        assert json.loads(json.dumps(made.to_dict()["tool_choice"])) == choice
        assert made.parallel_tool_calls is False
    auto, none, required, named = (record.task.get("grammar", "") for record in answering.records)
    assert none == ""
    assert "TEXT" in auto
    assert '"weather' not in named.replace("\\", "")
    assert "TEXT" not in required + named
    assert ["function)*" in grammar for grammar in (auto, required, named)] == [False, False, False], "one set of calls"
    prompts = [len(record.task["prompt"]) for record in answering.records]
    assert prompts[1] < prompts[0] == prompts[2] == prompts[3]


def test_the_conversation_goes_on_with_outputs(calls: str, client: OpenAI, answering: Answering) -> None:
    """By its id, and sent as a whole, as agents do: the prompt is the same, and that of a chat."""
    answering.scripts = [says(*PIECES), says("It rains.")]
    first = client.responses.create(**ASKED)
    outputs: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = client.responses.create(**ASKED | {"input": outputs}, previous_response_id=first.id)
    assert second.output_text == "It rains."
    listed = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in listed] == [
        "message",
        "message",
        *["function_call"] * 2,
        *["function_call_output"] * 2,
    ]
    assert listed[2].to_dict() == first.output[1].to_dict()
    assert listed[4].to_dict() == {"id": listed[4].id, "status": "completed", **outputs[0]}
    sent: Any = [{"role": "user", "content": "Rain?"}, *(item.to_dict() for item in first.output), *outputs]
    whole = client.responses.create(**ASKED | {"input": sent})
    assert whole.output_text == "It rains."
    chat: Any = [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "Well.",
            "tool_calls": [
                {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
                for item in first.output
                if item.type == "function_call"
            ],
        },
        *({"role": "tool", "tool_call_id": output["call_id"], "content": "rain"} for output in outputs),
    ]
    nested: Any = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]
    nested.append({"type": "function", "function": {"name": "now", "strict": False}})
    client.chat.completions.create(model=calls, messages=chat, tools=nested)
    by_id, as_whole, in_chat = (record.task["prompt"] for record in answering.records[1:])
    assert by_id == as_whole == in_chat


def test_items_of_earlier_outputs_are_named_by_their_ids(
    calls: str, client: OpenAI, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Vercel's AI SDK does."""
    answering.scripts = [says(*PIECES), says("It rains.")]
    first = client.responses.create(**ASKED)
    user = {"role": "user", "content": "Rain?"}
    named: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    output = {"type": "function_call_output", "call_id": first.output[1].to_dict()["call_id"], "output": "rain"}
    second = client.responses.create(**ASKED | {"input": [user, *named, output]})
    sent: Any = [user, *(item.to_dict() for item in first.output), output]
    client.responses.create(**ASKED | {"input": sent})
    by_name, as_whole = (record.task["prompt"] for record in answering.records[1:])
    assert by_name == as_whole
    listed = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.to_dict() for item in listed[1:4]] == [item.to_dict() for item in first.output]
    other = client.with_options(default_headers={"Penstock-Tenant": "acme"})
    unknown: Any = [user, {"type": "item_reference", "id": f"{first.output[0].id}_7"}]
    for asking, items in ((other, [user, *named]), (client, unknown)):
        with pytest.raises(openai.BadRequestError) as caught:
            asking.responses.create(**ASKED | {"input": items})
        assert (caught.value.code, caught.value.param) == ("item_not_found", "input[1].id")
    monkeypatch.setattr(conversation, "MAX_REFERENCED", 0)
    with pytest.raises(openai.BadRequestError, match="go on with previous_response_id"):
        client.responses.create(**ASKED | {"input": [user, *named]})


def test_a_call_that_is_cut_is_incomplete_and_goes_on(calls: str, client: OpenAI, answering: Answering) -> None:
    answering.scripts = [says(*PIECES[:4], reason="length"), says("Sorry.")]
    live = [event.to_dict() for event in client.responses.create(**ASKED, stream=True)]
    assert live[-1]["type"] == "response.incomplete"
    message, call = live[-1]["response"]["output"]
    assert (message["status"], call["status"], call["arguments"]) == ("completed", "incomplete", '{"place": "}{"')
    assert live[-2]["item"] == call
    again: Any = {"model": "tiny", "input": [call, {"role": "user", "content": "Go on."}], "tools": TOOLS}
    assert client.responses.create(**again).output_text == "Sorry."
    again = {"model": "tiny", "input": "Go on.", "previous_response_id": live[0]["response"]["id"]}
    assert client.responses.create(**again).output_text == "Sorry."


def test_an_answer_of_a_schema_stands_beside_calls(calls: str, client: OpenAI, answering: Answering) -> None:
    answering.scripts = [says('{"rain"', ": true}")]
    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    made = client.responses.create(**ASKED, text=form)
    assert of(made) == [("message", '{"rain": true}')]
    grammar = answering.records[0].task["grammar"]
    assert grammar.startswith("start: answer | ")
    assert '"rain"' in grammar
    assert "json_schema" not in answering.records[0].task
    form["format"]["schema"] = {"not": {}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED, text=form)
    assert (caught.value.param, "text.format cannot be followed" in str(caught.value)) == ("text.format", True)


def test_log_probabilities_are_those_of_the_message(calls: str, client: OpenAI, answering: Answering) -> None:
    answering.scripts = [says(*PIECES, logprobs=[(-0.5, ((5, -0.5),))])]
    more: Any = {"include": ["message.output_text.logprobs"]}
    live = [event.to_dict() for event in client.responses.create(**ASKED, **more, stream=True)]
    (part,) = live[-1]["response"]["output"][0]["content"]
    assert [len(part["logprobs"])] == [len(event["logprobs"]) for event in live if event["type"].endswith("text.delta")]
    whole = client.responses.retrieve(live[0]["response"]["id"])
    assert whole.to_dict() == live[-1]["response"]


@pytest.mark.parametrize("must", [True, False])
def test_events_do_not_depend_on_how_tokens_came(must: bool) -> None:
    """Nor on how many came at a time: each number names the same event for every reader."""
    syntax = CallSyntax(HERMES, None, must)
    fields = {"response": json.dumps({"fields": {"background": True}, "items": []}), "calls": syntax.to_json()}
    record = Record("t", fields | {"status": "completed", "reasons": '["stop"]', "task": "{}"})
    pieces = PIECES[1:] if must else PIECES
    tokens = [Token(at, 0, at, 5, text) for at, text in enumerate(pieces)]
    end = End(99, "completed", ("stop",), {}, None)

    def written(sizes: list[int]) -> bytes:
        writer, remaining = EventWriter(ResponseMetadata.of("t", fields), None), list(tokens)
        written = b""
        for size in sizes:
            written += writer.deltas(remaining[:size])
            remaining = remaining[size:]
        return written + b"".join(writer.end(record))

    assert written([len(tokens)]) == written([1] * len(tokens)) == written([2, 1, 3, 9])
    output = json.loads(body(record, [*tokens, end]))["output"]
    assert [item["type"] for item in output] == ([] if must else ["message"]) + ["function_call"] * 2


def test_a_record_of_a_later_release_is_read_as_text() -> None:
    assert CallSyntax.from_json('["other", null, false]') is None
    assert CallSyntax.from_json(None) is None
    assert CallSyntax.from_json(CallSyntax(HERMES, 7, True).to_json()) == CallSyntax(HERMES, 7, True)


@pytest.mark.parametrize(
    ("arguments", "code"), [('{"a": [' + "{}," * 200_000 + "1]}", "too_many_parts"), ("x" * (1 << 21), "invalid_value")]
)
def test_arguments_of_too_many_parts_are_not_parsed(monkeypatch: pytest.MonkeyPatch, arguments: str, code: str) -> None:
    """A body counts them as one string, and truncation would parse them again and again."""
    monkeypatch.setattr(chat.json, "loads", lambda text: pytest.fail(f"{len(text)} characters were parsed"))
    with pytest.raises(InvalidTask, match="arguments of tool calls") as refused:
        read_input([{"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}])
    assert (refused.value.param, refused.value.code) == ("input", code)


def test_items_are_kept_as_they_came() -> None:
    items = read_input(
        [
            {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{", "namespace": None},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}]},
            {"role": "user", "content": "y"},
        ]
    )
    assert [Item.of(json.loads(json.dumps(item.kept))) for item in items] == items
    call, output, user = messages_of(items)
    assert call["tool_calls"] == [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]
    assert output == {"role": "tool", "content": "x", "tool_call_id": "a", "name": "f"}
    assert user == {"role": "user", "content": "y"}
    # What a gateway of the release before reads of them: three members, and a role that it knows.
    assert [(role, texts) for _, role, texts, *_ in (item.kept for item in items)] == [
        ("assistant", ["{"]),
        ("user", ["x"]),
        ("user", ["y"]),
    ]


def test_a_tool_may_give_nothing() -> None:
    (output,) = read_input([{"type": "function_call_output", "call_id": "a", "output": []}])
    assert messages_of([output]) == [{"role": "tool", "content": "", "tool_call_id": "a"}]
