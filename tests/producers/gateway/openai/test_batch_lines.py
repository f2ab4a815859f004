"""A batch's line is read and answered as its endpoint would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from redis import Redis

from producers import AsyncClient
from producers.contract import keys
from producers.contract.record import Record
from producers.errors import InvalidTask
from producers.gateway import batch_endpoints
from producers.gateway.batch_endpoints import LineEndpoints
from producers.gateway.http.errors import Problem
from producers.gateway.openai.batch_lines import CHATS, COMPLETIONS, RESPONSES, answer_line, read_line
from producers.gateway.openai.tools import Calling, Tools
from producers.gateway.text.forms import Forms
from producers.store.batches import Batch
from producers.sweeper.batches.endpoint import Answer, Finished, PlannedTask
from producers.sweeper.batches.results import Outcome
from tests.producers.gateway.conftest import CARD, Door
from tests.producers.gateway.openai.conftest import MESSAGES, Answering, says
from tests.producers.gateway.openai.test_chat_tools import PIECES, PLACE

BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": MESSAGES, "n": 2, "stop": "x"},
    COMPLETIONS: {"prompt": "def f", "temperature": 0.5},
    RESPONSES: {"input": "Write f.", "instructions": "You write Python.", "max_output_tokens": 3},
}
FORMS = Forms()
#: Fields that differ from one request to the next; a line names the pool that made it, and is not stored.
OWN = {"id", "created", "created_at", "service_tier", "store", "system_fingerprint"}


@pytest.mark.parametrize("url", BODIES)
def test_a_line_is_answered_as_its_endpoint_answers(
    url: str, door: Door, http: httpx.Client, model: str, answering: Answering, valkey: Redis
) -> None:
    body = {"model": model, **BODIES[url]}
    answering.scripts = [says("Hello", " world", n=body.get("n", 1), reason="length")]
    answer = http.post(url, json=body).json()
    line = read_line(url, body, json.loads(CARD.to_json()), 5_000, FORMS.check_now, call, tier="batch", ttl=60)
    task, more = line.task, line.more
    assert (task.tier, task.ttl, task.temperature) == ("batch", 60, body.get("temperature", 0.7))
    (asked,) = answering.records
    fields = Record.parse(asked.id, valkey.hgetall(keys.task(asked.id))).fields
    record = Record(asked.id, dict(fields) | {name: str(value) for name, value in more.items()})
    said = json.loads(answer_line(url, record, door.run(events(door, asked.id))))
    assert {k: v for k, v in said.items() if k not in OWN} == {k: v for k, v in answer.items() if k not in OWN}
    if url == RESPONSES:
        assert (said["service_tier"], said["store"]) == ("batch", False)


@pytest.mark.parametrize("url", [CHATS, RESPONSES])
async def test_what_of_a_line_is_not_followed_is_told_in_its_output(
    valkey_url: str, door: Door, http: httpx.Client, model: str, answering: Answering, valkey: Redis, url: str
) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"a": {"not": {"const": "é"}}}}}
    tool = {"type": "function", **(function if url == RESPONSES else {"function": function})}
    asked = {"input": "Rain?"} if url == RESPONSES else {"messages": MESSAGES}
    body = {"model": model, **asked, "tools": [tool]}
    answering.scripts = [says(*PIECES)]
    answer = await asyncio.to_thread(lambda: http.post(url, json=body))
    (record,) = answering.records
    all_events = await asyncio.to_thread(lambda: door.run(events(door, record.id)))
    async with AsyncClient(valkey_url) as client:
        endpoints = LineEndpoints(client)
        (planned,) = await endpoints.tasks(url, [body])
        assert isinstance(planned, PlannedTask)
        fields = Record.parse(record.id, valkey.hgetall(keys.task(record.id))).fields
        kept = Record(record.id, dict(fields) | {name: str(value) for name, value in planned.more.items()})
        (made,) = await endpoints.answers(url, [Finished(body, kept, all_events)])
        endpoints.close()
    assert made.warning == answer.headers["penstock-warning"]
    assert made.warning.endswith("parameters: these keywords are not followed: properties.a.not")
    assert json.loads(Outcome(made).to_line(Batch("b", {}), 0, "c"))["response"]["warning"] == made.warning


async def test_a_line_that_an_earlier_version_ran_is_not_spelled_by_another_tokenizer(
    door: Door, http: httpx.Client, model: str, answering: Answering, valkey: Redis, valkey_url: str
) -> None:
    body = {"model": model, "messages": MESSAGES, "logprobs": True}
    answering.scripts = [says("Hello", logprobs=[(-0.5, ((5, -0.5),))])]
    await asyncio.to_thread(lambda: http.post(CHATS, json=body).json())
    (asked,) = answering.records
    all_events = await asyncio.to_thread(lambda: door.run(events(door, asked.id)))
    record = Record.parse(asked.id, valkey.hgetall(keys.task(asked.id)))
    earlier = Record(asked.id, {**record.fields, "encoding": "another"})
    async with AsyncClient(valkey_url) as client:
        endpoints = LineEndpoints(client)
        answers = await endpoints.answers(CHATS, [Finished(body, each, all_events) for each in (record, earlier)])
        endpoints.close()
    same, other = (json.loads(answer.body)["choices"][0] for answer in answers)
    assert (len(same["logprobs"]["content"]), other["logprobs"]) == (1, None)
    assert same["message"] == other["message"]


def call(tools: Tools, without: Sequence[str]) -> Calling:
    """Of lines without tools."""
    raise AssertionError(tools, without)


NESTED: Any = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]
WITH_TOOLS: dict[str, dict[str, Any]] = {
    CHATS: {"messages": MESSAGES, "tools": [*NESTED, {"type": "function", "function": {"name": "now"}}], "n": 2},
    RESPONSES: {"input": "Rain?", "tools": [{"type": "function", "name": name} for name in ("weather", "now")]},
}


@pytest.mark.parametrize("url", WITH_TOOLS)
async def test_a_line_with_tools_is_queued_and_answered_as_by_its_endpoint(
    url: str,
    door: Door,
    http: httpx.Client,
    model: str,
    answering: Answering,
    valkey: Redis,
    valkey_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its prompt is made before it is queued: a worker knows no tools."""
    monkeypatch.setattr(batch_endpoints, "READ_S", 600.0)  # on a busy machine, too, one call takes all lines
    body = {"model": model, **WITH_TOOLS[url]}
    answering.scripts = [says(*PIECES, n=body.get("n", 1))]
    answer = await asyncio.to_thread(lambda: http.post(url, json=body).json())
    (asked,) = answering.records
    all_events = await asyncio.to_thread(lambda: door.run(events(door, asked.id)))
    async with AsyncClient(valkey_url) as client:
        endpoints = LineEndpoints(client)
        wrong = body | {"tools": [{"type": "mcp"}]}
        planned, refused, none = await endpoints.tasks(url, [body, wrong, body | {"tool_choice": "none"}])
        assert isinstance(planned, PlannedTask)
        assert list(planned.task.prompt) == asked.task["prompt"]
        assert planned.task.grammar == asked.task["grammar"]
        assert isinstance(refused, Answer)
        assert json.loads(refused.body)["error"]["param"] == "tools[0].type"
        assert isinstance(none, PlannedTask)
        assert (none.task.grammar, none.more.get("calls")) == (None, None)
        fields = Record.parse(asked.id, valkey.hgetall(keys.task(asked.id))).fields
        record = Record(asked.id, dict(fields) | {name: str(value) for name, value in planned.more.items()})
        (said,) = await endpoints.answers(url, [Finished(body, record, all_events)])
        endpoints.close()
    made = json.loads(said.body)
    assert {k: v for k, v in made.items() if k not in OWN} == {k: v for k, v in answer.items() if k not in OWN}
    assert "weather" in json.dumps(made)


