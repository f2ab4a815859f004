"""Chats as durable tasks: whoever sends messages without a gateway, the worker's template writes the prompt."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.text import ChatTemplate, Tokenizer
from producers import AsyncClient, Client, InvalidTask, TaskFailed
from producers.contract import keys
from tests.waiting import PATIENCE_S, StepGate
from tests.workers.rig import Rig, rig

TINY = Path(__file__).parents[2] / "workers" / "models" / "tiny"
#: It writes the time to the microsecond: no two renders by the clock are alike.
TEMPLATE = "<|{{ strftime_now('%d %H:%M:%S.%f') }}|>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MESSAGES = [{"role": "developer", "content": "Write Python."}, {"role": "user", "content": "def add(a, b):"}]
TOKENIZER = Tokenizer.from_folder(TINY)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> StepGate:
    return StepGate(tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory, steps: StepGate) -> dict[str, Any]:
    """What a worker is told that serves a model with that template."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("penstock*", "*.sha256"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return {"model": str(folder), "engine_factory": "workers.runtime.worker:load_engine", **steps.environment}


@pytest.fixture(scope="module")
def chats(chatty: dict[str, Any]) -> Iterator[Rig]:
    with rig() as made:
        made.worker(**chatty)
        yield made


def written(chats: Rig, task_id: str) -> tuple[int, ...]:
    """The prompt that this task has to have: with the time at which it was made, and the older name of a role."""
    now = int(chats.record(task_id)["created"]) / 1000
    messages = [MESSAGES[0] | {"role": "system"}, MESSAGES[1]]
    return tuple(TOKENIZER.encode(ChatTemplate(TEMPLATE).render(messages, now=now), add_special_tokens=False))


def test_a_client_s_messages_become_the_prompt(chats: Rig) -> None:
    with Client(chats.url) as client:
        handle = client.submit(model="chatty", messages=MESSAGES, max_tokens=4, prompt_logprobs=0)
        result = handle.result(timeout=PATIENCE_S)
        assert result.prompt_token_ids == written(chats, handle.id)
        assert result.usage["prompt_tokens"] == len(written(chats, handle.id))
        assert handle.status().task["messages"] == MESSAGES
        assert "prompt" not in handle.status().task

    async def awaited() -> tuple[str, Any]:
        async with AsyncClient(chats.url) as client:
            handle = await client.submit(model="chatty", messages=MESSAGES, max_tokens=4, prompt_logprobs=0)
            return handle.id, await handle.result(timeout=PATIENCE_S)

    task_id, result = asyncio.run(awaited())
    assert result.prompt_token_ids == written(chats, task_id)


def test_a_celery_sender_s_messages_become_the_prompt(chats: Rig) -> None:
    with chats.sender() as app, Client(chats.url) as client:
        kwargs = {"messages": MESSAGES, "max_tokens": 4, "prompt_logprobs": 0}
        sent = app.send_task(keys.TASK_NAME, queue=keys.model_queue("chatty"), kwargs=kwargs)
        assert sent.get(timeout=PATIENCE_S)["status"] == "completed"
        assert client.get(sent.id).result().prompt_token_ids == written(chats, sent.id)


def test_another_worker_goes_on_from_the_same_prompt(chats: Rig, chatty: dict[str, Any], steps: StepGate) -> None:
    options: dict[str, Any] = {"model": "chatty", "seed": 3, "max_tokens": 60, "ignore_eos": True, "temperature": 0.7}
    with Client(chats.url) as client:
        with steps.held():
            handle = client.submit(messages=MESSAGES, **options)
            chats.until(lambda: chats.tokens(handle.id) > 3)
            chats.kill(chats.workers[-1])
        chats.worker(**chatty)
        said = handle.result(timeout=PATIENCE_S).token_ids
        assert int(chats.record(handle.id)["claims"]) == 2
        assert said == client.submit(prompt=written(chats, handle.id), **options).result(timeout=PATIENCE_S).token_ids


def test_what_the_template_does_not_take_fails_the_task(chats: Rig) -> None:
    bad = [{"role": "user", "content": "x" * 100_000}]
    with Client(chats.url) as client:
        result = client.submit(model="chatty", messages=bad).result(timeout=PATIENCE_S, raise_for_status=False)
        assert result.error is not None
        assert result.error["code"] == "context_length_exceeded"
        with pytest.raises(InvalidTask, match='role is "robot"'):
            client.submit(model="chatty", messages=[{"role": "robot", "content": "x"}])


@pytest.mark.parametrize("name", ["prompt", "messages"])
def test_a_worker_s_refusal_names_the_field_that_the_task_has(chats: Rig, name: str) -> None:
    text = "a " * 3000
    with chats.sender() as app, Client(chats.url) as client:
        fields: dict[str, Any] = {name: text if name == "prompt" else [{"role": "user", "content": text}]}
        sent = app.send_task(keys.TASK_NAME, queue=keys.model_queue("chatty"), kwargs=fields)
        for waits in (client.submit(model="chatty", **fields).result, sent.get):
            with pytest.raises(TaskFailed) as caught:
                waits(timeout=60)
            assert (caught.value.param, caught.value.code) == (name, "context_length_exceeded")


def test_a_model_without_a_template_takes_no_messages(rig: Rig) -> None:
    rig.worker()
    with Client(rig.url) as client, pytest.raises(InvalidTask, match='model "stub" has no chat template'):
        client.submit(model="stub", messages=MESSAGES)
    with rig.sender() as app, pytest.raises(Exception, match='model "stub" has no chat template'):
        app.send_task(keys.TASK_NAME, kwargs={"messages": MESSAGES}).get(timeout=PATIENCE_S)
