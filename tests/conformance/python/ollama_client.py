"""Ollama's own client against the gateway that the first argument names, which serves `tiny`, or the embedder that the
second names. A script for `.venv/clients`: what came is printed as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from ollama import AsyncClient, Client, ResponseError

QUESTION = {"role": "user", "content": "Write f."}
OPTIONS = {"temperature": 0, "num_predict": 12}
PLACE = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]}


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"It rains in {city}."


def tried(url: str) -> dict[str, Any]:
    client = Client(url)
    client.pull("tiny")
    (listed,) = client.list().models
    shown = client.show(listed.model or "")
    whole = client.chat(model=listed.model or "", messages=[QUESTION], options=OPTIONS)
    pieces = [*client.chat(model="tiny", messages=[QUESTION], options=OPTIONS, stream=True)]
    generated = client.generate(model="tiny", prompt=QUESTION["content"], options=OPTIONS)
    streamed = [*client.generate(model="tiny", prompt=QUESTION["content"], options=OPTIONS, stream=True)]
    place = client.chat(model="tiny", messages=[QUESTION], format=PLACE, options={"temperature": 0})
    again = [QUESTION, whole.message, {"role": "tool", "content": "rain", "tool_name": "weather"}, QUESTION]
    answer = client.chat(model="tiny", messages=again, tools=[weather], options=OPTIONS, think=False)
    scored = client.chat(model="tiny", messages=[QUESTION], options=OPTIONS, logprobs=True, top_logprobs=2)
    return {
        "listed": [listed.model, shown.capabilities, [model.model for model in client.ps().models]],
        "loads": client.generate(model="tiny").done_reason,
        "texts": [whole.message.content, "".join(piece.message.content or "" for piece in pieces)],
        "generated": [generated.response, "".join(piece.response or "" for piece in streamed)],
        "reasons": [whole.done_reason, pieces[-1].done_reason, generated.done_reason, streamed[-1].done_reason],
        "counts": [whole.eval_count, pieces[-1].eval_count, whole.prompt_eval_count, pieces[-1].prompt_eval_count],
        "place": json.loads(place.message.content or ""),
        "goes on": isinstance(answer.message.content, str),
        "scored": [len(entry.top_logprobs or ()) for entry in scored.logprobs or ()],
        "awaited": asyncio.run(awaited(url)),
        "refused": [
            refused(lambda: client.chat(model="none", messages=[QUESTION])),
            refused(lambda: [*client.chat(model="tiny", messages=[QUESTION], options={"top_p": 2}, stream=True)]),
            refused(lambda: client.delete("tiny")),
        ],
    }


async def awaited(url: str) -> str:
    pieces = await AsyncClient(url).chat(model="tiny", messages=[QUESTION], options=OPTIONS, stream=True)
    return "".join([piece.message.content or "" async for piece in pieces])


def refused(call: Callable[[], object]) -> list[Any]:
    try:
        call()
    except ResponseError as error:
        return [error.status_code, error.error]
    return []


def embedded(url: str, model: str) -> dict[str, Any]:
    client = Client(url)
    texts = ["A penstock feeds a turbine.", "rain"]
    both = client.embed(model=model, input=texts)
    return {
        "both": both.embeddings,
        "one": client.embed(model=model, input=texts[0]).embeddings,
        "cut": client.embed(model=model, input=texts, dimensions=16).embeddings,
        "older": client.embeddings(model=model, prompt=texts[0]).embedding,
        "tokens": both.prompt_eval_count,
        "can": client.show(model).capabilities,
    }


print(json.dumps(tried(sys.argv[1]) if len(sys.argv) == 2 else embedded(*sys.argv[1:])))
