"""Anthropic's client against the gateway that the first argument names. A script for `.venv/clients`: what came is
printed as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import anthropic

QUESTION: Any = {"role": "user", "content": "Will it rain in Bern?"}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "weather", "description": "The weather.", "input_schema": PLACE}]
ONCE: Any = {"type": "any", "disable_parallel_tool_use": True}
#: This client has no parameter for a temperature any more.
GREEDY: dict[str, Any] = {"temperature": 0}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 120, "messages": [QUESTION], "extra_body": GREEDY}


def refused(client: anthropic.Anthropic, **fields: Any) -> list[Any]:
    try:
        client.messages.create(**ASKED | fields)
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.type, error.error_code, error.request_id == error.body["request_id"]]  # type: ignore[index,call-overload]
    return []


def text_of(client: anthropic.Anthropic, *turns: Any, **fields: Any) -> Any:
    """A text in one piece and as a stream, and how both end."""
    asked = ASKED | {"messages": [QUESTION, *turns], "max_tokens": 20} | fields
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    used = [
        (message.usage.output_tokens, message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0))
        for message in (whole, last)
    ]
    return {
        "texts": ["".join(block.text for block in whole.content if block.type == "text"), text],
        "ends": [[message.stop_reason, message.stop_sequence] for message in (whole, last)],
        "used": used,
        "counted": client.messages.count_tokens(model="tiny", messages=asked["messages"]).input_tokens,
    }


def calls(client: anthropic.Anthropic) -> Any:
    """A call, its result, and an answer; the call streamed, too."""
    whole = client.messages.create(tools=TOOLS, tool_choice=ONCE, **ASKED)
    with client.messages.stream(tools=TOOLS, tool_choice=ONCE, **ASKED) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_message()
    (call,) = (block for block in whole.content if block.type == "tool_use")
    (streamed,) = (block for block in last.content if block.type == "tool_use")
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}]
    turns = [QUESTION, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    answer = client.messages.create(**ASKED | {"messages": turns}, tools=TOOLS, tool_choice={"type": "none"})
    return {
        "calls": [[call.name, call.input], [streamed.name, streamed.input]],
        "ends": [whole.stop_reason, last.stop_reason],
        "kinds": kinds,
        "answer": [block.type for block in answer.content],
    }


@anthropic.beta_tool
def place(city: Literal["Bern", "Oslo"]) -> str:
    """Where a city is."""
    return f"{city} is far."


def runner(client: anthropic.Anthropic) -> list[Any]:
    """A turn of the client's loop of calls, which asks for a thread at first."""
    turns = client.beta.messages.tool_runner(tools=[place], tool_choice=ONCE, max_iterations=1, **ASKED)
    return [turn.stop_reason for turn in turns]


def main(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    told = {
        "text": text_of(client),
        "prefilled": text_of(client, {"role": "assistant", "content": "def f("}),
        "calls": calls(client),
        "runner": runner(client),
        "refused": [refused(client, model="huge"), refused(client, extra_body={"temperature": -1})],
        "models": [model.id for model in client.models.list(limit=1)],
    }
    told["stop"] = told["text"]["texts"][0][5:8]
    told["stopped"] = text_of(client, stop_sequences=[told["stop"]])
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
