from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from engine.prefix import prompt_marks
from producers import InvalidTask, SubmitFailed, Task, TaskExists, TaskNotFound, UnknownModel
from producers.client.directory import Directory
from producers.client.steps import drive
from producers.client.submission import submit
from producers.connection.script import script
from producers.contract import keys
from producers.contract.webhook import FINAL_EVENTS, new_secret
from producers.store import protocol
from tests.producers.conftest import CARD, QUEUE
from tests.producers.contract.test_record import GOOD
from tests.producers.faces import Face
from tests.producers.fake_worker import FakeWorker
from tests.producers.proxy import Proxy
from tests.waiting import until

UNFIT: list[dict[str, Any]] = [
    {"model": "tin"},
    {"prompt": [1000]},
    {"prompt": [1] * 512},
    {"prompt": "x", "max_tokens": 512},
    {"stop_token_ids": [1000]},
    {"order_key": "k"},
]


def test_the_record_keeps_the_callers_trace_and_no_bad_one(client: Face) -> None:
    good, bad = (client.submit(model="tiny", prompt=[1], traceparent=given) for given in (GOOD, "00-0-0-00"))
    assert good.status().fields["traceparent"] == GOOD
    assert "traceparent" not in bad.status().fields


def test_the_record_says_what_was_accepted(client: Face, valkey: Redis) -> None:
    before = int(valkey.time()[0]) * 1000
    handle = client.submit(
        model="tiny", prompt=[1, 2, 3], max_tokens=5, n=2, tier="flex", timeout=60, ttl=120, metadata={"a": "é"}
    )
    record = handle.status()
    fields = dict(record.fields)
    assert record.status == fields["status"] == "queued"
    assert (fields["model"], fields["queue"], fields["tier"], fields["n"]) == ("tiny", QUEUE, "flex", "2")
    assert (fields["prompt_tokens"], fields["tokens"], fields["ttl"], fields["deaths"]) == ("3", "13", "120", "0")
    assert before + 58_000 < int(fields["deadline"]) <= int(valkey.time()[0]) * 1000 + 61_000
    task = Task.parse(record.task)
    assert task.seed is not None
    assert task.model_copy(update={"seed": None}) == Task(
        model="tiny",
        prompt=[1, 2, 3],
        max_tokens=5,
        n=2,
        tier="flex",
        timeout=60,
        ttl=120,
        metadata={"a": "é"},
        temperature=0.6,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        typical_p=1.0,
        repetition_penalty=1.0,
    )
    assert valkey.zcard(keys.SUBMITTING) == 0


def test_a_message_has_the_marks_of_its_prompt_where_workers_place_tasks(client: Face, valkey: Redis) -> None:
    """Of token ids alone, as its tenant's prefix cache has them."""
    placed = CARD | {"marked_block": 16, "name": "placed"}
    valkey.hset(keys.MODELS, "placed", json.dumps(placed))
    prompt = [number % 100 for number in range(130)]
    for model, given in (("tiny", prompt), ("placed", "text"), ("placed", prompt[:63]), ("placed", prompt)):
        client.submit(model=model, prompt=given, max_tokens=5, tenant="t")
    said = [
        json.loads(raw)["headers"]["penstock"].get("prefix")
        for name in (keys.version_queue("placed", CARD["version"]), QUEUE)
        for raw in valkey.lrange(name, 0, -1)
    ]
    marks = prompt_marks(prompt, 16, salt="t", adapter="", version=CARD["version"])
    assert said == ["".join(marks), None, None, None]
    assert len(marks) == 2


def test_a_webhook_lies_beside_the_task_and_its_secret_is_not_in_it(client: Face) -> None:
    secret = new_secret()
    named = client.submit(model="tiny", prompt=[1], webhook={"url": "https://example.com/hook", "secret": secret})
    asked = client.submit(
        model="tiny", prompt=[1], webhook={"url": "https://example.com/", "events": ["response.failed"]}
    )
    record, other = named.status(), asked.status()
    assert record.json("webhook") == {"url": "https://example.com/hook", "events": list(FINAL_EVENTS)}
    assert record.fields["webhook_secret"] == secret
    assert "webhook" not in record.task
    assert other.json("webhook") == {"url": "https://example.com/", "events": ["response.failed"]}
    assert "webhook_secret" not in other.fields


