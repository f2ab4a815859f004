"""A batch's line is read and answered as its endpoint would."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from producers.contract.record import Record
from producers.contract.task import Task
from producers.errors import InvalidTask
from producers.gateway.http.errors import Problem
from producers.gateway.openai.batch_lines import CHATS, COMPLETIONS, RESPONSES, answer_line, read_line
from producers.gateway.text.forms import Forms
from tests.producers.gateway.conftest import CARD, Door
from tests.producers.gateway.openai.conftest import MESSAGES, Answering, says

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
    task, more = read_line(url, body, json.loads(CARD.to_json()), 5_000, FORMS.check_now, tier="batch", ttl=60)
    assert (task.tier, task.ttl, task.temperature) == ("batch", 60, body.get("temperature", 0.7))
    (asked,) = answering.records
    fields = Record.parse(asked.id, valkey.hgetall(keys.task(asked.id))).fields
    record = Record(asked.id, dict(fields) | {name: str(value) for name, value in more.items()})
    said = json.loads(answer_line(url, record, door.run(events(door, asked.id))))
    assert {k: v for k, v in said.items() if k not in OWN} == {k: v for k, v in answer.items() if k not in OWN}
    if url == RESPONSES:
        assert (said["service_tier"], said["store"]) == ("batch", False)


async def events(door: Door, task_id: str) -> list[Any]:
    return [event async for event in door.app.state.gateway.client.get(task_id).stream()]


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        (CHATS, {"stream": True}, "stream"),
        (CHATS, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        (CHATS, {"max_completion_tokens": 5000}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (RESPONSES, {"previous_response_id": "resp_x"}, "previous_response_id"),
        (RESPONSES, {"max_output_tokens": 5000}, "max_output_tokens"),
    ],
)
def test_what_a_line_may_not_ask_for(url: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises((Problem, InvalidTask)) as caught:
        read_line(url, {"model": "tiny", **BODIES[url], **fields}, json.loads(CARD.to_json()), 0, FORMS.check_now)
    assert caught.value.param == param


@pytest.mark.parametrize("url", [CHATS, RESPONSES])
def test_a_model_without_a_template_is_refused_as_by_the_endpoint(url: str) -> None:
    card = json.loads(CARD.to_json()) | {"capabilities": ["generate"]}
    with pytest.raises(InvalidTask, match="send its prompts to /v1/completions") as caught:
        read_line(url, {"model": "tiny", **BODIES[url]}, card, 0, FORMS.check_now)
    assert (caught.value.param, caught.value.code) == ("model", "unsupported_model")


def test_messages_are_left_to_the_worker() -> None:
    task, _ = read_line(
        RESPONSES, {"model": "tiny", **BODIES[RESPONSES]}, json.loads(CARD.to_json()), 0, FORMS.check_now
    )
    assert isinstance(task, Task)
    assert [message["role"] for message in task.messages or ()] == ["system", "user"]
