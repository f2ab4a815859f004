"""Anthropic's Messages over real HTTP: what is queued, what is answered, what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from producers.contract.record import Record
from producers.gateway.anthropic.request import PARAMETERS, read_message
from producers.gateway.http.errors import Problem
from producers.gateway.openai.reasoning import ReasoningRequest
from producers.gateway.tasks import large
from tests.processes import ROOT
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import CARD, Door, Make, Open
from tests.producers.gateway.openai.conftest import MESSAGES, Answering, ends, nothing_written, says, send
from tests.producers.gateway.openai.conftest import answering as answering  # the fixture
from tests.producers.gateway.openai.test_chat_tools import PIECES as CALLING
from tests.producers.gateway.openai.test_chat_tools import PLACE
from tests.producers.gateway.openai.test_chat_tools import calls as calls  # the fixture
from tests.producers.gateway.openai.test_reasoning import CASES
from tests.producers.gateway.openai.test_reasoning import PIECES as THINKING
from tests.producers.gateway.openai.test_reasoning import thinker as thinker  # the fixture
from tests.producers.gateway.test_keys import make as make  # the fixture
from tests.waiting import until

ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": MESSAGES}
CACHED = {"cache_control": {"type": "ephemeral"}}
VERSION = {"anthropic-version": "2023-06-01"}
TOOLS = [{"name": "weather", "input_schema": PLACE, **CACHED}, {"name": "now", "input_schema": {}}]
USED = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "Bern"}}
ONE = {"type": "text", "text": "a"}
CALL = {"role": "assistant", "content": [USED]}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}


@pytest.fixture
def caller(calls: str, shared_door: Door) -> Iterator[str]:
    """A model with a template that has tools. The gateway remembers no card of another test."""
    directory = shared_door.app.state.gateway.client.directory
    directory.forget(calls)
    yield calls
    directory.forget(calls)


def ask(http: httpx.Client, **fields: Any) -> httpx.Response:
    return send(http, "/v1/messages", ASKED | fields)


def events(answer: httpx.Response) -> list[Any]:
    """A stream's events, whose names are their types."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    read = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def message_of(answer: httpx.Response) -> Any:
    """The message that a stream tells."""
    start, ping, *between, delta, stop = events(answer)
    assert (ping["type"], stop["type"], delta["type"]) == ("ping", "message_stop", "message_delta")
    message = start["message"]
    for event in between:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"partial": ""})
            continue
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            arguments = block.pop("partial")
            block |= {"input": json.loads(arguments)} if block["type"] == "tool_use" else {}
            continue
        kind, text = event["delta"].values()
        block[{"input_json_delta": "partial"}.get(kind, kind.removesuffix("_delta"))] += text
    return message | delta["delta"] | {"usage": delta["usage"]}


def both_ways(http: httpx.Client, **fields: Any) -> Any:
    """The message in one piece, which is the one that a stream tells, but for ids."""
    answer = ask(http, **fields)
    assert answer.status_code == 200, answer.text
    whole, streamed = answer.json(), message_of(ask(http, **fields, stream=True))
    for message in (whole, streamed):
        assert message.pop("id").startswith("msg_")
        for block in message["content"]:
            assert block["type"] == "text" or block.pop("id", None) or block.pop("signature")
    assert streamed == whole
    return whole


