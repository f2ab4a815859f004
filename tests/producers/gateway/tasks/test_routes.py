"""`/v1/tasks` over real HTTP: what is taken, what it becomes, how it ends."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest
from redis import Redis

from engine.text import ChatTemplate, Tokenizer
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.contract.record import Record
from producers.gateway.tasks import ownership
from producers.store import protocol
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import CARD, QUEUE, TINY, Submit


def record_of(valkey: Redis, task_id: str) -> Record:
    return Record.parse(task_id, valkey.hgetall(keys.task(task_id)))


class TestSubmit:
    def test_the_header_names_the_tenant_unless_the_task_does(self, http: httpx.Client, model: str) -> None:
        head, task = {"penstock-tenant": "acme"}, {"model": model, "prompt": "def f"}
        named = [http.post("/v1/tasks", json=task | field, headers=head) for field in ({}, {"tenant": "acme"})]
        assert [(one.status_code, one.json()["tenant"]) for one in named] == [(202, "acme")] * 2
        other = http.post("/v1/tasks", json=task | {"tenant": "other"}, headers=head)
        assert (other.status_code, other.json()["error"]["param"]) == (400, "tenant")

    def test_answers_202_with_the_task_and_where_it_is(self, http: httpx.Client, model: str) -> None:
        answer = http.post("/v1/tasks", json={"model": model, "prompt": "def f", "metadata": {"a": "b"}})
        task = answer.json()
        assert answer.status_code == 202
        assert answer.headers["location"] == f"/v1/tasks/{task['id']}"
        assert {name: task[name] for name in ("object", "status", "model", "tier", "n", "metadata")} == {
            "object": "task",
            "status": "queued",
            "model": model,
            "tier": "default",
            "n": 1,
            "metadata": {"a": "b"},
        }
        assert task["created_at"] > 1_700_000_000

    def test_text_is_queued_as_token_ids(self, submit: Submit, valkey: Redis) -> None:
        task = record_of(valkey, submit(prompt="def fibonacci(n):")).task
        assert task["prompt"] == Tokenizer.from_folder(TINY).encode("def fibonacci(n):")

    def test_messages_are_queued_as_their_template_writes_them(self, submit: Submit, valkey: Redis) -> None:
        messages = [{"role": "user", "content": "def f"}]
        template = ChatTemplate.from_folder(TINY)
        assert template is not None
        text = template.render(messages)
        ids = Tokenizer.from_folder(TINY).encode(text, add_special_tokens=False)
        assert record_of(valkey, submit(prompt=None, messages=messages)).task["prompt"] == ids

    @pytest.mark.parametrize("length", [4_000, 4_097, 20_000])
    def test_long_text_is_encoded_as_short_text_is(self, http: httpx.Client, model: str, length: int) -> None:
        text = ("import os\n" * length)[:length]
        answer = http.post("/v1/tasks", json={"model": model, "prompt": text})
        count = len(Tokenizer.from_folder(TINY).encode(text))
        assert answer.status_code == 400
        assert f"({count} in the prompt" in answer.json()["error"]["message"]

    def test_token_ids_are_taken_as_they_are(self, submit: Submit, valkey: Redis) -> None:
        assert record_of(valkey, submit(prompt=[5, 6, 7])).task["prompt"] == [5, 6, 7]

    @pytest.mark.parametrize("tier", keys.TIERS)
    def test_a_tier_goes_to_its_list(self, submit: Submit, valkey: Redis, tier: str) -> None:
        task_id = submit(tier=tier)
        (message,) = valkey.lrange(broker_keys.tier_list(QUEUE, tier), 0, -1)
        assert json.loads(message)["headers"]["id"] == task_id

    def test_the_longest_prompt_that_fits_is_taken(self, submit: Submit) -> None:
        submit(prompt=[5] * (CARD.context_length - 16), max_tokens=16)

    def test_charset_and_case_of_the_content_type_do_not_matter(self, http: httpx.Client, model: str) -> None:
        body = json.dumps({"model": model, "prompt": "x"}).encode()
        answer = http.post("/v1/tasks", content=body, headers={"content-type": "Application/JSON; charset=utf-8"})
        assert answer.status_code == 202


class TestLook:
    def test_a_queued_task_has_no_outputs_yet(self, http: httpx.Client, submit: Submit) -> None:
        task = http.get(f"/v1/tasks/{submit(tier='flex', metadata={'a': 'b'})}").json()
        assert (task["status"], task["tier"], task["metadata"]) == ("queued", "flex", {"a": "b"})
        assert task["queued_at"] >= task["created_at"]
        assert task["choices"] is task["usage"] is task["error"] is task["finished_at"] is None

    def test_a_task_that_is_claimed_before_it_is_called_queued_has_all_its_times(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker, valkey: Redis
    ) -> None:
        task_id = submit()
        valkey.hset(keys.task(task_id), "status", "submitting")
        valkey.hdel(keys.task(task_id), "queued")
        worker.claim(task_id)
        assert run(valkey, protocol.queued(task_id)) == b"in_progress"
        task = http.get(f"/v1/tasks/{task_id}").json()
        assert task["created_at"] <= task["queued_at"] <= task["started_at"]

    def test_a_completed_task_has_its_text_tokens_times_and_usage(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker
    ) -> None:
        task_id = submit()
        worker.serve(task_id, ["Hel", "lo", "\n"])
        task = http.get(f"/v1/tasks/{task_id}").json()
        assert task["status"] == "completed"
        assert task["choices"] == [
            {"index": 0, "text": "Hello\n", "token_ids": [0, 1, 2], "finish_reason": "stop", "logprobs": None}
        ]
        assert task["usage"] == {"prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 3}
        assert task["created_at"] <= task["started_at"] <= task["first_token_at"] <= task["finished_at"]

    def test_logprobs_come_where_they_were_asked_for(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker
    ) -> None:
        task_id = submit(logprobs=1)
        worker.claim(task_id)
        worker.append(task_id, 0, ["a", "b"], logprobs=[(-0.5, ((7, -0.25),)), (-1.0, ())])
        worker.finish(task_id, [2])
        (choice,) = http.get(f"/v1/tasks/{task_id}").json()["choices"]
        assert choice["logprobs"] == [
            {"logprob": -0.5, "top": [{"token_id": 7, "logprob": -0.25}]},
            {"logprob": -1.0, "top": []},
        ]

    def test_a_token_without_logprobs_among_others_has_null(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker
    ) -> None:
        task_id = submit(logprobs=1, n=2)
        worker.claim(task_id)
        worker.append(task_id, 0, ["\u2028", '"', "c", "d"], logprobs=[None, None, (-0.5, ()), None])
        worker.append(task_id, 0, ["x"], choice=1)
        worker.finish(task_id, [4, 1], reasons=["stop", "length"])
        first, second = http.get(f"/v1/tasks/{task_id}").json()["choices"]
        assert first["logprobs"] == [None, None, {"logprob": -0.5, "top": []}, None]
        assert (first["text"], first["token_ids"]) == ('\u2028"cd', [0, 1, 2, 3])
        assert (second["index"], second["text"], second["logprobs"]) == (1, "x", None)

    def test_a_prompts_logprobs_come_where_they_were_asked_for(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker
    ) -> None:
        task_id = submit(prompt=[5, 6], prompt_logprobs=1, max_tokens=0)
        worker.claim(task_id)
        assert worker.prompt(task_id, [5, 6], [None, (-0.5, ((7, -0.25),))]) == "ok"
        worker.finish(task_id, [0], reasons=["length"])
        task = http.get(f"/v1/tasks/{task_id}").json()
        assert task["prompt_logprobs"] == [
            {"token_id": 5, "logprob": None, "top": []},
            {"token_id": 6, "logprob": -0.5, "top": [{"token_id": 7, "logprob": -0.25}]},
        ]
        (choice,) = task["choices"]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [], "length")

    def test_a_failed_task_says_why_and_keeps_what_it_had(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker
    ) -> None:
        task_id = submit()
        worker.claim(task_id)
        worker.append(task_id, 0, ["a"])
        worker.finish(task_id, [1], status="failed", reasons=[], error={"code": "engine", "message": "It broke."})
        task = http.get(f"/v1/tasks/{task_id}").json()
        assert (task["status"], task["error"]) == ("failed", {"code": "engine", "message": "It broke."})
        assert task["choices"][0]["text"] == "a"
        assert task["choices"][0]["finish_reason"] is None

    def test_a_task_of_plain_celery_is_shown_too(self, http: httpx.Client, model: str, valkey: Redis) -> None:
        valkey.hset(
            keys.task("plain-1"), mapping={"v": 1, "status": "queued", "plain": 1, "created": 1_790_000_000_000}
        )
        task = http.get("/v1/tasks/plain-1").json()
        assert (task["id"], task["created_at"]) == ("plain-1", 1_790_000_000)

    @pytest.mark.parametrize("metadata", [{"a": 1}, None, "abc", ["a"]])
    def test_a_refused_task_of_plain_celery_is_shown_without_what_is_no_metadata(
        self, http: httpx.Client, model: str, valkey: Redis, metadata: Any
    ) -> None:
        task = json.dumps({"prompt": "x", "metadata": metadata})
        valkey.hset(keys.task("plain-1"), mapping={"v": 1, "status": "failed", "created": 1, "task": task, "end": 1})
        answer = http.get("/v1/tasks/plain-1")
        assert (answer.status_code, answer.json()["metadata"]) == (200, {})

    @pytest.mark.parametrize("path", ["/v1/tasks/nobody", "/v1/tasks/nobody/events", "/v1/tasks/%00%ff"])
    def test_an_unknown_id_is_404(self, http: httpx.Client, path: str) -> None:
        answer = http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "task_not_found")


class TestCancel:
    def test_a_queued_task_is_cancelled_at_once(self, http: httpx.Client, submit: Submit) -> None:
        task_id = submit()
        answer = http.post(f"/v1/tasks/{task_id}/cancel")
        task = http.get(f"/v1/tasks/{task_id}").json()
        assert task["status"] == "cancelled"
        assert (answer.status_code, answer.json()) == (200, task | {"accepted": True})
        again = http.post(f"/v1/tasks/{task_id}/cancel")
        assert (again.status_code, again.json()) == (200, task | {"accepted": True}), "to ask again changes nothing"

    def test_a_running_task_is_cancelled_by_its_worker(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker
    ) -> None:
        task_id = submit()
        worker.claim(task_id)
        worker.append(task_id, 0, ["a"])
        answer = http.post(f"/v1/tasks/{task_id}/cancel").json()
        assert (answer["accepted"], answer["status"], answer["choices"]) == (True, "in_progress", None)
        assert worker.append(task_id, 1, ["b"])[0] == "cancel"

    def test_what_a_running_task_had_made_is_in_the_answer(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ownership, "CANCEL_S", 60.0)
        task_id = submit()
        worker.claim(task_id)
        worker.append(task_id, 0, ["a"])

        def stops() -> None:
            while worker.append(task_id, 0, [])[0] != "cancel":
                time.sleep(0.01)
            worker.finish(task_id, [1], status="completed", reasons=[])

        thread = threading.Thread(target=stops)
        thread.start()
        answer = http.post(f"/v1/tasks/{task_id}/cancel").json()
        thread.join()
        assert (answer["accepted"], answer["status"]) == (True, "cancelled")
        assert answer["choices"][0]["text"] == "a"
        assert answer["usage"]["output_tokens"] == 1

    def test_a_finished_task_is_not(self, http: httpx.Client, submit: Submit, worker: FakeWorker) -> None:
        task_id = submit()
        worker.serve(task_id)
        answer = http.post(f"/v1/tasks/{task_id}/cancel")
        task = http.get(f"/v1/tasks/{task_id}").json()
        assert (answer.status_code, answer.json()) == (200, task | {"accepted": False})
        assert task["status"] == "completed"

    def test_an_unknown_id_is_404(self, http: httpx.Client) -> None:
        answer = http.post("/v1/tasks/nobody/cancel")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "task_not_found")
