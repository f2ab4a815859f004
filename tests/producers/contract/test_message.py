from __future__ import annotations

import base64
import json
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from kombu import Connection
from redis import Redis

from producers import Client
from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from producers.contract.message import Message, is_native, kind_of, task_headers
from producers.contract.record import Record
from tests.producers.conftest import QUEUE
from tests.producers.faces import Face
from tests.waiting import PATIENCE_S


def parsed(raw: bytes | str) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(raw)
    message["body"] = json.loads(base64.b64decode(message["body"]))
    return message


@pytest.mark.parametrize("tier", keys.TIERS)
def test_our_envelope_is_the_one_that_send_task_writes(valkey: Redis, valkey_url: str, tier: str) -> None:
    message = Message("task-1", QUEUE, tier, n=2, tokens=77)
    with Client(valkey_url) as client:
        client._send(message)
    assert valkey.keys() == [
        broker_keys.list_of(message).encode()
    ]  # and it is where we would put it, with nothing beside it
    theirs, ours = parsed(valkey.lpop(broker_keys.list_of(message))), parsed(message.envelope())

    # Uuids that are made for each sender or delivery: both have one.
    for name in ("delivery_tag", "reply_to"):
        assert len(theirs["properties"].pop(name)) == len(ours["properties"].pop(name)) == 36
    assert theirs["headers"].pop("origin").startswith("gen")
    assert ours["headers"].pop("origin").startswith("gen")

    assert list(theirs) == list(ours)
    for part in theirs:
        assert theirs[part] == ours[part], part
        if isinstance(theirs[part], dict):
            assert theirs[part].keys() == ours[part].keys()
    assert ours["headers"]["id"] == ours["properties"]["correlation_id"] == "task-1"
    assert ours["headers"]["penstock"] == {"v": 1, "n": 2, "tokens": 77}
    assert ours["body"] == [[], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]


def test_celery_has_no_part_in_what_either_client_sends(client: Face, valkey: Redis) -> None:
    client.submit(model="tiny", prompt=[1], max_tokens=2, tenant="a", n=2)
    assert is_native(json.loads(valkey.lpop(broker_keys.tier_list(QUEUE, "default"))))


def encoded(body: Any) -> dict[str, str]:
    return {"body": base64.b64encode(json.dumps(body).encode()).decode()}


NOTHING = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


@pytest.mark.parametrize(
    ("changes", "headers"),
    [
        ({}, {"task": "penstock.embed"}),
        ({}, {"penstock": {"v": 2, "n": 1, "tokens": 1}}),
        ({}, {"penstock": None}),
        ({}, {"ignore_result": False}),
        ({}, {"ignore_result": 1}),
        ({}, {"eta": "2020-01-01T00:00:00+00:00"}),
        ({}, {"expires": "2020-01-01T00:00:00+00:00"}),
        ({}, {"retries": 1}),
        ({}, {"group": "g", "group_index": 0}),
        ({}, {"shadow": "other"}),
        ({}, {"stamped_headers": ["a"], "stamps": {"a": ["b"]}}),
        ({}, {"id": "\ud800"}),
        ({}, {"penstock_body": {"sha256": "0"}}),
        (encoded([[], {}, {**NOTHING, "callbacks": [{"task": "note"}]}]), {}),
        (encoded([[], {}, {**NOTHING, "chord": {"task": "note"}}]), {}),
        (encoded([["text"], {}, NOTHING]), {}),
        (encoded([[], {"prompt": "text"}, NOTHING]), {}),
        ({"body": "no base64"}, {}),
        ({"body": None}, {}),
        ({"body": "A" * 100_000}, {}),
        ({"content-type": "application/x-python-serialize"}, {}),
        ({"properties": {}}, {}),
        ({"properties": {"body_encoding": "base64", "delivery_info": [1]}}, {}),
    ],
)
def test_celery_has_a_part_in_what_says_anything_else(changes: dict[str, Any], headers: dict[str, Any]) -> None:
    payload = json.loads(Message("t", QUEUE, "flex", 1, 40).envelope())
    assert is_native(payload)
    assert is_native({**payload, **encoded([[], {}, dict(reversed(NOTHING.items()))])}), "the same, written otherwise"
    assert not is_native({**payload, **changes, "headers": {**payload["headers"], **headers}})