def test_a_message_in_one_piece_and_as_events(http: httpx.Client, model: str, answering: Answering) -> None:
    message = both_ways(http, system=[ONE | CACHED], metadata={"user_id": "u"}, service_tier="standard_only")
    usage = message.pop("usage")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [{"type": "text", "text": "Hello, world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]) == (7, 3)
    assert (usage["cache_creation_input_tokens"], usage["service_tier"]) == (0, "standard")
    task = answering.records[0].task
    assert (task["max_tokens"], task["metadata"]) == (20, {"user_id": "u"})


def test_prompt_and_grammar_are_those_of_chat_completions(
    caller: str, http: httpx.Client, answering: Answering
) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", **CACHED}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, USED]},
        {"role": "user", "content": [RESULT | {"is_error": True}, {"type": "text", "text": "d"}]},
    ]
    asked = {"system": "s", "messages": turns, "tools": TOOLS}
    assert ask(http, **asked).status_code == 200
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Bern"}'}}
    chat = {
        "model": caller,
        "max_tokens": 20,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "c", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: rain"},
            {"role": "user", "content": "d"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
            {"type": "function", "function": {"name": "now", "parameters": {}}},
        ],
    }
    assert send(http, "/v1/chat/completions", chat).status_code == 200
    mine, theirs = (record.task for record in answering.records)
    assert (mine["prompt"], mine["grammar"]) == (theirs["prompt"], theirs["grammar"])
    counted = send(http, "/v1/messages/count_tokens", {"model": caller, **asked})
    assert counted.json() == {"input_tokens": len(mine["prompt"])}


def test_calls_are_blocks(caller: str, http: httpx.Client, answering: Answering) -> None:
    answering.scripts = [says(*CALLING)]
    message = both_ways(http, tools=TOOLS)
    assert message["content"] == [
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "name": "weather", "input": {"place": "}{"}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    answering.scripts = [says(*CALLING[:4], reason="length")]
    cut = ask(http, tools=TOOLS).json()
    assert (cut["content"][-1]["input"], cut["stop_reason"]) == ({}, "max_tokens")
    deep = '{"a": ' + "[" * 3000 + "]" * 3000 + "}"
    answering.scripts = [says(f'<tool_call>\n{{"name": "now", "arguments": {deep}}}\n</tool_call>')]
    assert f'"input":{deep}}}' in ask(http, tools=TOOLS).text, "Python reads no JSON of this depth"
    answering.scripts = [says(f'<tool_call>\n{{"name": "now", "arguments": {deep[:3000]}', reason="length")]
    assert '"input":{}}' in ask(http, tools=TOOLS).text
    answering.scripts = [says('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "now"}):
        assert ask(http, tools=TOOLS, tool_choice=choice).json()["stop_reason"] == "tool_use"
    single, named = (record.task["grammar"] for record in answering.records[-2:])
    assert ("weather" in single, ")*" in single.split("\n")[0], "weather" in named) == (True, False, False)
    answering.scripts = [says("No.")]
    assert ask(http, tools=TOOLS, tool_choice={"type": "none"}).json()["stop_reason"] == "end_turn"
    assert "grammar" not in answering.records[-1].task


def test_thinking_is_in_blocks_where_it_is_asked_for(thinker: str, http: httpx.Client, answering: Answering) -> None:
    answering.scripts = [says(*THINKING)]
    message = both_ways(http, thinking={"type": "adaptive"})
    assert [block[block["type"]] for block in message["content"]] == ["Let me see.", "It is 4."]
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 5}
    thinking = answering.records[0].task
    hidden = ask(http, thinking={"type": "adaptive", "display": "omitted"}).json()
    assert hidden["content"] == [{"type": "text", "text": "It is 4."}]
    answering.scripts = [says("It is 4.")]
    back = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, ONE]},
    ]
    for fields in ({}, {"thinking": {"type": "disabled"}}, {"messages": [*back, *MESSAGES]}):
        assert [block["text"] for block in both_ways(http, **fields)["content"]] == ["It is 4."]
        assert len(answering.records[-1].task["prompt"]) > len(thinking["prompt"]), "the template closes the thinking"


