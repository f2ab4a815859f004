"""Agents of Pydantic AI against the gateway that the first argument names; the second lists what is tried, the third is
the endpoint: `responses` or `chat`. A script for `.venv/clients`: what came is printed as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, RunContext, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings, ToolOrOutput

SETTINGS = ModelSettings(temperature=0, max_tokens=150, timeout=180, parallel_tool_calls=False)
QUESTION = "Will it rain in Bern?"
Made = dict[str, Any]


class Person(BaseModel):
    """Who wrote it."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


class City(BaseModel):
    """Where it was written."""

    city: str = Field(max_length=20)


def model_at(url: str, endpoint: str) -> Any:
    made = {"responses": OpenAIResponsesModel, "chat": OpenAIChatModel}[endpoint]
    return made("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def weather(city: Literal["Bern", "Oslo"], days: int) -> str:
    """The weather of a city."""
    return f"It rains in {city} for {days} days."


def kinds_of(result: Any) -> list[str]:
    return [part.part_kind for message in result.all_messages() for part in message.parts]


async def tool_output(model: Any) -> Made:
    """The output is the call of a tool: the way of agents without settings of their own."""
    result = await Agent(model, output_type=Person, model_settings=SETTINGS).run("Who wrote it?")
    return {"output": result.output.model_dump(), "kinds": kinds_of(result)}


async def one_of_several(model: Any) -> Made:
    agent: Any = Agent(model, output_type=[ToolOutput(Person), ToolOutput(City)], model_settings=SETTINGS)
    result = await agent.run("Who wrote it?")
    return {"output": result.output.model_dump(), "type": type(result.output).__name__}


async def native_output(model: Any) -> Made:
    """The output is JSON of a schema, with a tool beside it that may be called first."""
    agent = Agent(
        model, output_type=NativeOutput(Person), model_settings=SETTINGS, tools=[weather], instructions="Short."
    )
    result = await agent.run("Who wrote it?")
    return {"output": result.output.model_dump(), "kinds": kinds_of(result)}


async def prompted_output(model: Any) -> Made:
    """The schema is in the prompt alone; JSON is asked for without it."""
    result = await Agent(model, output_type=PromptedOutput(City), model_settings=SETTINGS).run("Where?")
    return {"output": result.output.model_dump()}


class CallsFirst(AbstractCapability[None]):
    """The first step has to call a tool: the bundled model would not by itself."""

    def get_model_settings(self) -> Callable[[RunContext[None]], ModelSettings]:
        return lambda context: ModelSettings(tool_choice=["weather"] if context.run_step == 1 else "auto")


async def loop(model: Any) -> Made:
    """A call, what it returned, then the output's own call."""
    agent = Agent(
        model, output_type=ToolOutput(Person), tools=[weather], capabilities=[CallsFirst()], model_settings=SETTINGS
    )
    result = await agent.run(QUESTION)
    again = await agent.run("And in Oslo?", message_history=result.all_messages())
    return {"kinds": kinds_of(result), "output": result.output.model_dump(), "again": again.output.model_dump()}


def population(city: Literal["Bern", "Oslo"]) -> int:
    """How many live there."""
    return 7


class CallsSome(AbstractCapability[None]):
    """The first step may call one of the two tools, or make the output."""

    def get_model_settings(self) -> Callable[[RunContext[None]], ModelSettings]:
        some = ToolOrOutput(function_tools=["weather"])
        return lambda context: ModelSettings(tool_choice=some if context.run_step == 1 else "none")


async def some_tools(model: Any) -> Made:
    tools = [weather, population]
    agent = Agent(
        model, output_type=ToolOutput(Person), tools=tools, capabilities=[CallsSome()], model_settings=SETTINGS
    )
    result = await agent.run(QUESTION)
    return {"output": result.output.model_dump()}


async def streamed(model: Any) -> Made:
    agent = Agent(model, output_type=Person, model_settings=SETTINGS)
    async with agent.run_stream("Who wrote it?") as run:
        pieces = [piece.model_dump(mode="json") async for piece in run.stream_output(debounce_by=None)]
        return {"pieces": len(pieces), "output": (await run.get_output()).model_dump()}


async def text(model: Any) -> Made:
    settings = SETTINGS | ModelSettings(max_tokens=20)
    whole = (await Agent(model, model_settings=settings).run("import ")).output
    async with Agent(model, model_settings=settings).run_stream("import ") as run:
        return {
            "whole": whole,
            "streamed": "".join([piece async for piece in run.stream_text(delta=True, debounce_by=None)]),
        }


TRIALS: dict[str, Callable[[Any], Coroutine[Any, Any, Made]]] = {
    one.__name__: one
    for one in (tool_output, one_of_several, native_output, prompted_output, loop, some_tools, streamed, text)
}


async def main(url: str, names: str, endpoint: str) -> None:
    model = model_at(url, endpoint)
    print(json.dumps({name: await TRIALS[name](model) for name in names.split(",")}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
