"""What the store refuses, it refuses for one task: its message is kept, and the others go on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from producers import Client, TaskFailed
from producers.contract import keys
from producers.contract.stream import encode_token
from tests.stub_engine import PANIC, STALLED
from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig


def kept(rig: Rig, task_id: str) -> bool:
    """Whether its message is a dead letter, because of its record."""
    mine = [letter for letter in rig.dead() if task_id in letter["message"]]
    return any("its record cannot be used" in letter["reason"] for letter in mine)


def test_a_task_that_cannot_be_finished_holds_up_no_other(served: Rig) -> None:
    (stuck,) = served.fill(1, prompt=[STALLED])
    served.until(lambda: served.status(stuck) == "in_progress")
    served.until(lambda: served.redis.pubsub_numsub(keys.control(served.record(stuck)["owner"]))[0][1] == 1)
    served.redis.hset(keys.task(stuck), "n", "no number")
    assert served.cancel(stuck) == [1, "in_progress"]
    log = served.workers[0].log
    served.until(lambda: f"Cannot go on with task {stuck}" in log.read_text())
    others = served.fill(20)
    served.check(others)
    assert log.read_text().count(f"Cannot go on with task {stuck}") == 1
    served.until(lambda: kept(served, stuck))
    assert served.status(stuck) == "cancelled"


def test_celery_hears_of_a_cancel_whose_end_cannot_be_written(served: Rig) -> None:
    sent = served.sender().send_task(keys.TASK_NAME, kwargs={"prompt": [STALLED]})
    served.until(lambda: served.status(sent.id) == "in_progress")
    served.until(lambda: served.redis.pubsub_numsub(keys.control(served.record(sent.id)["owner"]))[0][1] == 1)
    served.redis.hset(keys.task(sent.id), "n", "no number")
    assert served.cancel(sent.id) == [1, "in_progress"]
    with pytest.raises(TaskRevokedError):
        sent.get(timeout=PATIENCE_S)
    served.until(lambda: kept(served, sent.id))
    assert served.status(sent.id) == "cancelled"


def test_a_task_whose_stream_takes_no_tokens_is_tried_once(served: Rig) -> None:
    """Nobody could go on with it: what its stream has is not what its record says."""
    (broken,) = served.begun(1, more_than=3, max_tokens=4000)
    served.store.xadd(keys.stream(broken), {"e": encode_token(0, 7, 5, "x")}, id="1000000-0")
    served.until(lambda: kept(served, broken))
    served.check(served.fill(5))
    assert served.record(broken)["claims"] == "1"
    with Client(served.url, served.store_url) as client, pytest.raises(TaskFailed, match="takes no more tokens"):
        client.get(broken).result(timeout=PATIENCE_S)
    assert served.status(broken) == "failed"
    assert "settled" in served.record(broken)


def test_a_task_whose_tokens_an_operator_forbids_waits_until_they_are_allowed(served: Rig) -> None:
    """The users' file may be of another release, or wrong for a moment: that is no fault of a task."""
    worker = served.workers[0]
    log = worker.log
    worker.suspend()
    (task_id,) = served.fill(1, max_tokens=20)
    served.redis.execute_command("ACL", "SETUSER", "default", "-publish")
    worker.resume()
    served.until(lambda: f"Task {task_id} waits for the store's user" in log.read_text())
    served.redis.execute_command("ACL", "SETUSER", "default", "+publish")
    served.check([task_id])
    assert not kept(served, task_id)


def test_a_task_that_cannot_be_claimed_holds_up_no_other(served: Rig) -> None:
    served.redis.set(keys.task("of-another-type"), "no record")
    app = served.sender()
    sent = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1]}, task_id="of-another-type")
    others = served.fill(20)
    served.check(others)
    with pytest.raises(TaskFailed, match="its record cannot be used"):
        sent.get(timeout=PATIENCE_S)
    served.until(lambda: kept(served, sent.id))


def test_a_record_with_a_hundred_billion_choices_holds_up_no_other(served: Rig) -> None:
    (running,) = served.fill(1, prompt=[STALLED])
    served.until(lambda: served.status(running) == "in_progress")
    served.redis.hset(keys.task(running), "n", 10**11)
    assert served.cancel(running) == [1, "in_progress"]
    others = served.fill(5)
    served.until_settled([running, *others])
    served.check(others)


@pytest.mark.parametrize("said", ["mine", {"n": 2}, {"v": 1, "n": "x", "tokens": 9}, {"v": 1, "n": True, "tokens": 9}])
def test_a_sender_s_own_header_makes_it_no_client_s(served: Rig, said: Any) -> None:
    """A client's message without a record is done with; a plain one makes its record."""
    sent = served.sender().send_task(
        keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 3}, headers={"penstock": said}
    )
    assert sent.get(timeout=PATIENCE_S)["status"] == "completed"


@pytest.mark.parametrize("how", [{"serializer": "pickle"}, {"shadow": "\ud800"}])
def test_who_waits_for_a_message_that_cannot_be_decoded_hears_of_it(served: Rig, how: dict[str, str]) -> None:
    """By Celery, or by the broker's script, whose decoder takes no half of a pair of surrogates."""
    sent = served.sender().send_task(keys.TASK_NAME, kwargs={"prompt": [1]}, **how)
    with pytest.raises(TaskFailed, match="cannot be used"):
        sent.get(timeout=PATIENCE_S)
    served.until(lambda: any(sent.id in letter["message"] for letter in served.dead()))


def test_a_panic_of_the_tokenizer_fails_its_task_alone(served: Rig) -> None:
    (task_id,) = served.fill(1, prompt=PANIC)
    others = served.fill(5)
    served.check([task_id], "failed")
    served.check(others)
    assert "a panic of the stub" in served.record(task_id)["error"]


def test_a_prompt_that_came_as_text_is_counted_when_it_is_taken_up(served: Rig) -> None:
    """So that its usage is right also where no worker is left to say it."""
    (task_id,) = served.fill(1, prompt="some text", max_tokens=4000)
    served.until(lambda: "prompt_tokens" in served.record(task_id))
    assert int(served.record(task_id)["prompt_tokens"]) > 0
    served.cancel(task_id)
    served.until_settled([task_id])
    used = json.loads(served.record(task_id)["usage"])
    assert used["prompt_tokens"] == int(served.record(task_id)["prompt_tokens"])


def test_cancels_that_race_with_deadlines_are_no_cause_for_concern(served: Rig) -> None:
    for _ in range(5):
        with Client(served.url, served.store_url) as client:
            ids = [client.submit(model="stub", prompt=[1], max_tokens=4000, timeout=0.2).id for _ in range(20)]
        # Failed: where none was begun in time, on a machine that is busy.
        served.until(lambda ids=ids: any(served.status(task_id) in ("incomplete", "failed") for task_id in ids))
        for task_id in ids:
            served.cancel(task_id)
        served.until_settled(ids)
    assert "is not ours any more" not in served.workers[0].log.read_text()