def test_a_text_prompt_has_no_length_yet_and_no_deadline_unless_asked(client: Face) -> None:
    fields = client.submit(Task(model="tiny", prompt="words")).status().fields
    assert fields["tokens"] == str(2 + 256)
    assert not {"prompt_tokens", "deadline", "ttl"} & fields.keys()


@pytest.mark.parametrize("fields", [*UNFIT, {"top_p": 1.01}, {"temprature": 1.0}], ids=repr)
def test_a_refused_task_leaves_nothing_behind(client: Face, valkey: Redis, fields: dict[str, Any]) -> None:
    before = valkey.dbsize()
    with pytest.raises(InvalidTask):
        client.submit(**{"model": "tiny", "prompt": "x", **fields})
    assert valkey.dbsize() == before == 1  # cards
    until(lambda: valkey.pubsub_channels() == [])  # of the test before, one may be about to go


def test_an_unknown_model_is_told_which_there_are(client: Face, valkey: Redis) -> None:
    valkey.hset(keys.MODELS, "small", json.dumps(CARD | {"name": "small"}))
    with pytest.raises(UnknownModel, match=re.escape('There is no model "tin"; models here: small, tiny')) as refused:
        client.submit(model="tin", prompt="x")
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
    with pytest.raises(UnknownModel, match='The model "small" has no adapter "mine"; `penstock adapters ls`'):
        client.submit(model="small:mine", prompt="x")


