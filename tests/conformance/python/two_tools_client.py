"""A job of two tools, done by an agent of LangGraph, Pydantic AI or OpenAI's Agents SDK (the second argument) that has
to call a tool in every turn, against the gateway that the first argument names, with the model that the third names. A
script for `.venv/clients`: the calls and what came are printed as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

Country = Literal["France", "Italy", "Spain"]
City = Literal["Paris", "Rome", "Madrid"]
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid"}
JOB = "Find the capital of Italy."
#: Turns after which an agent gives up.
TURNS = 8
USUAL: dict[str, Any] = {"temperature": 0.0, "max_tokens": 120}

calls: list[list[str]] = []


def capital_of(country: Country) -> str:
    """The capital city of a country."""
    calls.append(["capital_of", country])
    return f"The capital of {country} is {CAPITALS[country]}. Now find the weather of {CAPITALS[country]}."


def weather_of(city: City) -> str:
    """The weather of a city."""
    calls.append(["weather_of", city])
    return f"It rains in {city}."


async def langgraph(url: str, model: str) -> str:
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    tools = [
        StructuredTool.from_function(capital_of),
        StructuredTool.from_function(weather_of, return_direct=True),
    ]
    chat = ChatOpenAI(model=model, base_url=url, api_key="none", timeout=150, max_retries=0, **USUAL)
    bound = chat.bind_tools(tools, tool_choice="required", parallel_tool_calls=False)
    agent = create_react_agent(bound, tools)
    end = await agent.ainvoke({"messages": [("user", JOB)]}, {"recursion_limit": 2 * TURNS})
    return str(end["messages"][-1].content)


async def pydantic_ai(url: str, model: str) -> str:
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.settings import ModelSettings
    from pydantic_ai.usage import UsageLimits

    agent = Agent(
        OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none")),
        tools=[capital_of],
        output_type=ToolOutput(weather_of, name="weather_of"),
        model_settings=ModelSettings(parallel_tool_calls=False, **USUAL),
    )
    return str((await agent.run(JOB, usage_limits=UsageLimits(request_limit=TURNS))).output)


async def openai_agents(url: str, model: str) -> str:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        StopAtTools,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=150)
    agent: Agent[Any] = Agent(
        "weather man",
        model=OpenAIChatCompletionsModel(model, client),
        model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False, **USUAL),
        reset_tool_choice=False,
        tools=[function_tool(capital_of), function_tool(weather_of)],
        tool_use_behavior=StopAtTools(stop_at_tool_names=["weather_of"]),
    )
    run = await Runner.run(agent, JOB, max_turns=TURNS)
    await client.close()
    return str(run.final_output)


AGENTS = {"langgraph": langgraph, "pydantic_ai": pydantic_ai, "openai_agents": openai_agents}
url, agent, model = sys.argv[1:]
output = asyncio.run(AGENTS[agent](f"{url}/v1", model))
print(json.dumps({"calls": calls, "output": output}))
