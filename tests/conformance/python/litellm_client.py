"""LiteLLM against the gateway that the first argument names. A script for `.venv/clients`: what came is printed as
JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# Else it looks for a table of prices on the web while it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "Will it rain in Bern?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
#: One call, which is not cut.
ONCE: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}


class Person(BaseModel):
    """Who wrote it."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def chats(asked: dict[str, Any]) -> dict[str, Any]:
    """An answer in one piece and streamed, a call with its output, an object, and by a router."""
    asked = {**asked, "model": "openai/tiny", "messages": MESSAGES, "max_tokens": 60}
    whole = litellm.completion(**asked)
    pieces = [*litellm.completion(**asked, stream=True, stream_options={"include_usage": True})]
    rebuilt = litellm.stream_chunk_builder(pieces)
    tools = [{"type": "function", "function": FUNCTION}]
    called = litellm.completion(**{**asked, **ONCE, "max_tokens": 200}, tools=tools).choices[0].message
    (call,) = called.tool_calls
    output = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    history = [*MESSAGES, called.model_dump(), output]
    answer = litellm.completion(**{**asked, "messages": history}, tools=tools, tool_choice="none")
    person = litellm.completion(**{**asked, "max_tokens": 200}, response_format=Person)
    of_router = {
        "model_name": "mine",
        "litellm_params": {name: asked[name] for name in ("model", "api_base", "api_key")},
    }
    routed = litellm.Router(model_list=[of_router], num_retries=0).completion(
        model="mine", messages=MESSAGES, max_tokens=60, temperature=0
    )
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices),
        "pieces": len(pieces),
        "tokens": [whole.usage.completion_tokens, rebuilt.usage.completion_tokens],
        "call": [call.function.name, json.loads(call.function.arguments)],
        "answer": answer.choices[0].message.content,
        "person": json.loads(person.choices[0].message.content),
        "routed": routed.choices[0].message.content,
    }


def responses(asked: dict[str, Any]) -> dict[str, Any]:
    """The same of Responses."""
    asked = {**asked, "model": "openai/tiny", "input": "Will it rain in Bern?", "max_output_tokens": 60}
    whole = litellm.responses(**asked)
    events = [event.model_dump() for event in litellm.responses(**asked, stream=True)]
    called = litellm.responses(**{**asked, **ONCE, "max_output_tokens": 200}, tools=[{"type": "function", **FUNCTION}])
    (call,) = called.output
    return {
        "whole": whole.output[0].content[0].text,
        "streamed": "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta"),
        "call": [call.name, json.loads(call.arguments)],
    }


def texts(asked: dict[str, Any]) -> dict[str, Any]:
    """A text that goes on."""
    answer = litellm.text_completion(model="text-completion-openai/tiny", prompt="def f(", max_tokens=8, **asked)
    return {"text": answer.choices[0].text, "tokens": answer.usage.completion_tokens}


def refused(asked: dict[str, Any]) -> dict[str, Any]:
    """What is wrong is an error of the kind that is meant for it."""
    try:
        litellm.completion(**{**asked, "temperature": -1}, model="openai/tiny", messages=MESSAGES)
    except litellm.BadRequestError as error:
        return {"refused": str(error)}
    return {}


if __name__ == "__main__":
    (url,) = sys.argv[1:]
    litellm.telemetry, litellm.suppress_debug_info = False, True
    every = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "num_retries": 0, "timeout": 180}
    print(json.dumps({"chats": chats(every), "responses": responses(every), "texts": texts(every), **refused(every)}))
