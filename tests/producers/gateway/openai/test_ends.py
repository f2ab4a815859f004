"""A task's end is told alike by all of OpenAI's endpoints."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from engine.errors import ErrorText, FieldName
from producers.contract.record import Record, error_json
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Ask
from tests.producers.gateway.openai.conftest import MESSAGES, Answering, chunks, ends


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        ({"status": "failed", "error": {"code": "engine_error", "message": "m"}}, 500, "engine_error"),
        ({"status": "failed", "error": {"code": "dead_lettered", "message": "m"}}, 500, "dead_lettered"),
        ({"status": "failed", "error": {"code": "expired", "message": "m"}}, 504, "expired"),
        ({"status": "failed", "error": {"code": "kv_capacity_exceeded", "message": "m"}}, 400, "kv_capacity_exceeded"),
        ({"status": "incomplete", "error": {"code": "expired", "message": "m"}}, 504, "expired"),
        ({"status": "cancelled"}, 409, "cancelled"),
    ],
)
def test_how_a_task_ends_is_how_its_request_does(
    chat: Ask, answering: Answering, end: dict[str, Any], status: int, code: str
) -> None:
    answering.scripts = [ends(reasons=[], **end)]
    answer = chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ({"status": "failed", "error": {"code": "expired", "message": "m"}}, openai.InternalServerError),
        ({"status": "failed", "error": {"code": "dead_lettered", "message": "m"}}, openai.InternalServerError),
        ({"status": "cancelled"}, openai.ConflictError),
    ],
)
def test_what_would_end_the_same_way_is_not_sent_again(
    client: OpenAI, model: str, answering: Answering, end: dict[str, Any], kind: type[openai.APIStatusError]
) -> None:
    answering.scripts = [ends(reasons=[], **end)]
    with pytest.raises(kind):
        client.with_options(max_retries=2).chat.completions.create(model=model, messages=MESSAGES)
    assert len(answering.records) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_what_there_is_at_the_deadline_is_the_answer(chat: Ask, answering: Answering, stream: bool) -> None:
    def play(worker: FakeWorker, record: Record) -> None:
        worker.append(record.id, 0, ["all"], finish_reason="stop")
        worker.append(record.id, 0, ["a part"], choice=1)
        worker.finish(record.id, [1, 1], status="incomplete", reasons=["stop", "deadline"], error={"code": "expired"})

    answering.scripts = [play]
    answer = chat(n=2, timeout=60, stream=stream)
    assert answer.status_code == 200
    if stream:
        *said, done = chunks(answer)
        assert done == "[DONE]"
        choices = [choice for chunk in said for choice in chunk["choices"]]
        reasons = [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"]]
        text = {i: "".join(c["delta"].get("content", "") for c in choices if c["index"] == i) for i in (0, 1)}
    else:
        reasons = [(c["index"], c["finish_reason"]) for c in answer.json()["choices"]]
        text = {c["index"]: c["message"]["content"] for c in answer.json()["choices"]}
        assert answer.json()["usage"]["completion_tokens"] == 2
    assert sorted(reasons) == [(0, "stop"), (1, "length")]
    assert text == {0: "all", 1: "a part"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_workers_refusal_is_told_in_the_callers_words(chat: Ask, answering: Answering, stream: bool) -> None:
    message = ErrorText.of("{max_tokens}=9 does not fit with a prompt of 9 tokens; lower {max_tokens}")
    stored = error_json("kv_capacity_exceeded", message, "max_tokens")
    answering.scripts = [ends(status="failed", error=json.loads(stored))]
    answer = chat(max_completion_tokens=9, stream=stream)
    told = (chunks(answer)[-1] if stream else answer.json())["error"]
    assert (told["param"], told["code"]) == ("max_completion_tokens", "kv_capacity_exceeded")
    expected = "max_completion_tokens=9 does not fit with a prompt of 9 tokens; lower max_completion_tokens"
    assert told["message"] == expected
    assert told.keys() == {"message", "type", "param", "code"}


def test_what_a_worker_quotes_is_not_rewritten(chat: Ask, answering: Answering) -> None:
    message = ErrorText.of("{} cannot be followed: unknown rule json_schema", FieldName("json_schema"))
    answering.scripts = [ends(status="failed", error=json.loads(error_json("invalid_value", message, "json_schema")))]
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object"}}}
    told = chat(response_format=form).json()["error"]
    assert told["message"] == "response_format cannot be followed: unknown rule json_schema"


def test_a_workers_word_for_the_prompt_is_the_callers(chat: Ask, answering: Answering) -> None:
    error = {"code": "context_length_exceeded", "message": "It does not fit.", "param": "prompt_ids"}
    answering.scripts = [ends(status="failed", error=error)]
    assert chat().json()["error"]["param"] == "messages"


def test_a_workers_word_for_one_of_several_prompts_names_no_other(complete: Ask, answering: Answering) -> None:
    error = {"code": "context_length_exceeded", "message": "It does not fit.", "param": "prompt_ids"}
    answering.scripts = [ends(status="failed", error=error)]
    assert complete(prompt=["a", "b"]).json()["error"]["param"] == "prompt"
