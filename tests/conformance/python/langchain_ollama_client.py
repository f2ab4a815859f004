"""LangChain's ChatOllama, OllamaLLM and OllamaEmbeddings against the gateway that the first argument names, which
serves `tiny`, or the embedder that the second names. A script for `.venv/clients`: what came is printed as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel, Field

QUESTION = HumanMessage("Will it rain in Bern?")
TEXTS = ["A penstock feeds a turbine.", "rain"]


@tool
def weather(city: Literal["Bern", "Oslo"], days: int) -> str:
    """The weather of a city."""
    return f"It rains in {city} for {days} days."


class Person(BaseModel):
    """Who wrote it."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


async def tried(url: str) -> dict[str, Any]:
    model = ChatOllama(model="tiny", base_url=url, temperature=0, num_predict=60, validate_model_on_init=True)
    called = AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Bern", "days": 2}, "id": "1"}])
    history = [QUESTION, called, ToolMessage("rain", tool_call_id="1", name="weather")]
    whole = model.invoke([QUESTION])
    person = model.with_structured_output(Person).invoke([QUESTION])
    assert isinstance(person, Person)
    text = OllamaLLM(model="tiny", base_url=url, temperature=0, num_predict=60)
    return {
        "texts": [
            whole.text,
            "".join(piece.text for piece in model.stream([QUESTION])),
            (await model.ainvoke([QUESTION])).text,
        ],
        "usage": whole.usage_metadata,
        "reason": whole.response_metadata["done_reason"],
        "with tools": isinstance(model.bind_tools([weather]).invoke(history).content, str),
        "person": person.model_dump(),
        "llm": [text.invoke("def f("), "".join(text.stream("def f("))],
    }


def embedded(url: str, model: str) -> dict[str, Any]:
    client = OllamaEmbeddings(model=model, base_url=url)
    return {"documents": client.embed_documents(TEXTS), "query": client.embed_query(TEXTS[0])}


print(json.dumps(asyncio.run(tried(sys.argv[1])) if len(sys.argv) == 2 else embedded(*sys.argv[1:])))
