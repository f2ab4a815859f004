"""Answers in one piece that are large: they take turns, and keep no more than a little before."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import httpx
import pytest

from producers.connection.turns import PROCESS, Turns
from producers.gateway import app
from producers.gateway.openai import complete
from producers.gateway.tasks import large
from tests.producers.gateway.conftest import Door, Open, until
from tests.producers.gateway.openai.conftest import MESSAGES, Answering, says
from tests.producers.gateway.openai.test_echo import scores
from tests.waiting import PATIENCE_S

PATHS = ["/v1/chat/completions", "/v1/completions"]
#: 40 tokens with their log probabilities are some kilobytes.
LONG = says(*"Sphinx of black quartz, judge my vow. 123", n=2, logprobs=[(-0.5, ((5, -0.25), (6, -1.5)))])


def asked(path: str, **fields: Any) -> dict[str, Any]:
    if "chat" in path:
        return {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2, **fields}
    return {"model": "tiny", "prompt": ["def f", "x"], "logprobs": 2, "n": 2, **fields}


@pytest.fixture
def door(open_door: Open, model: str, monkeypatch: pytest.MonkeyPatch) -> Door:
    """One large answer at a time."""
    monkeypatch.setattr(large, "LARGE", 1000)
    monkeypatch.setattr(app, "LARGE_RESULTS", (1, 1))
    monkeypatch.setattr(complete, "PATIENCE_S", 0.1)
    return open_door(stall=1)


@pytest.mark.parametrize("path", PATHS)
def test_they_take_turns(door: Door, http: httpx.Client, answering: Answering, path: str) -> None:
    turns = door.app.state.gateway.large
    answering.scripts = [LONG]
    assert turns.take(PROCESS)
    answer = http.post(path, json=asked(path))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (503, "too_many_large_results", "server_error")
    assert "retry-after" in answer.headers
    assert answering.records[0].id in error["message"]
    assert len(door.app.state.gateway.readers) == 0
    answering.scripts = [says("a", n=2)]
    assert http.post(path, json=asked(path)).status_code == 200, "a small one needs no turn"
    door.run(_released(turns))
    answering.scripts = [LONG]
    for _ in range(2):
        assert http.post(path, json=asked(path)).status_code == 200
    until(lambda: turns.free)


@pytest.mark.parametrize("path", PATHS)
def test_they_say_what_they_would_if_they_were_small(
    http: httpx.Client, answering: Answering, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def said() -> list[Any]:
        answer = http.post(path, json=asked(path)).json()
        return [answer["choices"], answer["usage"]]

    answering.scripts = [LONG]
    in_turns = said()
    monkeypatch.setattr(large, "LARGE", 1 << 20)
    assert in_turns == said()
    assert len(str(in_turns)) > 5000


def test_an_echo_is_part_of_what_is_large(http: httpx.Client, answering: Answering) -> None:
    answering.scripts = [scores("x", "y", n=2, top=20)]
    fields = {"prompt": ["import os\n" * 90] * 2, "echo": True, "logprobs": 20}
    choices = http.post(PATHS[1], json=asked(PATHS[1], **fields)).json()["choices"]
    assert [choice["text"] for choice in choices] == ["import os\n" * 90 + "xy"] * 4
    assert {len(choice["logprobs"]["tokens"]) for choice in choices} == {len(choices[0]["logprobs"]["text_offset"])}


@pytest.mark.parametrize("path", PATHS)
def test_what_is_beyond_a_little_waits_in_the_store(
    door: Door, http: httpx.Client, answering: Answering, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """While its turn has not come, an answer of any size keeps about as much as one that needs none."""
    made: list[complete.Whole] = []
    begin = complete.Whole.__init__

    def noted(self: complete.Whole, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(complete.Whole, "__init__", noted)
    monkeypatch.setattr(complete, "PATIENCE_S", 60)
    turns = door.app.state.gateway.large
    assert turns.take(PROCESS)
    answering.scripts = [LONG]
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(http.post(path, json=asked(path))))
    asking.start()
    until(lambda: made and turns.waiting)
    before = made[0].size
    door.run(_released(turns))
    asking.join(PATIENCE_S)
    assert answers[0].status_code == 200
    assert before < made[0].size / 2, "the rest came when it was its turn"


async def _released(turns: Turns) -> None:
    turns.give(PROCESS)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_once_its_tasks_are_queued_takes_them_along(
    door: Door, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError

    module = importlib.import_module(f"producers.gateway.openai.{'chat' if 'chat' in path else 'completions'}")
    monkeypatch.setattr(module, "ChunkStream" if stream else "Whole", broken)
    answer = http.post(path, json=asked(path, stream=stream))
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert len(door.app.state.gateway.readers) == 0
