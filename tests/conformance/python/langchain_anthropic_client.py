"""LangChain's ChatAnthropic against the gateway that the first argument names. A script for `.venv/clients`: what came
is printed as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field


@tool
def weather(city: Literal["Bern", "Oslo"], days: int) -> str:
    """The weather of a city."""
    return f"It rains in {city} for {days} days."


class Person(BaseModel):
    """Who wrote it."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def main(url: str) -> None:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 120, "max_retries": 0}
    model = ChatAnthropic(model="tiny", base_url=url, api_key="none", **settings)  # type: ignore[arg-type]
    bound = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage("Will it rain?")]
    called = bound.invoke(messages)
    pieces = [*bound.stream(messages)]
    streamed: Any = sum(pieces[1:], pieces[0])
    assert isinstance(streamed, AIMessageChunk)
    messages += [called, *(weather.invoke(call) for call in called.tool_calls)]
    ways: tuple[Any, ...] = ("json_schema", "function_calling")
    people: list[Any] = [model.with_structured_output(Person, method=way).invoke("Who wrote it?") for way in ways]
    told = {
        "calls": [call["args"] for message in (called, streamed) for call in message.tool_calls],
        "answer": model.invoke(messages).text,
        "people": [person.model_dump() for person in people],
        "used": called.usage_metadata,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
