"""A call that waits says what for: a stream in a comment, `Prefer: wait` in a header; however many wait."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis import Redis

from producers import AsyncClient
from producers.contract import keys
from producers.gateway import wait_reasons
from producers.gateway.http import sse
from producers.gateway.tasks import routes
from producers.gateway.wait_reasons import WaitReasons
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import POOL, QUEUE, Make, Open, Submit, until
from tests.producers.gateway.test_keys import as_caller
from tests.producers.gateway.test_keys import make as make  # the fixture

NAME = QUEUE.removeprefix(keys.model_queue(""))
NOBODY = f"no worker serves {NAME}; no autoscaler starts one: start a worker, or `penstock autoscaler`"
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "FIRST_S", 0.05)
    monkeypatch.setattr(wait_reasons, "FRESH_S", 0.0)


def comments(answer: httpx.Response) -> Iterator[str]:
    return (line.removeprefix(": ") for line in answer.iter_lines() if line.startswith(":"))


@pytest.mark.parametrize("path", CALLS)
def test_a_stream_says_it_in_a_comment(http: httpx.Client, model: str, path: str) -> None:
    with http.stream("POST", path, json={"model": model, "stream": True, **CALLS[path]}) as answer:
        assert next(comments(answer)) == f"waits for: {NOBODY}"


def test_a_tasks_events_say_it_until_it_runs(
    http: httpx.Client, submit: Submit, valkey: Redis, worker: FakeWorker
) -> None:
    task_id = submit()
    with http.stream("GET", f"/v1/tasks/{task_id}/events") as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith(": ")) == f": waits for: {NOBODY}"
        worker.serve(task_id)
        events = [line for line in lines if line.startswith((":", "event"))]
        assert events == ["event: token"] * 3 + ["event: end"], "no comment of what has come"


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_prefer_wait_says_it_in_a_header(http: httpx.Client, submit: Submit, model: str, method: str) -> None:
    wait = {"Prefer": "wait=1"}
    if method == "POST":
        answer = http.post("/v1/tasks", json={"model": model, "prompt": "x"}, headers=wait)
    else:
        answer = http.get(f"/v1/tasks/{submit()}", headers=wait)
    assert (answer.json()["status"], answer.headers["penstock-waits-for"]) == ("queued", NOBODY)
    assert "penstock-waits-for" not in http.get(f"/v1/tasks/{submit()}").headers


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_caller_who_prefers_an_explanation_is_told_before_the_wait_is_over(
    http: httpx.Client, submit: Submit, model: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "EXPLAIN_S", 0.05)
    prefer = {"Prefer": "Explain, wait=60"}
    if method == "POST":
        answer = http.post("/v1/tasks", json={"model": model, "prompt": "x"}, headers=prefer)
    else:
        answer = http.get(f"/v1/tasks/{submit()}", headers=prefer)
    assert (answer.status_code, answer.json()["status"]) == (202 if method == "POST" else 200, "queued")
    assert answer.json()["waits_for"] == answer.headers["penstock-waits-for"] == NOBODY
    assert answer.headers["preference-applied"] == "wait=60, explain"


def test_what_has_begun_is_waited_for_without_an_explanation(
    http: httpx.Client, submit: Submit, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    async def none(self: Any, task_id: str, **_: Any) -> str:
        looked.append(task_id)
        if len(looked) == 3:
            worker.finish(task_id, [1])
        return ""

    monkeypatch.setattr(routes, "EXPLAIN_S", 0.05)
    monkeypatch.setattr(WaitReasons, "text", none)
    task_id = submit()
    worker.claim(task_id)
    worker.append(task_id, 0, ["a"])
    answer = http.get(f"/v1/tasks/{task_id}", headers={"Prefer": 'wait=60, explain=""'})
    assert (answer.json()["status"], looked) == ("completed", [task_id] * 3)
    assert answer.headers["preference-applied"] == "wait=60, explain"
    assert answer.json()["waits_for"] is None


@pytest.mark.parametrize("prefer", ["explain", "wait=1, explain=no", "wait=1, explained"])
def test_other_preferences_change_nothing(http: httpx.Client, submit: Submit, prefer: str) -> None:
    answer = http.get(f"/v1/tasks/{submit()}", headers={"Prefer": prefer})
    assert "explain" not in answer.headers.get("preference-applied", "")
    assert ("penstock-waits-for" in answer.headers) == ("wait" in prefer)


def test_a_trouble_of_several_lines_is_one_short_line(http: httpx.Client, submit: Submit, valkey: Redis) -> None:
    state = {
        "at": valkey.time()[0],
        "wanted": 1,
        "trouble": 'it died:\n\ndata: {}\r\nid: 7 \x1b[0m\x00\x7f"é' + "x" * 1000,
    }
    valkey.hset(keys.SCALE_POOLS, POOL.model, json.dumps(state))
    text = http.get(f"/v1/tasks/{submit()}", headers={"Prefer": "wait=1"}).headers["penstock-waits-for"]
    assert text.startswith(
        f'no worker serves {NAME}; workers do not come up: it died: data: {{}} id: 7 \\x1b[0m\\x00\\x7f"\\xe9xx'
    )
    assert (len(text), text[-3:]) == (wait_reasons.LONGEST, "...")


def test_all_who_wait_share_a_reading_of_the_fleet(
    open_door: Open, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, readings, told = wait_reasons.read_fleet, [], []

    async def counted(*arguments: Any) -> Any:
        readings.append(1)
        return await read(*arguments)

    monkeypatch.setattr(wait_reasons, "read_fleet", counted)
    monkeypatch.setattr(wait_reasons, "FRESH_S", 3600.0)

    url = open_door().url

    def follow(task_id: str) -> None:
        with httpx.stream("GET", f"{url}/v1/tasks/{task_id}/events") as answer:
            told.append(next(comments(answer)))

    threads = [threading.Thread(target=follow, args=(submit(),), daemon=True) for _ in range(12)]
    for thread in threads:
        thread.start()
    until(lambda: len(told) == len(threads))
    assert ({*told}, len(readings)) == ({f"waits for: {NOBODY}"}, 1)


def test_a_store_that_fails_leaves_a_heartbeat(
    http: httpx.Client, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*arguments: Any) -> Any:
        raise ConnectionResetError

    monkeypatch.setattr(wait_reasons, "read_fleet", broken)
    with http.stream("GET", f"/v1/tasks/{submit()}/events") as answer:
        assert next(comments(answer)) == "still here"


async def test_who_may_not_read_tasks_gets_the_reasons_names(submit: Submit, valkey_url: str) -> None:
    async with AsyncClient(valkey_url) as client:
        waits, task_id = wait_reasons.WaitReasons(client), submit()
        assert await waits.text(task_id, whole=False) == "no_worker, not_scaled"
        assert await waits.text("there is none", whole=True) == ""


@pytest.mark.parametrize("background", [True, False])
def test_a_response_tells_who_may_not_read_tasks_the_names_alone(
    open_door: Open, model: str, make: Make, background: bool
) -> None:
    url = open_door(auth="keys").url
    body = {"model": model, "stream": True, "background": background, "input": "x"}
    for scopes, told in ((("submit",), "no_worker, not_scaled"), (("submit", "read"), NOBODY)):
        key = as_caller(make(scopes=scopes))
        # The second time it is the response that the first one made.
        for again in range(2 if background else 1):
            named = key | {"idempotency-key": "-".join(scopes)}
            with httpx.stream("POST", f"{url}/v1/responses", json=body, headers=named) as answer:
                assert next(comments(answer)) == f"waits for: {told}", again