def test_a_budget_of_thinking_is_that_of_chat_completions() -> None:
    asked = ASKED | {"thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "max"}}
    assert read_message(asked, None).reasoning == ReasoningRequest(
        effort="xhigh", budget=9, parameter="thinking", effort_name="output_config.effort"
    )


def test_reasoning_that_cannot_be_turned_off_is_left_out_unless_it_was_to_be_off() -> None:
    """A template opens it, and no token closes it."""
    marked_by_text = CASES["text"].model
    unasked, off = (read_message(ASKED | more, None).reasoning for more in ({}, {"thinking": {"type": "disabled"}}))
    hidden = marked_by_text.reasoning(unasked, opened=True)
    assert hidden.syntax is not None
    assert (hidden.budget, hidden.syntax.include) == (None, False)
    with pytest.raises(Problem, match=r"^thinking cannot be kept"):
        marked_by_text.reasoning(off, opened=True)
    little = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    with pytest.raises(Problem, match=r"^output_config\.effort cannot be kept"):
        marked_by_text.reasoning(read_message(ASKED | little, None).reasoning, opened=True)


def test_stop_sequences_are_told_and_are_not_in_the_text(http: httpx.Client, model: str, answering: Answering) -> None:
    answering.scripts = [says("One", " two END")]
    message = both_ways(http, stop_sequences=["ND", " END"], include_stop=False)
    assert (message["content"][0]["text"], message["stop_reason"]) == ("One two", "stop_sequence")
    assert message["stop_sequence"] == " END"
    assert answering.records[0].task["include_stop"] is True
    answering.scripts = [says("One", " END", reason="length")]
    message = both_ways(http, stop_sequences=["END"])
    assert (message["content"][0]["text"], message["stop_reason"]) == ("One END", "max_tokens")


def test_a_large_message_waits_in_the_store_and_is_the_same(
    http: httpx.Client, model: str, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering.scripts = [says(*["word "] * 99, " END")]
    small = ask(http, stop_sequences=["END"]).json()
    monkeypatch.setattr(large, "LARGE", 100)
    assert ask(http, stop_sequences=["END"]).json() | {"id": small["id"]} == small
    assert (small["content"][0]["text"], small["stop_sequence"]) == ("word " * 99 + " ", "END")


def test_a_last_turn_of_the_assistant_goes_on(http: httpx.Client, model: str, answering: Answering) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "def f("}]
    assert ask(http, messages=begun).status_code == 200
    chat = {"model": model, "messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    assert send(http, "/v1/chat/completions", chat).status_code == 200
    assert ask(http, messages=[*MESSAGES, {"role": "assistant", "content": ""}]).status_code == 200
    prefilled, theirs, empty = (record.task["prompt"] for record in answering.records)
    assert prefilled == theirs
    assert len(empty) != len(prefilled)


def test_an_output_longer_than_the_context_is_cut_there(http: httpx.Client, model: str, answering: Answering) -> None:
    """Agents ask for the most that Anthropic's models write."""
    context = CARD.context_length

    def fills_the_context(worker: FakeWorker, record: Record) -> None:
        worker.append(record.id, 0, ["a"], finish_reason="length")
        worker.finish(record.id, [1], reasons=["length"], prompt_tokens=context - 1)

    answering.scripts = [fills_the_context]
    assert ask(http, max_tokens=64_000).json()["stop_reason"] == "model_context_window_exceeded"
    assert "max_tokens" not in answering.records[0].task


def test_a_caller_who_leaves_cancels_its_message(http: httpx.Client, model: str, valkey: Redis) -> None:
    with http.stream("POST", "/v1/messages", json=ASKED | {"stream": True}) as answer:
        lines = answer.iter_lines()
        start = next(line for line in lines if line.startswith("data: "))
        task = keys.task(json.loads(start.removeprefix("data: "))["message"]["id"].removeprefix("msg_"))
        assert valkey.hget(task, "status") == b"queued"
    until(lambda: valkey.hget(task, "status") == b"cancelled")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"temperature": -1}, "temperature is -1"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"n": 2}, 'unknown parameter "n"'),
    ({"include_stop": True}, "include_stop is true, which is not offered here"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options is"),
    ({"use_beam_search": True}, "use_beam_search is true, which is not offered here"),
    ({"container": "x"}, 'container is "x", which is not offered here'),
    ({"mcp_servers": [{}]}, "mcp_servers is"),
    ({"system": [{"type": "image"}]}, 'system[0].type is "image", which is not offered here; there is text'),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "a conversation begins with the user's turn"),
    ({"messages": [{"role": "tool", "content": "a"}]}, 'messages[0].role is "tool"'),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is []"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is null"),
    ({"messages": [{"role": "user", "content": [ONE, {"type": "document"}]}]}, 'content[1].type is "document"'),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, 'messages[0].content[0].tool_use_id is "toolu_1"'),
    ({"messages": [*MESSAGES, CALL]}, 'messages[1].content[0]: the tool_use "toolu_1" has no tool_result'),
    ({"messages": [*MESSAGES, CALL, *MESSAGES]}, "has no tool_result"),
    ({"messages": [*MESSAGES, {"role": "assistant", "content": [USED, USED]}]}, "content[1].id is"),
    ({"messages": [*MESSAGES, {"role": "assistant", "content": [{**USED, "input": "x"}]}]}, 'input is "x"'),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 'tools[0].type is "web_search_20250305"'),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema is []"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, 'tools[0].input_schema.type is "string"'),
    ({"tools": TOOLS * 2}, "functions of different names"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, 'tool_choice.name is "x"'),
    ({"tools": TOOLS, "tool_choice": {"type": "each"}}, 'tool_choice.type is "each"'),
    ({"tool_choice": {"type": "any"}}, "unless there are tools"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "has no reasoning"),
    ({"thinking": {"type": "often"}}, 'thinking.type is "often"'),
    ({"output_config": {"effort": "huge"}}, 'output_config.effort is "huge"'),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is null"),
    ({"output_config": {"format": {"type": "text", "schema": {}}}}, 'output_config.format.type is "text"'),
    ({"output_config": {"format": {"strict": True}}}, 'unknown parameter "output_config.format.strict"'),
    ({"system": "a b c d " * 500}, "prompt is too long: This model's maximum context length is"),
    ({"surprise": 1}, 'unknown parameter "surprise"; see docs/use/anthropic.md'),
    ({"reasoning_effort": "low"}, "here it is output_config.effort"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_bad_input_is_refused_by_name(
    http: httpx.Client, model: str, valkey: Redis, fields: dict[str, Any], named: str
) -> None:
    answer = ask(http, **fields)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert named in error["error"]["message"]
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert nothing_written(valkey)


def test_a_thread_is_refused_so_that_its_client_goes_on_without(http: httpx.Client, model: str) -> None:
    going_on = {"thread": {"type": "continue", "previous_message_id": "msg_1"}, "messages": []}
    for thread in ({"thread": {"type": "create"}}, going_on):
        answer = ask(http, **thread)
        assert answer.status_code == 400
        assert answer.json()["error"]["details"]["error_code"] == "thread_unsupported_request"


def test_errors_have_anthropics_form_whoever_makes_them(
    open_door: Open, make: Make, model: str, answering: Answering
) -> None:
    http = open_door(auth="keys", max_body=2000).http
    key, reader = ({"x-api-key": make("acme", scopes=(scope,))} for scope in ("submit", "read"))

    def kind(headers: dict[str, str], path: str = "/v1/messages", **fields: Any) -> tuple[int, str, str]:
        answer = http.post(path, json=ASKED | fields, headers=headers)
        error = answer.json()["error"]
        return answer.status_code, error["type"], error["details"]["error_code"]

    assert kind({}) == (401, "authentication_error", "missing_api_key")
    assert kind(reader) == (403, "permission_error", "missing_scope")
    assert kind(key, model="x") == (404, "not_found_error", "model_not_found")
    other = {"x-api-key": make("acme", scopes=("submit",), models=("other",))}
    assert kind(other, "/v1/messages/count_tokens") == (403, "permission_error", "model_not_allowed")
    flex = {"x-api-key": make("acme", scopes=("submit",), tiers=("flex",))}
    assert kind(flex) == (403, "permission_error", "tier_not_allowed")
    assert http.post("/v1/messages/count_tokens", json=ASKED, headers=flex).status_code == 200
    assert kind(key, system="x" * 2000) == (413, "request_too_large", "body_too_large")
    assert kind(key, path="/v1/messages/batches") == (404, "not_found_error", "not_found")
    assert kind(key | VERSION, path="/v1/files") == (404, "not_found_error", "not_found")
    for path in ("/v1/v1/messages", "/v1/v1/models"):
        assert "ends without /v1" in http.post(path, headers=key | VERSION).json()["error"]["message"]
    failed = {"code": "engine_error", "message": "No."}
    answering.scripts = [ends(status="failed", error=failed)]
    assert kind(key) == (500, "api_error", "engine_error")
    *_, last = events(http.post("/v1/messages", json=ASKED | {"stream": True}, headers=key))
    assert (last["type"], last["error"]["message"]) == ("error", "No.")
    assert http.post("/v1/messages?a" + "&a" * 300, headers=key).json()["error"]["type"] == "invalid_request_error"


def test_models_are_listed_as_its_clients_take_them(http: httpx.Client, model: str) -> None:
    page = http.get("/v1/models", params={"limit": 1}, headers=VERSION).json()
    (listed,) = page["data"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (model, model, False)
    assert (listed["type"], listed["id"], listed["created_at"][-1]) == ("model", model, "Z")
    assert http.get(f"/v1/models/{model}", headers=VERSION).json() == listed
    assert http.get("/v1/models", params={"after_id": model}, headers=VERSION).json()["data"] == []
    assert http.get("/v1/models", params={"before_id": model}, headers=VERSION).json()["data"] == []
    bad = http.get("/v1/models", params={"limit": "0"}, headers=VERSION)
    assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error")
    assert http.get("/v1/models").json()["object"] == "list"


def test_every_parameter_is_named() -> None:
    page = (ROOT / "docs" / "use" / "anthropic.md").read_text()
    for name in (*PARAMETERS.endpoint_schemas, *PARAMETERS.renamed, *PARAMETERS.not_offered):
        assert f"`{name}`" in page
