"""`/v1/tasks` over real HTTP: what is taken, what it becomes, how it ends."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from redis import Redis

from engine.text import Tokenizer
from producers import keys
from producers.gateway import app, outcome
from producers.record import Record
from producers.task import Task
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import CARD, QUEUE, TINY, Door, until

Submit = Callable[..., str]


def record_of(valkey: Redis, task_id: str) -> Record:
    return Record.parse(task_id, valkey.hgetall(keys.task(task_id)))


class TestSubmit:
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

    @pytest.mark.parametrize("length", [4_000, 4_097, 20_000])
    def test_long_text_is_encoded_as_short_text_is(self, http: httpx.Client, model: str, length: int) -> None:
        text = ("import os\n" * length)[:length]
        answer = http.post("/v1/tasks", json={"model": model, "prompt": text})
        count = len(Tokenizer.from_folder(TINY).encode(text))
        assert answer.status_code == 400
        assert f"{count} prompt tokens" in answer.json()["error"]["message"]

    def test_token_ids_are_taken_as_they_are(self, submit: Submit, valkey: Redis) -> None:
        assert record_of(valkey, submit(prompt=[5, 6, 7])).task["prompt"] == [5, 6, 7]

    @pytest.mark.parametrize("tier", keys.TIERS)
    def test_a_tier_goes_to_its_list(self, submit: Submit, valkey: Redis, tier: str) -> None:
        task_id = submit(tier=tier)
        (message,) = valkey.lrange(keys.tier_list(QUEUE, tier), 0, -1)
        assert json.loads(message)["headers"]["id"] == task_id

    def test_the_longest_prompt_that_fits_is_taken(self, submit: Submit) -> None:
        submit(prompt=[5] * (CARD.context_length - 16), max_tokens=16)

    def test_charset_and_case_of_the_content_type_do_not_matter(self, http: httpx.Client, model: str) -> None:
        body = json.dumps({"model": model, "prompt": "x"}).encode()
        answer = http.post("/v1/tasks", content=body, headers={"content-type": "Application/JSON; charset=utf-8"})
        assert answer.status_code == 202


def bad(**fields: Any) -> bytes:
    """A task that would be fine, but for these fields."""
    return json.dumps({"model": CARD.name, "prompt": "def f", **fields}).encode()


BAD_BODIES: dict[str, tuple[bytes, int, str, str | None, str]] = {
    # name: body, status, code, param, what the message says
    "unknown model": (bad(model="huge"), 404, "model_not_found", "model", "tiny"),
    "empty model": (bad(model=""), 400, "invalid_value", "model", "1 to 200"),
    "no model": (b'{"prompt": "x"}', 400, "missing_parameter", "model", "model is missing"),
    "no prompt": (b'{"model": "tiny"}', 400, "missing_parameter", "prompt", "prompt is missing"),
    "empty prompt": (bad(prompt=""), 400, "empty_prompt", "prompt", "empty"),
    "empty list prompt": (bad(prompt=[]), 400, "empty_prompt", "prompt", "empty"),
    "null prompt": (bad(prompt=None), 400, "invalid_type", "prompt", "null"),
    "number prompt": (bad(prompt=5), 400, "invalid_type", "prompt", "5"),
    "lone surrogate": (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "invalid_value", "prompt", "surrogate"),
    "text over the context": (bad(prompt="pass\n" * 2000), 400, "context_length_exceeded", "prompt", "1024"),
    "ids over the context": (bad(prompt=[5] * 1024), 400, "context_length_exceeded", "prompt", "1024"),
    "output over the context": (
        bad(prompt=[5] * 1000, max_tokens=25),
        400,
        "context_length_exceeded",
        "max_tokens",
        "1000 prompt tokens and 25",
    ),
    "text over a mebibyte": (bad(prompt="x" * (1 << 20) + "y"), 400, "invalid_value", "prompt", "1048577"),
    "unknown token id": (bad(prompt=[2048]), 400, "invalid_value", "prompt", "0 to 2047"),
    "negative token id": (bad(prompt=[1, -1]), 400, "invalid_value", "prompt", "prompt[1]"),
    "bool token id": (bad(prompt=[True]), 400, "invalid_value", "prompt", "prompt[0]"),
    "negative temperature": (bad(temperature=-0.1), 400, "invalid_value", "temperature", "-0.1"),
    "NaN temperature": (bad(temperature=float("nan")), 400, "invalid_value", "temperature", "nan"),
    "infinite temperature": (bad(temperature=float("inf")), 400, "invalid_value", "temperature", "inf"),
    "text temperature": (bad(temperature="0.5"), 400, "invalid_type", "temperature", "0.5"),
    "negative max_tokens": (bad(max_tokens=-1), 400, "invalid_value", "max_tokens", "-1"),
    "best of too few": (bad(n=3, best_of=2), 400, "invalid_value", "best_of", "2"),
    "a bias of no token": (bad(logit_bias={"5000": 1}), 400, "invalid_value", "logit_bias", "5000"),
    "huge prompt_logprobs": (bad(prompt_logprobs=10**400), 400, "invalid_value", "prompt_logprobs", "20"),
    "bool max_tokens": (bad(max_tokens=True), 400, "invalid_type", "max_tokens", "true"),
    "fractional max_tokens": (bad(max_tokens=1.5), 400, "invalid_type", "max_tokens", "1.5"),
    "negative top_k": (bad(top_k=-1), 400, "invalid_value", "top_k", "-1"),
    "NaN top_p": (bad(top_p=float("nan")), 400, "invalid_value", "top_p", "nan"),
    "zero top_p": (bad(top_p=0), 400, "invalid_value", "top_p", "0"),
    "negative seed": (bad(seed=-1), 400, "invalid_value", "seed", "-1"),
    "n of zero": (bad(n=0), 400, "invalid_value", "n", "0"),
    "n of 65": (bad(n=65), 400, "invalid_value", "n", "65"),
    "min over max": (bad(min_tokens=5, max_tokens=4), 400, "invalid_value", "min_tokens", "5"),
    "too many stops": (bad(stop=["x"] * 17), 400, "invalid_value", "stop", "16"),
    "empty stop": (bad(stop=[""]), 400, "invalid_value", "stop", "stop"),
    "bare empty stop": (bad(stop=""), 400, "invalid_value", "stop", "stop"),
    "long stop": (bad(stop=["x" * 257]), 400, "invalid_value", "stop", "256"),
    "unknown tier": (bad(tier="gold"), 400, "invalid_value", "tier", "gold"),
    "zero timeout": (bad(timeout=0), 400, "invalid_value", "timeout", "0"),
    "unknown field": (bad(max_token=5), 400, "unknown_parameter", "max_token", "max_tokens"),
    "unknown field beyond recognition": (bad(zzz=5), 400, "unknown_parameter", "zzz", "zzz"),
    "a field called self": (bad(self=1), 400, "unknown_parameter", "self", "self"),
    "a field's name that is no text": (
        b'{"model": "tiny", "prompt": "x", "\\ud800": 1}',
        400,
        "unknown_parameter",
        r"\ud800",
        r"\ud800",
    ),
    "a field's name of a megabyte": (bad(**{"k" * (1 << 20): 1}), 400, "unknown_parameter", "k" * 64 + "...", "kkk"),
    "a null": (b"null", 400, "invalid_type", None, "not null"),
    "an id of one's own": (bad(id="mine"), 400, "unknown_parameter", "id", "id"),
    "malformed JSON": (b'{"model": "tiny", "prompt": ', 400, "invalid_json", None, "not JSON"),
    "empty body": (b"", 400, "invalid_json", None, "not JSON"),
    "a list": (b"[]", 400, "invalid_type", None, "object"),
    "a bare number": (b"5", 400, "invalid_type", None, "object"),
    "deep nesting": (b"[" * 100_000, 400, "invalid_json", None, "not JSON"),
    "invalid UTF-8": (b'{"model": "tiny", "prompt": "\xff"}', 400, "invalid_utf8", None, "byte at 29"),
    "UTF-16": ('{"model": "tiny"}'.encode("utf-16"), 400, "invalid_utf8", None, "UTF-8"),
    "too large": (b'{"model": "' + b"x" * (4 << 20) + b'"}', 413, "body_too_large", None, str(4 << 20)),
}


class TestRefused:
    @pytest.mark.parametrize("name", BAD_BODIES)
    def test_bad_input_is_refused_and_leaves_nothing(self, http: httpx.Client, valkey: Redis, name: str) -> None:
        body, status, code, param, says = BAD_BODIES[name]
        before = valkey.dbsize()
        answer = http.post("/v1/tasks", content=body, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error
        assert error["type"] == "invalid_request_error"
        assert says in error["message"]
        assert len(error["message"]) < 1000
        assert set(error) == {"message", "type", "param", "code"}
        assert valkey.dbsize() == before

    @pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
    def test_only_json_is_taken(self, http: httpx.Client, valkey: Redis, kind: str | None) -> None:
        before = valkey.dbsize()
        headers = {"content-type": kind} if kind else {}
        answer = http.post("/v1/tasks", content=bad(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert "application/json" in answer.json()["error"]["message"]
        assert valkey.dbsize() == before

    @pytest.mark.parametrize("mebibytes", [5, 40])
    def test_a_large_body_of_unknown_length_is_refused_while_it_is_read(
        self, http: httpx.Client, valkey: Redis, mebibytes: int
    ) -> None:
        before, sent = valkey.dbsize(), 0

        def body() -> Any:
            nonlocal sent
            for _ in range(mebibytes * 16):
                sent += 1
                yield b" " * (1 << 16)

        try:
            answer = http.post("/v1/tasks", content=body(), headers={"content-type": "application/json"})
        except httpx.WriteError:
            assert mebibytes == 40  # beyond all courtesy: the connection was closed on us
            assert sent < mebibytes * 16
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert valkey.dbsize() == before

    def test_a_client_that_leaves_while_it_sends_is_no_fault(
        self, door: Door, http: httpx.Client, valkey: Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = valkey.dbsize()
        head = "POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        with caplog.at_level("INFO", "producers.gateway.edge"):
            with socket.create_connection(("127.0.0.1", door.port)) as leaving:
                leaving.sendall(head.encode() + b'{"model"')
            until(lambda: caplog.records)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert http.get("/livez").status_code == 200
        assert valkey.dbsize() == before

    def test_the_connection_serves_on_after_a_large_body(self, http: httpx.Client, submit: Submit) -> None:
        body = b"x" * (5 << 20)
        for _ in range(3):
            answer = http.post("/v1/tasks", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 413
        submit()

    def test_a_model_that_generates_nothing_is_refused(self, http: httpx.Client, valkey: Redis) -> None:
        card = {**json.loads(CARD.to_json()), "name": "embedder", "capabilities": ["embed"]}
        valkey.hset(keys.MODELS, "embedder", json.dumps(card))
        answer = http.post("/v1/tasks", json={"model": "embedder", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_model")

    def test_a_model_whose_tokenizer_is_missing_takes_token_ids_alone(
        self, http: httpx.Client, valkey: Redis, submit: Submit
    ) -> None:
        valkey.delete(keys.blob(CARD.files["tokenizer.json"]))
        answer = http.post("/v1/tasks", json={"model": "tiny", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        submit(prompt=[5])

    def test_a_tokenizer_that_is_not_what_its_hash_says_is_not_used(self, http: httpx.Client, valkey: Redis) -> None:
        blob = keys.blob(CARD.files["tokenizer.json"])
        right = valkey.get(blob)
        valkey.set(blob, b"{}")
        answer = http.post("/v1/tasks", json={"model": "tiny", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        valkey.set(blob, right)  # a failed load is not remembered
        assert http.post("/v1/tasks", json={"model": "tiny", "prompt": "x"}).status_code == 202


class TestLook:
    def test_a_queued_task_has_no_outputs_yet(self, http: httpx.Client, submit: Submit) -> None:
        task = http.get(f"/v1/tasks/{submit(tier='flex', metadata={'a': 'b'})}").json()
        assert (task["status"], task["tier"], task["metadata"]) == ("queued", "flex", {"a": "b"})
        assert task["queued_at"] >= task["created_at"]
        assert task["choices"] is task["usage"] is task["error"] is task["finished_at"] is None

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

    def test_few_large_results_are_in_memory_at_once(
        self, open_door: Callable[..., Door], model: str, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(outcome, "LARGE", 1000)
        monkeypatch.setattr(app, "LARGE_RESULTS", 1)
        door = open_door(patience=0.2, stall=1)
        with httpx.Client(base_url=door.url, timeout=20) as http, socket.socket() as stalled:
            small, large = (
                http.post("/v1/tasks", json={"model": model, "prompt": [5], "logprobs": 20}).json()["id"] for _ in "ab"
            )
            worker.serve(small)
            worker.claim(large)
            many = [(-0.5, tuple((token, -0.123456789) for token in range(20)))] * 500
            for start in range(0, 10_000, 500):
                worker.append(large, start, ["x"] * 500, logprobs=many)
            worker.finish(large, [10_000])
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect(("127.0.0.1", door.port))
            stalled.sendall(f"GET /v1/tasks/{large} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert stalled.recv(12) == b"HTTP/1.1 200"
            answer = http.get(f"/v1/tasks/{large}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_large_results")
            assert http.get(f"/v1/tasks/{small}").status_code == 200
            with pytest.raises(ConnectionResetError):  # who takes nothing is cut off, and makes room
                until(lambda: not stalled.send(b" "))
            assert len(until(lambda: http.get(f"/v1/tasks/{large}").json().get("choices"))[0]["logprobs"]) == 10_000

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

    def test_no_id_is_404(self, http: httpx.Client) -> None:
        answer = http.get("/v1/tasks/")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")

    @pytest.mark.parametrize("path", ["/v1/tasks/nobody", "/v1/tasks/nobody/events", "/v1/tasks/%00%ff"])
    def test_an_unknown_id_is_404(self, http: httpx.Client, path: str) -> None:
        answer = http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "task_not_found")


class TestCancel:
    def test_a_queued_task_is_cancelled_at_once(self, http: httpx.Client, submit: Submit) -> None:
        task_id = submit()
        answer = http.post(f"/v1/tasks/{task_id}/cancel")
        assert (answer.status_code, answer.json()) == (200, {"id": task_id, "accepted": True, "status": "cancelled"})
        assert http.get(f"/v1/tasks/{task_id}").json()["status"] == "cancelled"

    def test_a_running_task_is_cancelled_by_its_worker(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker
    ) -> None:
        task_id = submit()
        worker.claim(task_id)
        answer = http.post(f"/v1/tasks/{task_id}/cancel").json()
        assert (answer["accepted"], answer["status"]) == (True, "in_progress")
        assert worker.append(task_id, 0, ["a"])[0] == "cancel"

    def test_a_finished_task_is_not(self, http: httpx.Client, submit: Submit, worker: FakeWorker) -> None:
        task_id = submit()
        worker.serve(task_id)
        answer = http.post(f"/v1/tasks/{task_id}/cancel")
        assert (answer.status_code, answer.json()) == (200, {"id": task_id, "accepted": False, "status": "completed"})

    def test_an_unknown_id_is_404(self, http: httpx.Client) -> None:
        answer = http.post("/v1/tasks/nobody/cancel")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "task_not_found")


class TestEveryAnswer:
    @pytest.mark.parametrize(
        ("method", "path", "status", "code"),
        [
            ("GET", "/", 404, "not_found"),
            ("GET", "/v1/nothing", 404, "not_found"),
            ("GET", "/v1/tasks", 405, "method_not_allowed"),
            ("DELETE", "/v1/tasks/x", 405, "method_not_allowed"),
            ("PUT", "/v1/tasks/x/events", 405, "method_not_allowed"),
        ],
    )
    def test_unknown_urls_and_methods_have_the_shape_of_all_errors(
        self, http: httpx.Client, method: str, path: str, status: int, code: str
    ) -> None:
        answer = http.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
        assert (status == 405) == ("allow" in answer.headers)

    def test_the_callers_request_id_is_echoed(self, http: httpx.Client) -> None:
        for path in ("/livez", "/v1/tasks/nobody", "/nowhere"):
            assert http.get(path, headers={"x-request-id": "abc-123"}).headers["x-request-id"] == "abc-123"

    @pytest.mark.parametrize("given", ["", "a b", "x" * 129, 'quo"te'])
    def test_a_request_id_is_made_where_none_of_use_came(self, http: httpx.Client, given: str) -> None:
        made = {http.get("/livez", headers={"x-request-id": given}).headers["x-request-id"] for _ in range(2)}
        assert given not in made
        assert len(made) == 2

    def test_the_openapi_document_has_the_fields_of_a_task_and_all_routes(self, http: httpx.Client) -> None:
        document = http.get("/openapi.json").json()
        body = document["paths"]["/v1/tasks"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(body["properties"]) == set(Task.model_fields)
        assert body["required"] == ["model", "prompt"]
        assert "$defs" not in body
        assert {path for path in document["paths"] if path.startswith("/v1/tasks/")} == {
            "/v1/tasks/{task_id}",
            "/v1/tasks/{task_id}/events",
            "/v1/tasks/{task_id}/cancel",
        }

    def test_a_fault_of_ours_shows_nothing_of_our_insides(
        self, door: Door, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken() -> None:
            raise RuntimeError("secret")

        monkeypatch.setattr(door.app.state.gateway.client, "models", broken)
        answer = http.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "secret" not in answer.text
        assert answer.headers["x-request-id"]