async def test_the_forms_of_a_line_s_tools_take_their_turn(valkey_url: str, model: str) -> None:
    """One that is to be tried begins the next block, as other forms do."""
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a{1,9}$"}}}
    body: dict[str, Any] = {"model": model, "messages": MESSAGES}
    tool = {"type": "function", "function": {"name": "f", "parameters": odd}}
    async with AsyncClient(valkey_url) as client:
        endpoints = LineEndpoints(client)
        assert len(await endpoints.tasks(CHATS, [body, body | {"tools": [tool]}, body])) == 1
        first = await endpoints.tasks(CHATS, [body | {"tools": [tool]}, body])
        endpoints.close()
    assert [type(entry) for entry in first] == [PlannedTask, PlannedTask]
    assert "calls" in first[0].more  # type: ignore[union-attr]


async def events(door: Door, task_id: str) -> list[Any]:
    return [event async for event in door.app.state.gateway.client.get(task_id).stream()]


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        (CHATS, {"stream": True}, "stream"),
        (CHATS, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        (CHATS, {"return_token_ids": True}, "return_token_ids"),
        (CHATS, {"max_completion_tokens": 5000}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"return_token_ids": True}, "return_token_ids"),
        (RESPONSES, {"return_token_ids": True}, "return_token_ids"),
        (RESPONSES, {"previous_response_id": "resp_x"}, "previous_response_id"),
        (RESPONSES, {"max_output_tokens": 5000}, "max_output_tokens"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_x"}]}, "input"),
    ],
)
def test_what_a_line_may_not_ask_for(url: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises((Problem, InvalidTask)) as caught:
        read_line(url, {"model": "tiny", **BODIES[url], **fields}, json.loads(CARD.to_json()), 0, FORMS.check_now, call)
    assert caught.value.param == param


@pytest.mark.parametrize("url", [CHATS, RESPONSES])
def test_a_model_without_a_template_is_refused_as_by_the_endpoint(url: str) -> None:
    card = json.loads(CARD.to_json()) | {"capabilities": ["generate"]}
    with pytest.raises(InvalidTask, match="send its prompts to /v1/completions") as caught:
        read_line(url, {"model": "tiny", **BODIES[url]}, card, 0, FORMS.check_now, call)
    assert (caught.value.param, caught.value.code) == ("model", "unsupported_model")


def test_messages_are_left_to_the_worker() -> None:
    body = {"model": "tiny", **BODIES[RESPONSES]}
    line = read_line(RESPONSES, body, json.loads(CARD.to_json()), 0, FORMS.check_now, call)
    task = line.task
    assert line.template == {}
    assert [message["role"] for message in task.messages or ()] == ["system", "user"]