@pytest.mark.parametrize("tier", keys.TIERS)
def test_a_tiers_list_is_named_as_kombu_names_it(valkey_url: str, tier: str) -> None:
    options = {"sep": broker_keys.SEP, "priority_steps": [0, 3, 6, 9]}
    with Connection(valkey_url, transport_options=options) as connection, connection.channel() as channel:
        assert broker_keys.tier_list(QUEUE, tier) == channel._q_for_pri(QUEUE, keys.TIERS[tier][1])


def test_tiers_land_in_their_lists(client: Face, valkey: Redis) -> None:
    handles = {tier: client.submit(model="tiny", prompt="x", tier=tier) for tier in keys.TIERS}
    for tier, handle in handles.items():
        (raw,) = valkey.lrange(broker_keys.tier_list(QUEUE, tier), 0, -1)
        assert json.loads(raw)["headers"]["id"] == handle.id


def test_a_stock_celery_worker_takes_both_clients_messages(client: Face, valkey: Redis, valkey_url: str) -> None:
    # kombu's own consumer tells a list's queue by cutting its name at the last separator
    app = Celery("stock", broker=valkey_url, set_as_current=False)
    app.conf.broker_transport_options = {"sep": broker_keys.SEP, "priority_steps": [0, 3, 6, 9]}
    app.conf.task_default_queue = QUEUE
    app.conf.worker_hijack_root_logger = False
    seen: dict[str, Any] = {}
    every = threading.Event()

    @app.task(name=keys.TASK_NAME, bind=True, shared=False)
    def generate(task: Any, *args: Any, **kwargs: Any) -> None:
        seen[task.request.id] = (args, kwargs, task.request.penstock, task.request.delivery_info["priority"])
        if len(seen) == len(keys.TIERS):
            every.set()

    expected = {}
    for tier, (_, priority) in keys.TIERS.items():
        handle = client.submit(model="tiny", prompt=[1, 2, 3], max_tokens=5, tier=tier, n=2)
        expected[handle.id] = ((), {}, {"v": 1, "n": 2, "tokens": 13}, priority)
        latest = handle.status().time("created")
    level = logging.getLogger().level  # of all this process: unless told, Celery's helper leaves it at ERROR
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=60, loglevel=level):
        assert every.wait(PATIENCE_S)
    for _, _, size, _ in seen.values():
        assert abs(size.pop("at") - latest) < 60_000, "the store's clock, as nearly as it is known"
    assert seen == expected
    assert logging.getLogger().level == level


def test_whose_turn_it_is_stands_in_message_and_record(client: Face, valkey: Redis) -> None:
    handle = client.submit(model="tiny", prompt=[1], max_tokens=2, tenant="Ünï")
    (raw,) = valkey.lrange(broker_keys.tier_list(QUEUE, "default"), 0, -1)
    size = json.loads(raw)["headers"]["penstock"]
    assert size == {"v": 1, "n": 1, "tokens": 3, "tenant": "Ünï", "at": size["at"]}
    assert Message.of(handle.status()).tenant == "Ünï"


def test_what_plain_celery_sends_by_the_name_of_a_kind_is_a_task() -> None:
    """And none of a later release, which a sweeper would end."""
    for task in (*keys.NAMED_KINDS, "penstock.later", "app.add"):
        raw = json.dumps({"headers": {"id": "t", "task": task}})
        assert (task_headers(raw) is not None) is (task in keys.NAMED_KINDS)
        assert kind_of(raw) == (("t", task) if task == "penstock.later" else None)


def test_a_record_gives_its_message_again() -> None:
    message = Message("t", QUEUE, "flex", 3, 40)
    fields = {"queue": QUEUE, "tier": "flex", "n": "3", "tokens": "40", "task": "{}"}
    assert Message.of(Record("t", fields)) == message
    assert Message.of(Record("t", fields | {"tenant": "é"})) == Message("t", QUEUE, "flex", 3, 40, "é")
    ordered = Message.of(Record("t", fields | {"order_key": "k/7"}))
    assert ordered.order_key == "k/7"
    assert json.loads(ordered.envelope())["headers"]["penstock"]["order_key"] == "k/7"
    assert Message.of(Record("t", fields | {"created": "7"})) == replace(message, at=7)
    best = fields | {"n": "2", "task": '{"best_of": 3}'}
    assert Message.of(Record("t", best)) == message
    with pytest.raises(KeyError):
        Message.of(Record("t", {"tier": "flex"}))