def test_a_model_published_later_is_found_at_once_and_one_withdrawn_is_forgotten(
    make_client: Any, valkey: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(valkey_url)
    monkeypatch.setattr("producers.client.directory.FRESH_S", 3600.0)
    advice = "none is published in this store; `penstock models publish` lets tasks wait"
    with pytest.raises(UnknownModel, match=advice):
        client.submit(model="tiny", prompt="x")
    valkey.hset(keys.MODELS, "tiny", json.dumps(CARD))
    client.submit(model="tiny", prompt="x")
    valkey.delete(keys.MODELS)
    client.submit(model="tiny", prompt="x")  # for a while the card is used as it was
    monkeypatch.setattr("producers.client.directory.FRESH_S", 0.0)
    with pytest.raises(UnknownModel):
        client.submit(model="tiny", prompt="x")


@pytest.mark.parametrize("task_id", ["", "a b", "ä", "x" * 129, "a\n", "a/b", 5])
def test_a_task_id_that_is_no_name_is_refused(client: Face, valkey: Redis, task_id: Any) -> None:
    with pytest.raises(InvalidTask, match="task_id is"):
        client.submit(model="tiny", prompt="x", task_id=task_id)
    assert valkey.dbsize() == 1


def test_an_id_is_taken_once(client: Face, valkey: Redis) -> None:
    assert client.submit(model="tiny", prompt="x", task_id="mine").id == "mine"
    with pytest.raises(TaskExists, match="mine"):
        client.submit(model="tiny", prompt="y", task_id="mine")
    assert client.get("mine").status().task["prompt"] == "x"
    assert valkey.llen(QUEUE) == 1


def test_a_task_and_fields_are_not_mixed(client: Face) -> None:
    with pytest.raises(TypeError, match="n"):
        client.submit(Task(model="tiny", prompt="x"), n=2)


def pattern(at: str) -> bytes:
    """What a request contains that is the named one."""
    return b"LPUSH" if at == "send" else script(protocol.PACKAGE, at).sha.encode()


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", ["admit", "send", "queued"])
def test_a_lost_request_or_reply_neither_loses_nor_doubles_a_task(
    make_client: Any, proxy: Proxy, valkey: Redis, model: str, worker: FakeWorker, at: str, when: Any, times: int
) -> None:
    client = make_client(proxy.url)
    client.submit(model=model, prompt="warm up: connections are made, scripts are loaded")
    worker.serve(worker.take(QUEUE) or "")

    fault = proxy.fail(pattern(at), when, times)
    handle = client.submit(model=model, prompt=[1, 2, 3])
    assert fault.hits >= 1
    record = handle.status()
    assert record.fields["created"] == handle.status().fields["created"]
    assert sum(key.startswith(b"penstock:task:") for key in valkey.scan_iter()) == 2

    # However many messages there are, they are of this task, and it runs once.
    first = worker.take(QUEUE)
    assert first == handle.id
    worker.serve(handle.id, ["one", "two"])
    while (again := worker.take(QUEUE)) is not None:
        assert again == handle.id
        assert worker.claim(again).answer == "done"
    assert [getattr(event, "text", None) for event in handle.stream()] == ["one", "two", None]
    assert valkey.zcard(keys.SUBMITTING) == 0  # where QUEUED was lost, CLAIM did its work


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_store_that_stays_away_fails_the_submit(
    make_client: Any, proxy: Proxy, valkey: Redis, model: str, when: Any
) -> None:
    client = make_client(proxy.url, patience=0.3)
    client.submit(model=model, prompt="x")
    proxy.fail(pattern("admit"), when, 1000)
    with pytest.raises(SubmitFailed, match="did not confirm task abc"):
        client.submit(model=model, prompt="x", task_id="abc")
    proxy.heal()
    if when == "before":
        with pytest.raises(TaskNotFound):
            client.get("abc").status()
    else:
        assert client.get("abc").status().fields["status"] == "submitting"
        assert valkey.zscore(keys.SUBMITTING, "abc") is not None  # the sweeper knows
    assert valkey.llen(QUEUE) == 1


def test_a_broker_that_stays_away_leaves_the_record_to_the_sweeper(
    make_client: Any, proxy: Proxy, valkey: Redis, valkey_url: str, model: str
) -> None:
    client = make_client(proxy.url, valkey_url, patience=0.3)
    proxy.fail(b"LPUSH", "before", 1000)
    with pytest.raises(SubmitFailed, match="the sweeper will send it"):
        client.submit(model=model, prompt="x", task_id="abc")
    assert client.get("abc").status().fields["status"] == "submitting"
    assert valkey.zscore(keys.SUBMITTING, "abc") is not None
    proxy.heal()
    client.submit(model=model, prompt="x")  # the client itself goes on


def test_no_store_at_all_is_said(make_client: Any) -> None:
    client = make_client("redis://127.0.0.1:1/0", patience=0.1)
    with pytest.raises(SubmitFailed, match="nothing was queued"):
        client.submit(model="tiny", prompt="x")


@pytest.fixture
def full(valkey: Redis) -> Iterator[None]:
    """A store with no memory left: it answers, and refuses what would write."""
    valkey.config_set("maxmemory", 1)
    yield
    valkey.config_set("maxmemory", 0)


def test_a_store_that_refuses_is_not_said_to_be_away(client: Face, valkey: Redis, model: str, full: None) -> None:
    with pytest.raises(SubmitFailed, match=r"The store refused task abc, nothing was queued: .*maxmemory"):
        client.submit(model=model, prompt="x", task_id="abc")
    with pytest.raises(TaskNotFound):
        client.get("abc").status()


def test_wrong_credentials_are_not_tried_again(
    make_client: Any, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.client.steps.backoff", lambda attempt: pytest.fail("it was to be tried again"))
    client = make_client(valkey_url.replace("redis://", "redis://nobody:wrong@"))
    with pytest.raises(SubmitFailed, match=r"(?i)wrongpass|password"):
        client.submit(model="tiny", prompt="x")


def test_a_late_submit_is_refused_and_the_clock_measured_again(
    client: Face, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.monotonic_ns
    monkeypatch.setattr("producers.client.directory.FRESH_S", 3600.0)
    monkeypatch.setattr("producers.client.directory.time.monotonic_ns", lambda: real() + 60_000_000_000)
    client.submit(model="tiny", prompt="x")
    monkeypatch.setattr(
        "producers.client.directory.time.monotonic_ns", real
    )  # as if this machine had slept for a minute
    with pytest.raises(SubmitFailed, match="submit it again"):
        client.submit(model="tiny", prompt="x")
    assert valkey.llen(QUEUE) == 1
    client.submit(model="tiny", prompt="x")
    assert valkey.llen(QUEUE) == 2


@pytest.mark.parametrize("patience", [-1, 11, float("nan")])
def test_patience_ends_within_the_submit_window(make_client: Any, patience: float) -> None:
    with pytest.raises(ValueError, match="patience"):
        make_client("redis://127.0.0.1:1/0", patience=patience)


def test_what_says_nothing_is_named() -> None:
    """asyncio's time limits, for one."""

    def hang(step: object) -> None:
        raise TimeoutError

    steps = submit(Directory(), Task(model="tiny", prompt="x"), None, 0.0)
    with pytest.raises(SubmitFailed, match=r"nothing was queued: TimeoutError$"):
        drive(steps, hang)
