"""What a response may not ask for: refused by name, before anything is written."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract.task import Task
from producers.gateway.http.errors import Problem
from producers.gateway.openai.responses.request import MAX_LOGPROBS, bounded
from tests.producers.gateway.openai.conftest import nothing_written, send
from tests.producers.gateway.openai.test_parameters import http, model, valkey  # noqa: F401 - one gateway for all

_PART = {"type": "input_image", "image_url": "https://example.com/a.png"}
_OUTPUT = {"type": "function_call_output", "call_id": "a"}
_TOOL = {"type": "function", "name": "f"}
_SCHEMA = {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}
#: (fields, param, code, what the message says)
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"input": None}, "input", "missing_required_parameter", "missing"),
    ({"input": 5}, "input", "invalid_type", "text or a list"),
    ({"input": []}, "input", "empty_array", "at least one"),
    ({"input": [5]}, "input[0]", "invalid_type", "role and content"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value", "developer"),
    ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role", "invalid_value", "developer"),
    ({"input": [{"role": "user"}]}, "input[0].content", "invalid_type", "null"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content", "invalid_type", "text parts"),
    ({"input": [{"role": "user", "content": [_PART]}]}, "input[0].content[0].type", "invalid_value", "input_image"),
    ({"input": [{"role": "user", "content": "x", "nme": 1}]}, "input[0].nme", "unknown_parameter", "nme"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "item_not_found", "send the item itself"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id", "invalid_type", "a string"),
    ({"input": [{"type": "mcp_call", "id": "x"}]}, "input[0].type", "unsupported_parameter", "mcp_call"),
    (
        {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}]},
        "input[0].summary",
        "unsupported_parameter",
        "summary",
    ),
    (
        {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
        "input[0].encrypted_content",
        "unsupported_parameter",
        "x",
    ),
    (
        {"input": [{"type": "reasoning", "content": [{"type": "text", "text": "x"}]}]},
        "input[0].content[0]",
        "invalid_value",
        "reasoning_text",
    ),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "invalid_type", "a string"),
    ({"input": [{**_OUTPUT, "output": None}]}, "input[0].output", "invalid_type", "text"),
    ({"input": [{**_OUTPUT, "output": [_PART]}]}, "input[0].output[0].type", "invalid_value", "input_image"),
    ({"input": [{**_OUTPUT, "outptu": "x"}]}, "input[0].outptu", "unknown_parameter", "call_id and output"),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]},
        "input[0].arguments",
        "invalid_type",
        "null",
    ),
    ({"input": [{"type": ["message"]}]}, "input[0].type", "unsupported_parameter", "function_call_output"),
    ({"input": "\ud800"}, "input", "invalid_value", "lone surrogate"),
    ({"input": "x " * 3000}, "input", "context_length_exceeded", "lower max_output_tokens"),
    ({"instructions": 5}, "instructions", "invalid_type", "a string"),
    ({"instructions": "\ud800"}, "instructions", "invalid_value", "lone surrogate"),
    ({"user": "\ud800"}, "user", "invalid_value", "lone surrogate"),
    ({"prompt_cache_key": "\ud800"}, "prompt_cache_key", "invalid_value", "lone surrogate"),
    ({"messages": []}, "messages", "unknown_parameter", "/v1/responses takes them as input"),
    ({"max_tokens": 5}, "max_tokens", "unknown_parameter", "in /v1/responses max_output_tokens"),
    ({"response_format": {"type": "text"}}, "response_format", "unknown_parameter", "text.format"),
    ({"max_output_tokens": -1}, "max_output_tokens", "invalid_value", "-1"),
    ({"max_output_tokens": 5000}, "max_output_tokens", "context_length_exceeded", "1024"),
    ({"max_output_tokens": 5000, "truncation": "auto"}, "max_output_tokens", "context_length_exceeded", "1024"),
    ({"n": 2}, "n", "unknown_parameter", "n"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_value", "0 to 20"),
    ({"include": "x"}, "include", "invalid_type", "a list"),
    ({"include": ["all"]}, "include", "invalid_value", "message.output_text.logprobs"),
    ({"truncation": "middle"}, "truncation", "invalid_value", "auto or disabled"),
    ({"background": 1}, "background", "invalid_type", "true or false"),
    ({"background": True, "store": False}, "store", "invalid_value", "background is true"),
    ({"webhook": {"url": "https://example.com"}}, "webhook", "invalid_value", "background: true"),
    ({"webhook": {"url": "http://10.0.0.1/x"}, "background": True}, "webhook.url", "webhook_refused", "10.0.0.1"),
    ({"ttl": 59}, "ttl", "invalid_value", "30 days"),
    ({"ttl": 2592001}, "ttl", "invalid_value", "2592000"),
    ({"previous_response_id": 5}, "previous_response_id", "invalid_type", "a string"),
    ({"previous_response_id": "x"}, "previous_response_id", "previous_response_not_found", "(any more)"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value", "json_object"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "invalid_type", "an object"),
    ({"text": _SCHEMA}, "text.format", "invalid_value", "Unimplemented keys"),
    ({"text": _SCHEMA, "regex": "a"}, "regex", "invalid_value", "text.format and regex"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter", "medium"),
    ({"text": {"size": 1}}, "text.size", "unknown_parameter", "format"),
    ({"tools": {}}, "tools", "invalid_type", "at most 128"),
    ({"tools": ["x"]}, "tools[0]", "invalid_type", '"function" and name'),
    ({"tools": [_TOOL, {"type": "web_search"}]}, "tools[1].type", "unsupported_parameter", "web_search"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "unsupported_parameter", '"mcp"'),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_value", "1 to 64"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", "unknown_parameter", "name"),
    ({"tools": [_TOOL | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type", "invalid_value", "object"),
    ({"tools": [_TOOL | {"defer_loading": True}]}, "tools[0].defer_loading", "unknown_parameter", "strict"),
    ({"tools": [_TOOL, _TOOL]}, "tools", "invalid_value", "different names"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value", "unless there are tools"),
    ({"tools": [_TOOL], "tool_choice": _TOOL | {"name": "g"}}, "tool_choice", "invalid_value", "one of the tools: f"),
    ({"tools": [_TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "unsupported_parameter", "mcp"),
    (
        {"tools": [_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
        *("tool_choice.tools[0].type", "unsupported_parameter", '"mcp"'),
    ),
    ({"tools": [_TOOL], "tool_choice": ["auto"]}, "tool_choice", "invalid_value", "none, auto, required"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_type", "true or false"),
    ({"max_tool_calls": 3}, "max_tool_calls", "unsupported_parameter", "3"),
    ({"tools": [_TOOL], "regex": "a"}, "regex", "invalid_value", "one form"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", "unsupported_parameter", "has no reasoning"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "invalid_value", "minimal"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "unsupported_parameter", "the reasoning itself"),
    ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens", "unknown_parameter", "effort"),
    ({"thinking_budget": 5}, "thinking_budget", "unsupported_parameter", "has no reasoning"),
    ({"prompt": {"id": "x"}}, "prompt", "unsupported_parameter", "prompt"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter", "conv_1"),
    (
        {"stream": True, "stream_options": {"include_usage": True}},
        "stream_options.include_usage",
        "unknown_parameter",
        "",
    ),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
        "false",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code", "said"), REFUSED)
def test_by_name(
    http: httpx.Client,  # noqa: F811
    model: str,  # noqa: F811
    valkey: Redis,  # noqa: F811
    fields: dict[str, Any],
    param: str,
    code: str,
    said: str,
) -> None:
    answer = send(http, "/v1/responses", {"model": model, "input": "Write f.", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert said in error["message"]
    assert nothing_written(valkey)


@pytest.mark.parametrize(
    ("path", "param", "status"),
    [
        ("x", None, 404),
        ("resp_x", None, 404),
        ("resp_x/input_items", None, 404),
        ("resp_x?stream=yes", "stream", 400),
        ("resp_x?starting_after=3", "starting_after", 400),
        ("resp_x?stream=true&starting_after=-2", "starting_after", 400),
        ("resp_x?include[]=all", "include", 400),
        ("resp_x?include_obfuscation=true", "include_obfuscation", 400),
    ],
)
def test_queries_and_ids(http: httpx.Client, path: str, param: str | None, status: int) -> None:  # noqa: F811
    answer = http.get(f"/v1/responses/{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_log_probabilities_have_a_limit() -> None:
    """Whatever the context is; they are in memory as often as the stream has readers."""
    card = {"context_length": 100_000}
    task = Task(model="x", prompt=[1], logprobs=20)
    assert bounded(task, card).max_tokens == MAX_LOGPROBS // 21
    assert bounded(task, {"context_length": 100}).max_tokens == 99
    with pytest.raises(Problem) as caught:
        bounded(task.model_copy(update={"max_tokens": 7000}), card)
    assert caught.value.param == "top_logprobs"
