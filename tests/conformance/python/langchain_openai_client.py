"""LangChain's ChatOpenAI against the gateway that the first argument names; the second is what is tried, the third the
endpoint: `responses` or `chat`. A script for `.venv/clients`: what came is printed as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

PROMPTS = ("import ", "def f(")
QUESTION = HumanMessage("Will it rain in Bern?")
ONCE: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}


@tool
def weather(city: Literal["Bern", "Oslo"], days: int) -> str:
    """The weather of a city."""
    return f"It rains in {city} for {days} days."


class Person(BaseModel):
    """Who wrote it."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def model_at(url: str, endpoint: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="tiny",
        base_url=f"{url}/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_tokens=120,  # type: ignore[call-arg]
        max_retries=0,
        timeout=180,
        use_responses_api=endpoint == "responses",
        **more,
    )


def loop(model: ChatOpenAI) -> dict[str, Any]:
    """A call, its output, and an answer."""
    messages: list[Any] = [QUESTION]
    called = model.bind_tools([weather], **ONCE).invoke(messages)
    messages += [called, *(weather.invoke(call) for call in called.tool_calls)]
    answer = model.bind_tools([weather], tool_choice="none").invoke(messages)
    return {"calls": [call["args"] for call in called.tool_calls], "answer": answer.text, "said": messages[-1].content}


def streamed(model: ChatOpenAI) -> dict[str, Any]:
    """The same, in pieces."""
    pieces = [*model.bind_tools([weather], **ONCE).stream([QUESTION])]
    called: Any = sum(pieces[1:], pieces[0])
    assert isinstance(called, AIMessageChunk)
    tools = [weather.invoke(call) for call in called.tool_calls]
    answer = "".join(
        piece.text for piece in model.bind_tools([weather], tool_choice="none").stream([QUESTION, called, *tools])
    )
    return {"calls": [call["args"] for call in called.tool_calls], "pieces": len(pieces), "answer": answer}


def by_id(model: ChatOpenAI) -> dict[str, Any]:
    """Only what is new is sent: `previous_response_id` stands for the rest."""
    model = model.model_copy(update={"use_previous_response_id": True})
    called = model.bind_tools([weather], **ONCE).invoke([QUESTION])
    answer = model.invoke([QUESTION, called, *(weather.invoke(call) for call in called.tool_calls)])
    assert isinstance(answer, AIMessage)
    return {"calls": [call["args"] for call in called.tool_calls], "id": answer.response_metadata["id"]}


def structured(model: ChatOpenAI) -> dict[str, Any]:
    """An output of a class, in each way to ask for it."""
    return {
        method: [
            model.with_structured_output(Person, method=method, strict=strict).invoke("Who wrote it?").model_dump()
            for strict in (None, True)
        ]
        for method in ("json_schema", "function_calling")
    }


def beside_tools(model: ChatOpenAI) -> dict[str, Any]:
    """A class for the answer, beside tools."""
    with_both = model.with_structured_output(Person, tools=[weather], strict=True, include_raw=True)
    answer: Any = with_both.invoke("Who wrote it?")
    return {
        "parsed": None if answer["parsed"] is None else answer["parsed"].model_dump(),
        "calls": answer["raw"].tool_calls,
    }


def asynchronous(model: ChatOpenAI) -> dict[str, Any]:
    async def batch() -> list[str]:
        chats = [[SystemMessage("Be brief."), HumanMessage(prompt)] for prompt in PROMPTS]
        return [answer.text for answer in await model.abatch(chats)]

    return {
        "answers": asyncio.run(batch()),
        "alone": [model.invoke([SystemMessage("Be brief."), HumanMessage(one)]).text for one in PROMPTS],
    }


TRIALS: dict[str, Callable[[ChatOpenAI], dict[str, Any]]] = {
    one.__name__: one for one in (loop, streamed, by_id, structured, beside_tools, asynchronous)
}

if __name__ == "__main__":
    url, names, endpoint = sys.argv[1:]
    print(json.dumps({name: TRIALS[name](model_at(url, endpoint)) for name in names.split(",")}))
