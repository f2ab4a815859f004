"""What both clients' handles promise, on a real store with a fake worker."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from producers import (
    AsyncClient,
    Client,
    End,
    PenstockError,
    Prompt,
    TaskErased,
    TaskFailed,
    TaskInBatch,
    TaskNotFound,
    Token,
)
from producers.contract import keys
from tests.producers.conftest import QUEUE, subscribers
from tests.producers.faces import Face
from tests.producers.fake_worker import FakeWorker
from tests.waiting import PATIENCE_S, until


def later(do: Callable[[], object], seconds: float = 0.2) -> threading.Timer:
    timer = threading.Timer(seconds, do)
    timer.start()
    return timer


def test_a_task_is_streamed_and_its_result_put_together(client: Face, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt=[1, 2, 3])
    timer = later(lambda: worker.serve(handle.id, ["Hello", ",", " world"]))
    events = list(handle.stream())
    timer.join()
    assert [e.text for e in events if isinstance(e, Token)] == ["Hello", ",", " world"]
    assert [e.position for e in events] == [0, 1, 2, 3]
    assert isinstance(events[-1], End)

    result = handle.result(timeout=PATIENCE_S)
    assert (result.id, result.model, result.tier, result.status) == (handle.id, "tiny", "default", "completed")
    assert (result.text, result.token_ids, result.choices[0].finish_reason) == ("Hello, world", (0, 1, 2), "stop")
    assert result.usage == {"prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 3}
    assert (result.error, result.choices[0].logprobs) == (None, None)
    times = result.times
    assert times["created"] <= times["queued"] <= times["started"] <= times["first"] <= times["finished"]


def test_result_waits_for_the_end(client: Face, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt="x")
    timer = later(lambda: worker.serve(handle.id))
    assert handle.result(timeout=PATIENCE_S).text == "Hello, world"
    timer.join()


def test_several_choices_and_logprobs_are_kept_apart(client: Face, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt="x", n=2, logprobs=1)
    worker.claim(handle.id)
    worker.append(handle.id, 0, ["a"], choice=1, logprobs=[(-0.5, ((7, -0.5),))])
    worker.append(handle.id, 0, ["b", "c"], choice=0, logprobs=[(-1.0, ()), (-2.0, ())], finish_reason="length")
    worker.append(handle.id, 1, ["d"], choice=1, logprobs=[(-0.25, ((8, -0.125),))], finish_reason="stop")
    worker.finish(handle.id, [2, 2], reasons=["length", "stop"])
    first, second = handle.result(timeout=PATIENCE_S).choices
    assert (first.text, first.token_ids, first.finish_reason) == ("bc", (0, 1), "length")
    assert (second.text, second.token_ids, second.finish_reason) == ("ad", (1000, 1001), "stop")
    assert first.logprobs == ((-1.0, ()), (-2.0, ()))
    assert second.logprobs == ((-0.5, ((7, -0.5),)), (-0.25, ((8, -0.125),)))
    ends = [(e.choice, e.index) for e in handle.stream() if isinstance(e, Token) and e.finish_reason]
    assert ends == [(0, 1), (1, 1)]


def test_a_prompts_logprobs_come_before_its_tokens_and_count_none(client: Face, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt=[7], prompt_logprobs=1)
    logprobs = [None, *((-k / 8, ((k, -0.5),)) for k in range(1, 700))]
    worker.claim(handle.id)
    timer = later(lambda: worker.prompt(handle.id, range(700), logprobs))
    stream = handle.stream()
    parts = [next(stream), next(stream)]
    timer.join()
    assert [type(part) for part in parts] == [Prompt, Prompt]
    assert [(part.position, part.first, len(part.token_ids)) for part in parts] == [(0, 0, 512), (1, 512, 188)]
    worker.append(handle.id, 0, ["a", "b"])
    worker.finish(handle.id, [2])
    assert [(e.position, getattr(e, "index", None)) for e in stream] == [(2, 0), (3, 1), (4, None)]
    result = handle.result(timeout=PATIENCE_S)
    assert result.prompt_token_ids == tuple(range(700))
    assert result.prompt_logprobs == tuple(logprobs)
    assert result.usage["output_tokens"] == 2
    assert [e.position for e in handle.stream(start=1)] == [1, 2, 3, 4]


def test_a_stream_is_read_from_any_position(client: Face, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt="x")
    worker.serve(handle.id, [str(k) for k in range(10)])
    whole = list(handle.stream())
    for start in range(12):
        assert list(handle.stream(start)) == whole[start:]
    assert list(handle.stream(10**6)) == []


def test_a_timeout_leaves_the_task_alone(client: Face, valkey: Redis, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt="x")
    for timeout in (0, 0.1):
        with pytest.raises(TimeoutError, match=handle.id):
            handle.result(timeout=timeout)
    assert handle.status().status == "queued"
    worker.serve(handle.id)
    assert handle.result(timeout=0).text == "Hello, world"


def test_a_failed_task_raises_its_error_unless_asked_not_to(client: Face, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt="x")
    worker.claim(handle.id)
    worker.append(handle.id, 0, ["half"])
    error = {"code": "engine_error", "message": "The engine broke.", "param": "prompt"}
    worker.finish(handle.id, [1], status="failed", reasons=["error"], error=error)
    with pytest.raises(TaskFailed, match=r"The engine broke\.") as failed:
        handle.result(timeout=PATIENCE_S)
    assert (failed.value.status, failed.value.code, failed.value.param) == ("failed", "engine_error", "prompt")
    result = handle.result(timeout=PATIENCE_S, raise_for_status=False)
    assert (result.status, result.text, result.error) == ("failed", "half", error)


def test_an_incomplete_task_is_no_failure(client: Face, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt="x")
    worker.claim(handle.id)
    worker.append(handle.id, 0, ["half"])
    worker.finish(handle.id, [1], status="incomplete", reasons=["length"])
    assert handle.result(timeout=PATIENCE_S).status == "incomplete"


def test_a_queued_task_is_cancelled_at_once(client: Face, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt="x")
    assert handle.cancel() is True
    assert handle.status().status == "cancelled"
    assert [type(event) for event in handle.stream()] == [End]
    with pytest.raises(TaskFailed) as failed:
        handle.result(timeout=PATIENCE_S)
    assert (failed.value.status, failed.value.code) == ("cancelled", "cancelled")
    assert handle.cancel() is True  # asked twice, still so
    assert worker.claim(worker.take(QUEUE) or "").answer == "settle"


def test_a_running_task_is_cancelled_by_its_worker(client: Face, valkey: Redis, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt="x")
    worker.claim(handle.id)
    worker.append(handle.id, 0, ["a"])
    with valkey.pubsub(ignore_subscribe_messages=True) as words:
        words.subscribe(keys.control(worker.incarnation))
        words.get_message(timeout=PATIENCE_S)
        assert handle.cancel() is True
        assert handle.cancel() is True  # asked twice, still so
        message = words.get_message(timeout=PATIENCE_S)
    assert message is not None
    assert message["data"] == f"cancel {handle.id}".encode()
    assert handle.status().status == "in_progress"
    assert handle.status().cancel_accepted
    assert worker.append(handle.id, 1, ["b"]) == ("cancel", 1)
    assert worker.finish(handle.id, [1]) == ["won", "cancelled"]
    assert handle.result(timeout=PATIENCE_S, raise_for_status=False).text == "a"


def test_a_finished_task_is_not_cancelled(client: Face, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt="x")
    worker.serve(handle.id)
    assert handle.cancel() is False
    assert handle.result(timeout=PATIENCE_S).status == "completed"


def test_a_deleted_task_is_unknown(client: Face, worker: FakeWorker, valkey: Redis) -> None:
    running, done = (client.submit(model="tiny", prompt=[1], idempotency_key=key) for key in "ab")
    worker.claim(running.id)
    worker.serve(done.id)
    for handle in (running, done):
        handle.delete()
        with pytest.raises(TaskNotFound, match=handle.id):
            handle.delete()
        with pytest.raises(TaskNotFound):
            handle.status()
    assert worker.append(running.id, 0, ["x"])[0] == "gone"
    assert list(client.tasks.list()) == []
    assert client.submit(model="tiny", prompt=[1], idempotency_key="a").id != running.id


def test_a_batchs_line_is_not_deleted_by_itself(client: Face, valkey: Redis) -> None:
    handle = client.submit(model="tiny", prompt=[1])
    valkey.hset(keys.task(handle.id), "batch", "batch_7")
    with pytest.raises(TaskInBatch, match="batch_7"):
        handle.delete()
    assert handle.status().status == "queued"


def test_the_id_of_a_deleted_task_is_not_taken_at_once(client: Face, valkey: Redis) -> None:
    client.submit(model="tiny", prompt=[1], task_id="mine").delete()
    for key in (None, "k"):
        with pytest.raises(TaskErased, match="mine was deleted"):
            client.submit(model="tiny", prompt=[2], task_id="mine", idempotency_key=key)
    assert not valkey.keys(keys.idempotency("*")), "nothing of the refused request is kept"
    valkey.delete(keys.erased("mine"))
    assert client.submit(model="tiny", prompt=[2], task_id="mine", idempotency_key="k").id == "mine"


def test_a_task_that_is_not_there_is_not_found(client: Face) -> None:
    handle = client.get("nowhere")
    for act in (handle.status, handle.cancel, handle.result, lambda: list(handle.stream())):
        with pytest.raises(TaskNotFound, match="nowhere"):
            act()


def test_models_are_listed_by_name(client: Face, valkey: Redis) -> None:
    valkey.hset(keys.MODELS, "alpha", '{"name": "alpha"}')
    assert [card["name"] for card in client.models()] == ["alpha", "tiny"]


def test_another_store_than_the_broker_holds_the_record(
    make_client: Any, valkey: Redis, valkey_url: str, model: str
) -> None:
    broker_url = valkey_url.replace("/0", "/1")
    handle = make_client(broker_url, valkey_url).submit(model=model, prompt="x")
    assert valkey.exists(keys.task(handle.id))
    assert not valkey.exists(QUEUE)
    with Redis.from_url(broker_url) as broker:
        assert broker.keys() == [QUEUE.encode()]


def test_a_reader_of_a_closed_client_is_told(make_client: Any, valkey_url: str, model: str) -> None:
    client = make_client(valkey_url)
    handle = client.submit(model=model, prompt="x")
    timer = later(client.close)
    with pytest.raises(PenstockError, match="closed"):
        list(handle.stream())
    timer.join()


def test_a_stream_left_early_is_unsubscribed(client: Face, valkey: Redis, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt="x")
    worker.claim(handle.id)
    worker.append(handle.id, 0, ["a"])
    stream = handle.stream()
    next(stream)
    timer = later(lambda: worker.append(handle.id, 1, ["b"]))
    next(stream)
    timer.join()
    until(lambda: subscribers(valkey, handle.id) == 1)
    stream.close()  # type: ignore[attr-defined, unused-ignore]  # both faces give generators
    until(lambda: subscribers(valkey, handle.id) == 0)


def test_a_closed_client_does_nothing_more(valkey_url: str, model: str) -> None:
    client = Client(valkey_url)
    handle = client.submit(model=model, prompt="x")
    client.close()
    client.close()
    threads = set(threading.enumerate())
    for use in (handle.status, lambda: next(handle.stream()), lambda: client.submit(model=model, prompt="x")):
        with pytest.raises(PenstockError, match="closed"):
            use()
    assert not set(threading.enumerate()) - threads


async def test_a_closed_asyncio_client_does_nothing_more(valkey_url: str, model: str) -> None:
    client = AsyncClient(valkey_url)
    handle = await client.submit(model=model, prompt="x")
    await client.aclose()
    await client.aclose()
    for use in (handle.status(), anext(handle.stream()), client.submit(model=model, prompt="x"), client.models()):
        with pytest.raises(PenstockError, match="closed"):
            await use


@pytest.mark.parametrize("start", [-1, 1.5, 2**64, True])
def test_a_position_that_is_none_is_refused(client: Face, start: Any) -> None:
    with pytest.raises(ValueError, match="a position from 0 to"):
        list(client.get("any").stream(start))


def test_threads_share_a_client(valkey_url: str, model: str, worker: FakeWorker) -> None:
    with Client(valkey_url) as client:
        texts: dict[str, str] = {}

        def one(k: int) -> None:
            handle = client.submit(model=model, prompt="x")
            texts[handle.id] = handle.result(timeout=PATIENCE_S).text

        threads = [threading.Thread(target=one, args=(k,)) for k in range(10)]
        for thread in threads:
            thread.start()
        served: dict[str, str] = {}
        while len(served) < 10:
            if (task_id := worker.take(QUEUE)) is not None:
                served[task_id] = f"for {task_id}"
                worker.serve(task_id, [served[task_id]])
        for thread in threads:
            thread.join()
        assert texts == served


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_client_that_was_reading_survives_a_fork_in_parent_and_child(valkey_url: str) -> None:
    code = """
import json, os, sys, threading
from redis import Redis
from producers import AsyncClient, Client
from producers.contract import keys
from tests.producers.conftest import CARD
from tests.producers.fake_worker import FakeWorker

url = sys.argv[1]
client = Client(url)
with Redis.from_url(url) as valkey:
    valkey.hset(keys.MODELS, "tiny", json.dumps(CARD))

def served(name):
    with Redis.from_url(url) as valkey:
        worker = FakeWorker(valkey, name)
        handle = client.submit(model="tiny", prompt="x")
        serving = threading.Timer(0.1, worker.serve, (handle.id, [name]))
        serving.start()
        text = handle.result(timeout=60).text
        serving.join()
        return text

assert served("before") == "before"
child = os.fork()
if child == 0:
    ok = served("child") == "child"
    client.close()
    os._exit(0 if ok else 1)
assert served("parent") == "parent"
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
client.close()
"""
    done = subprocess.run([sys.executable, "-c", code, valkey_url], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
