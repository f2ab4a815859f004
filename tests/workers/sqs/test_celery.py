"""Celery around a worker on SQS: kombu's senders, links, chords and retries by SQS; remote control by the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from celery import chord

from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.store.protocol import delete
from tests.aws_faults import Fault, Faults
from tests.stub_engine import text_of
from tests.waiting import PATIENCE_S
from tests.workers.sqs.conftest import SqsRig

PLUGINS = "tests.workers.plugins:ordinary_tasks"


def test_kombus_senders_reach_workers_at_the_default_tier(sqs: SqsRig) -> None:
    sqs.worker()
    app = sqs.sender()
    sent = [
        app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "seed": 3, "max_tokens": 5}, priority=priority)
        for priority in (0, 9)
    ]
    assert [one.get(timeout=PATIENCE_S)["text"] for one in sent] == [text_of(3, 0, 5)] * 2
    assert {sqs.record(one.id)["tier"] for one in sent} == {"default"}
    sqs.until_settled([one.id for one in sent])
    sqs.check_nothing_left()


def test_a_kind_that_is_unknown_is_refused_at_once(sqs: SqsRig) -> None:
    """Nobody but a later release's worker could take it from where it would wait."""
    sqs.worker()
    app = sqs.sender()
    sent = app.send_task("penstock.later", (2,))
    assert "penstock.later" in str(error := sent.get(timeout=PATIENCE_S, propagate=False))
    assert "release_missing" in str(error.args)
    sqs.until(lambda: sqs.store.llen(broker_keys.DEAD))
    (letter,) = map(json.loads, sqs.store.lrange(broker_keys.DEAD, 0, -1))
    assert json.loads(letter["message"])["headers"]["id"] == sent.id
    assert not [name for name in sqs.messages() if "+" in name]


def test_a_deleted_task_is_not_made_again_by_its_message(sqs: SqsRig) -> None:
    """SQS shows it until a worker deletes it."""
    sqs.worker(STUB_STEP_S=0.01)
    app = sqs.sender()
    kwargs = {"prompt": [1], "seed": 3, "max_tokens": 4000}
    sent = app.send_task(keys.TASK_NAME, kwargs=kwargs)
    sqs.until(lambda: sqs.tokens(sent.id) > 3)
    run(sqs.store, delete(sent.id, "x"))
    app.send_task(keys.TASK_NAME, kwargs=kwargs, task_id=sent.id)
    other = app.send_task(keys.TASK_NAME, kwargs=kwargs | {"max_tokens": 5})
    assert other.get(timeout=PATIENCE_S)["text"] == text_of(3, 0, 5)
    sqs.check_nothing_left()
    assert [name for name in sqs.store.keys("*") if sent.id in name] == [keys.erased(sent.id)]


def test_links_and_retries_go_by_sqs(sqs: SqsRig) -> None:
    sqs.worker(STUB_FAULTS=1, WORKER_PLUGINS=PLUGINS)
    app = sqs.sender()
    note = app.signature("app.note", args=["linked"], immutable=True)
    plain = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "seed": 3, "max_tokens": 20}, link=note)
    (ours,) = sqs.submit(1, max_tokens=20, tier="flex")
    sqs.check([plain.id, ours])
    assert {sqs.record(one)["claims"] for one in (plain.id, ours)} == {"2"}
    sqs.until(lambda: sqs.store.lrange("seen:linked", 0, -1) == ["begun", "done"])
    elsewhere = app.signature("other.task", queue="links", immutable=True)
    third = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 4}, link=elsewhere)
    sqs.until_settled([third.id])
    assert sqs.messages()["pen-links"] == 1
    assert not sqs.store.exists("links"), "nothing is put on lists of the store"


@pytest.mark.exhaustive  # as links do
def test_a_chord_goes_by_sqs(sqs: SqsRig) -> None:
    sqs.worker(WORKER_PLUGINS=PLUGINS)
    app = sqs.sender()
    parts = [app.signature(keys.TASK_NAME, kwargs={"prompt": [1], "seed": seed, "max_tokens": 4}) for seed in (1, 2)]
    result = chord(parts, app=app)(app.signature("app.texts"))
    assert result.get(timeout=PATIENCE_S) == [text_of(1, 0, 4), text_of(2, 0, 4)]
    sqs.check_nothing_left()


def test_a_link_that_sqs_does_not_take_is_sent_later(faults: tuple[SqsRig, Faults], tmp_path: Path) -> None:
    rig, coming = faults
    rig.worker(STUB_HOLD_AT=2, STUB_GO=tmp_path / "go", WORKER_PLUGINS=PLUGINS)
    app = rig.sender()
    note = app.signature("app.note", args=["linked"], immutable=True)
    sent = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 4}, link=note)
    rig.until(lambda: rig.tokens(sent.id) == 2)
    coming.put(Fault("denied", "SendMessage"))
    (tmp_path / "go").touch()
    rig.until(lambda: coming.done["denied"] >= 2)
    assert rig.status(sent.id) == "completed"
    assert not rig.settled([sent.id])
    coming.calm()
    rig.until_settled([sent.id])
    rig.until(lambda: "done" in rig.store.lrange("seen:linked", 0, -1))


def test_remote_control_goes_by_the_store(sqs: SqsRig) -> None:
    worker = sqs.worker(STUB_STEP_S=0.01, events=True)
    inspect = sqs.monitor().control.inspect(timeout=60, limit=1)
    assert inspect.ping() == {f"penstock@{worker.name}": {"ok": "pong"}}
    app = sqs.sender()
    sent = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 4000})
    sqs.until(lambda: sqs.tokens(sent.id) > 3)
    (active,) = (inspect.active() or {}).values()
    assert [one["id"] for one in active] == [sent.id]
    sqs.monitor().control.revoke(sent.id, terminate=True)
    sqs.check([sent.id], "cancelled")
    sqs.check_nothing_left()
