"""Tools in chat completions over real HTTP, read by OpenAI's client: what is queued, and what is answered."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis import Redis

from engine.text import Tokenizer
from producers.contract import keys
from tests.producers.gateway.conftest import CARD, TINY, Door, Open
from tests.producers.gateway.openai.conftest import MESSAGES, Answering, chunks, says, send

TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }} {% endfor %}<tool_call> arguments
{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}
{{ call.id }} {{ call.function.name }} {{ call.function.arguments.place }}{% endfor %}
{% endfor %}"""
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now"}},
]
ANSWER: Any = {"name": "answer", "schema": {"type": "object", "properties": {"rain": {"type": "boolean"}}}}
PIECES = [
    "Well. ",
    "\n<tool",
    '_call>\n{"name": "weather", "argu',
    'ments": {"place": "}{"',
    "}}",
    "\n</tool_call>\n<tool_call>",
    '\n{"name": "now", "arguments": {}}\n</tool_',
    "call>",
]


@pytest.fixture
def calls(valkey: Redis, model: str) -> str:
    """The model, with a template that has tools."""
    digest = hashlib.sha256(TEMPLATE.encode()).hexdigest()
    valkey.set(keys.blob(digest), TEMPLATE)
    card = replace(CARD, files={**CARD.files, "chat_template.jinja": digest})
    valkey.hset(keys.MODELS, CARD.name, card.to_json())
    return model


def test_calls_are_answered_in_one_piece_and_as_a_stream(calls: str, door: Door, answering: Answering) -> None:
    answering.scripts = [says(*PIECES, n=2)]
    whole = door.openai.chat.completions.create(model=calls, messages=MESSAGES, tools=TOOLS, n=2)
    for choice in whole.choices:
        assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
        named = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        assert named == [("weather", '{"place": "}{"}'), ("now", "{}")]
    assert len({call.id for choice in whole.choices for call in choice.message.tool_calls or []}) == 4
    with door.openai.chat.completions.stream(model=calls, messages=MESSAGES, tools=TOOLS, n=2) as events:
        streamed = events.get_final_completion()
    for choice, other in zip(whole.choices, streamed.choices, strict=True):
        assert (other.message.content, other.finish_reason) == ("Well.", "tool_calls")
        for one, two in zip(choice.message.tool_calls or [], other.message.tool_calls or [], strict=True):
            assert (one.function.name, one.function.arguments) == (two.function.name, two.function.arguments)


def test_the_tools_are_in_prompt_and_grammar(calls: str, http: httpx.Client, answering: Answering) -> None:
    asked = {"model": calls, "messages": MESSAGES, "tools": TOOLS}
    answering.scripts = [says("Hello.")]
    answer = send(http, "/v1/chat/completions", asked).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("Hello.", "stop")
    assert "tool_calls" not in answer["message"]
    assert send(http, "/v1/chat/completions", asked | {"tool_choice": "none"}).status_code == 200
    with_tools, without = (record.task for record in answering.records)
    assert len(with_tools["prompt"]) > len(without["prompt"])
    assert '{\\"name\\": \\"weather\\"' in with_tools["grammar"]
    assert "grammar" not in without


def test_a_conversation_goes_on_with_what_a_tool_said(calls: str, door: Door, answering: Answering) -> None:
    answering.scripts = [says(*PIECES), says("It rains.")]
    message = door.openai.chat.completions.create(model=calls, messages=MESSAGES, tools=TOOLS).choices[0].message
    assert message.tool_calls
    bare: Any = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": ""}}],
    }
    more: Any = [bare, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}]
    answer = door.openai.chat.completions.create(model=calls, messages=[*MESSAGES, *more], tools=TOOLS)
    assert answer.choices[0].message.content == "It rains."


def test_an_output_that_is_cut_in_a_call_has_what_there_is_of_it(
    calls: str, http: httpx.Client, answering: Answering
) -> None:
    answering.scripts = [says(*PIECES[:4], reason="length")]
    answer = send(http, "/v1/chat/completions", {"model": calls, "messages": MESSAGES, "tools": TOOLS}).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"place": "}{"']


