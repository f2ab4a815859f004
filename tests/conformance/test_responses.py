"""Responses with the unmodified `openai` client on a real system; test_resume.py kills their gateways."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from producers.contract import keys
from tests.conformance.conftest import System
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ASKED: dict[str, Any] = {"model": "tiny", "input": "Write the function add(a, b).", "temperature": 0.8}
LONG: dict[str, Any] = {**ASKED, "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=180, max_retries=0)


def task_id(response_id: str) -> str:
    return response_id.removeprefix("resp_")


def test_the_clients_own_accumulation_of_a_stream(system: System) -> None:
    client = client_of(system.url)
    with client.responses.stream(**ASKED, extra_body={"stop": "("}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    assert final.output_text
    with client.responses.stream(response_id=final.id, starting_after=3) as stream:
        assert next(iter(stream)).sequence_number == 4
        assert stream.get_final_response().output_text == final.output_text


async def test_log_probabilities_and_a_cancel_with_the_asyncio_client(system: System) -> None:
    async with AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", timeout=180, max_retries=0) as client:
        answer = await client.responses.create(
            **ASKED, max_output_tokens=8, top_logprobs=3, include=["message.output_text.logprobs"]
        )
        (item,) = answer.output
        assert len(item.content[0].logprobs) == answer.usage.output_tokens
        assert {len(one.top_logprobs) for one in item.content[0].logprobs} == {3}
        with system.steps.held():
            made = await client.responses.create(**LONG, background=True)
            stream = await client.responses.retrieve(made.id, stream=True)
            events = [await anext(aiter(stream)) for _ in range(10)]
            assert (await client.responses.cancel(made.id)).status == "cancelled"
        events += [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].response.status == "cancelled"
        assert 0 < events[-1].response.usage.output_tokens < 900


@pytest.mark.parametrize("background", [True, False])
async def test_leaving_cancels_a_foreground_response_alone(system: System, background: bool) -> None:
    client = client_of(system.url)
    asked = LONG | ({"max_output_tokens": 300} if background else {})
    with system.steps.held():
        stream = client.responses.create(**asked, stream=True, background=background)
        response_id = next(iter(stream)).response.id
        stream.close()
        if not background:
            await asyncio.to_thread(until, lambda: system.status(task_id(response_id)) == "cancelled")
    await asyncio.to_thread(until, lambda: system.status(task_id(response_id)) in ("completed", "cancelled"))
    assert client.responses.retrieve(response_id).status == ("incomplete" if background else "cancelled")


def test_one_that_runs_is_deleted(system: System) -> None:
    """Its worker stops, and serves others."""
    client = client_of(system.url)
    with system.steps.held():
        stream = client.responses.create(**LONG, background=True, stream=True)
        events = iter(stream)
        response_id = next(events).response.id
        until(lambda: next(events).type == "response.output_text.delta")
        client.responses.delete(response_id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)
    assert client.responses.create(**ASKED, max_output_tokens=5).output_text
    # Its id alone stays, so that it is not made again.
    kept = {str(name) for name in system.store.scan_iter("*") if task_id(response_id) in str(name)}
    assert kept <= {keys.erased(task_id(response_id))}
