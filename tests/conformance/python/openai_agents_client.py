"""An agent of OpenAI's Agents SDK that calls a tool, against the gateway that the first argument names. A script for
`.venv/clients`: what came is printed as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

calls: list[list[Any]] = []


@function_tool
def weather(city: Literal["Bern", "Oslo"], days: int) -> str:
    """The weather of a city.

    Args:
        city: where
        days: how many
    """
    calls.append([city, days])
    return "It rains."


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=180)
    usual: dict[str, Any] = {"max_tokens": 120, "temperature": 0.0, "parallel_tool_calls": False}
    model = OpenAIResponsesModel("tiny", client)

    def agent(**settings: Any) -> Agent[Any]:
        """One that has to call its tool, and then answers: the SDK asks for the call in the first turn alone."""
        chosen = ModelSettings(tool_choice="required", **usual, **settings)
        return Agent("weather man", instructions="Be brief.", model=model, model_settings=chosen, tools=[weather])

    whole = await Runner.run(agent(), "Will it rain in Bern?", max_turns=3)
    streamed = Runner.run_streamed(agent(), "Will it rain in Bern?", max_turns=3)
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    by_id = await Runner.run(agent(), "Will it rain in Bern?", max_turns=3, auto_previous_response_id=True)
    outputs = [run.final_output for run in (whole, streamed, by_id)]
    items = [[item.type for item in run.new_items] for run in (whole, streamed, by_id)]
    print(json.dumps({"calls": calls, "kinds": kinds, "outputs": outputs, "items": items}))
    await client.close()


asyncio.run(main(sys.argv[1]))