def test_a_conversation_goes_on_after_a_call_that_was_cut(calls: str, http: httpx.Client, answering: Answering) -> None:
    """Agents send the history as they got it."""
    answering.scripts = [says(*PIECES[:4], reason="length"), says("Sorry.")]
    asked = {"model": calls, "messages": MESSAGES, "tools": TOOLS}
    cut = send(http, "/v1/chat/completions", asked).json()["choices"][0]["message"]
    asked["messages"] = [*MESSAGES, cut, {"role": "user", "content": "Go on."}]
    answer = send(http, "/v1/chat/completions", asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Sorry."


def test_a_call_that_a_stop_breaks_off_is_no_reason_to_call(
    calls: str, http: httpx.Client, answering: Answering
) -> None:
    answering.scripts = [says(*PIECES[:4], reason="stop")]
    asked = {"model": calls, "messages": MESSAGES, "tools": TOOLS, "stop": ["}"]}
    assert send(http, "/v1/chat/completions", asked).json()["choices"][0]["finish_reason"] == "stop"
    first, *_, last, done = chunks(send(http, "/v1/chat/completions", asked | {"stream": True}))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None, "refusal": None}, "no text as yet"
    assert (last["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")


def test_content_that_was_held_back_is_said_once(calls: str, http: httpx.Client, answering: Answering) -> None:
    answering.scripts = [says("Hi ", "<tool", reason="length")]
    answer = send(http, "/v1/chat/completions", {"model": calls, "messages": MESSAGES, "tools": TOOLS}).json()
    assert answer["choices"][0]["message"]["content"] == "Hi <tool"


def test_the_template_for_tools_is_taken_where_there_is_one(
    valkey: Redis, model: str, open_door: Open, answering: Answering
) -> None:
    """By a gateway of its own: one remembers a card for 2 s, and the next test's store lacks this card's template."""
    named = [{"name": "default", "template": "none"}, {"name": "tool_use", "template": TEMPLATE}]
    config = json.dumps({"chat_template": named}).encode()
    digest = hashlib.sha256(config).hexdigest()
    valkey.set(keys.blob(digest), config)
    files = {name: one for name, one in CARD.files.items() if name != "chat_template.jinja"}
    card = replace(CARD, files={**files, "tokenizer_config.json": digest})
    valkey.hset(keys.MODELS, CARD.name, card.to_json())
    answering.scripts = [says(*PIECES)]
    answer = send(open_door().http, "/v1/chat/completions", {"model": model, "messages": MESSAGES, "tools": TOOLS})
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_model_whose_template_has_no_tools_gets_them_as_text(
    model: str, open_door: Open, answering: Answering
) -> None:
    """The bundled model's template, which refuses the role `tool`. By a gateway of its own, as above."""
    http = open_door().http
    answering.scripts = [says(*PIECES), says("It rains.")]
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "tools": TOOLS}
    (choice,) = send(http, "/v1/chat/completions", asked).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "now"]
    told = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
    asked["messages"] = [*MESSAGES, choice["message"], *told]
    for more in ({}, {"tool_choice": "none"}, {"tools": None}):
        answer = send(http, "/v1/chat/completions", asked | more).json()["choices"][0]["message"]["content"]
        assert answer == "It rains."
    first, _, *without = (Tokenizer.from_folder(TINY).decode(record.task["prompt"]) for record in answering.records)
    assert '"name": "weather"' in first
    for prompt in without:
        assert "You can call functions" not in prompt
        assert '<tool_call>\n{"name": "weather", "arguments": {"place": "}{"}}\n</tool_call>' in prompt


#: One whose way to call is not known, and Llama 3's, whose calls are JSON.
UNKNOWN, LLAMA = (
    f"{{% for tool in tools or [] %}}{{{{ tool | tojson }}}}{way}{{% endfor %}}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ raise_exception('calls are text') }}{% endfor %}{% endfor %}"
    for way in ("<call>NAME(ARGUMENTS)</call>", '"parameters": dictionary of argument name')
)


@pytest.mark.parametrize(
    ("template", "more"), [(UNKNOWN, {}), (LLAMA, {"response_format": {"type": "json_schema", "json_schema": ANSWER}})]
)
def test_a_template_whose_calls_could_not_be_told_from_text_gets_the_tools_as_text(
    valkey: Redis, model: str, open_door: Open, answering: Answering, template: str, more: dict[str, Any]
) -> None:
    """They were refused. What came of it goes on: in chats, in responses, and where tokens are counted."""
    digest = hashlib.sha256(template.encode()).hexdigest()
    valkey.set(keys.blob(digest), template)
    card = replace(CARD, files={**CARD.files, "chat_template.jinja": digest})
    valkey.hset(keys.MODELS, CARD.name, card.to_json())
    door = open_door()
    pieces = PIECES[3:] if more else PIECES  # an answer of a schema has no text before calls
    answering.scripts = [
        says("<tool_call>\n", '{"name": "weather", "argu', *pieces) if more else says(*pieces),
        says("{}"),
    ]
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "tools": TOOLS, **more}
    (choice,) = send(door.http, "/v1/chat/completions", asked).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "now"]
    told = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
    asked["messages"] = [*MESSAGES, choice["message"], *told]
    assert send(door.http, "/v1/chat/completions", asked).json()["choices"][0]["message"]["content"] == "{}"
    first, second = (Tokenizer.from_folder(TINY).decode(record.task["prompt"]) for record in answering.records)
    assert first.startswith("[system]You can call functions.")
    assert '<tool_call>\n{"name": "weather", "arguments": {"place": "}{"}}\n</tool_call>' in second
    assert second.endswith("[user]<tool_response>\nrain\n</tool_response>\n<tool_response>\nrain\n</tool_response>")
    flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    text: Any = {"text": {"format": {"type": "json_schema", **ANSWER}}} if more else {}
    response = door.openai.responses.create(model=model, input="Rain?", tools=flat, **text)
    assert response.status == "completed"
    counted = door.openai.responses.input_tokens.count(model=model, input="Rain?", tools=flat, **text)
    assert counted.input_tokens == len(answering.records[-1].task["prompt"])


def test_tools_that_are_too_large_are_refused_by_name(calls: str, http: httpx.Client) -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"enum": ["x" * 40]} for i in range(800)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": wide}} for i in range(4)]
    answer = send(http, "/v1/chat/completions", {"model": calls, "messages": MESSAGES, "tools": tools})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "at most 131072" in answer.json()["error"]["message"]
    # What describes them is in the prompt alone.
    del tools[1:]
    wide["properties"] = {f"p{i}": {"type": "string", "description": "y" * 500} for i in range(100)}
    answer = send(http, "/v1/chat/completions", {"model": calls, "messages": MESSAGES, "tools": tools})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_header_says_which_keywords_of_a_tool_are_not_followed(
    calls: str, http: httpx.Client, answering: Answering
) -> None:
    inner = {"type": "array", "uniqueItems": True}
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"é\r\nx: y": inner}}}
    body = {"model": calls, "messages": MESSAGES, "tools": [{"type": "function", "function": function}]}
    for stream in (False, True):
        answering.scripts = [says(*PIECES)]
        answer = send(http, "/v1/chat/completions", body | {"stream": stream})
        assert answer.headers["penstock-warning"] == (
            r"tools[0].function.parameters: these keywords are not followed: properties.\u00e9\r\nx: y.uniqueItems"
        )
    answering.scripts = [says(*PIECES)]
    assert "penstock-warning" not in send(http, "/v1/chat/completions", body | {"tools": TOOLS}).headers
    letter = {"type": "object", "$comment": "penstock:0"}
    answering.scripts = [says(*PIECES)]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": letter}}]
    warning = send(http, "/v1/chat/completions", body | {"tools": tools}).headers["penstock-warning"]
    assert warning.startswith("tools[0].function.parameters is followed to the letter")
