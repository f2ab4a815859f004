"""What nobody can run is kept as a dead letter with its reason, and the worker carries on with the next task."""

from __future__ import annotations

import base64
import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from producers.contract.message import Message
from tests.waiting import PATIENCE_S
from tests.workers.rig import QUEUE, Rig, rig


@pytest.fixture(scope="module")
def poisoned() -> Iterator[Rig]:
    """One worker for all of it: each test finds it as the ones before left it."""
    with rig() as made:
        made.worker(retry_after=0.1, STUB_SEQS=4, WORKER_PLUGINS="tests.workers.plugins:ordinary_tasks")
        yield made


def envelope(**changes: Any) -> dict[str, Any]:
    """A client's message, changed: a key `a__b` goes into `a`; None takes the field away."""
    found: dict[str, Any] = json.loads(Message("poison", QUEUE, "default", 1, 20).envelope())
    for name, value in changes.items():
        *path, last = name.split("__")
        place = found
        for part in path:
            place = place[part]
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return found


def body(*parts: Any) -> str:
    return base64.b64encode(json.dumps(parts).encode()).decode()


def nested(depth: int) -> str:
    """A message whose headers are nested that deep."""
    text = json.dumps(envelope(headers__deep="@"))
    return text.replace('"@"', "[" * depth + "]" * depth)


UNREADABLE = {
    "not JSON": (b"{oops", "not JSON"),
    "not UTF-8": (json.dumps(envelope(headers__id="x@x")).encode().replace(b"@", b"\xff"), "not JSON in UTF-8"),
    "empty": (b"", "not JSON"),
    "a number": (b"7", "not a JSON object"),
    "a list": (b"[]", "no properties"),
    "null": (b"null", "not a JSON object"),
    "no properties": (json.dumps(envelope(properties=None)), "no properties"),
    "properties of a wrong type": (json.dumps(envelope(properties="x")), "no properties"),
    "no delivery_info": (json.dumps(envelope(properties__delivery_info=None)), "no delivery_info"),
    "delivery_info of a wrong type": (json.dumps(envelope(properties__delivery_info=["x"])), ""),
    "no headers": (json.dumps(envelope(headers=None)), "no task id"),
    "headers of a wrong type": (json.dumps(envelope(headers=[])), "no task id"),
    "no id": (json.dumps(envelope(headers__id=None)), "no task id"),
    "an empty id": (json.dumps(envelope(headers__id="")), "no task id"),
    "an id of a wrong type": (json.dumps(envelope(headers__id=7)), "no task id"),
    "a task name of a wrong type": (json.dumps(envelope(headers__task={})), "no task id"),
    "no body": (json.dumps(envelope(body=None)), "no body"),
    "a body of a wrong type": (json.dumps(envelope(body={})), "no body"),
    "half a base64 body": (json.dumps(envelope(body="abc")), ""),
    "an unknown body encoding": (json.dumps(envelope(properties__body_encoding="zip")), ""),
    "a body that is no JSON": (json.dumps(envelope(body=base64.b64encode(b"{oops").decode())), ""),
    "a body of one number": (
        json.dumps(envelope(body=base64.b64encode(b"7").decode())),
        "cannot be decoded as Celery's: TypeError",
    ),
    "a body of two parts": (json.dumps(envelope(body=body([], {}))), ""),
    "a pickled body": (json.dumps(envelope(**{"content-type": "application/x-python-serialize"})), ""),
    "an unknown content type": (json.dumps(envelope(**{"content-type": "application/x-what"})), ""),
    "an unknown task": (json.dumps(envelope(headers__task="no.such.task")), "rejected: unknown task"),
    "an impossible ETA": (json.dumps(envelope(headers__eta="tomorrow")), ""),
    "an ETA of a wrong type": (json.dumps(envelope(headers__eta=[1])), ""),
    "an impossible expiry": (json.dumps(envelope(headers__expires={"in": 5})), ""),
    "headers nested too deep for Lua": (nested(1500), "not JSON"),
    "headers nested too deep for Python": (nested(996), ""),
    "a lone surrogate for an id": (json.dumps(envelope(headers__id="@")).replace("@", "\\ud800"), ""),
    "a number of 5,000 digits": (json.dumps(envelope(headers__x="@")).replace('"@"', "9" * 5000), ""),
    "NaN": (json.dumps(envelope(headers__x=float("nan"))).replace("NaN", "nan"), ""),
    "kwargs that are a list": (json.dumps(envelope(headers__penstock=None, body=body([], ["x"], {}))), ""),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_dead_lettered(poisoned: Rig, name: str) -> None:
    raw, reason = UNREADABLE[name]
    raw = raw.encode() if isinstance(raw, str) else raw
    poisoned.redis.delete(broker_keys.DEAD)
    poisoned.redis.lpush(QUEUE, raw)
    ids = poisoned.fill(6)
    poisoned.until(lambda: poisoned.redis.llen(broker_keys.DEAD))
    poisoned.check(ids)
    (letter,) = poisoned.dead()
    assert letter["reason"].startswith(reason)
    assert letter["reason"]
    assert letter["list"] == QUEUE
    assert letter["at"] > 0
    check_idle(poisoned)


SECRET = b"what-nobody-may-read"
PICKLED = base64.b64encode(pickle.dumps((SECRET.decode(), {}, {}))).decode()
CONFIDENTIAL = {
    "a pickle": envelope(body=PICKLED, **{"content-type": "application/x-python-serialize"}),
    "a pickle that is said to be JSON": envelope(body=PICKLED),
    "a plain pickle": envelope(headers__penstock=None, body=PICKLED),
    "an unknown content type": envelope(body=PICKLED, **{"content-type": "application/x-what"}),
    "an unknown task": envelope(headers__task="no.such.task", body=body([SECRET.decode()], {}, {})),
    "its arguments in a header": envelope(headers__task="no.such.task", headers__argsrepr=SECRET.decode()),
    "no arguments": envelope(body=body(SECRET.decode())),
    "kwargs that are none": envelope(headers__penstock=None, body=body([], [SECRET.decode()], {})),
}


@pytest.mark.parametrize("name", CONFIDENTIAL)
def test_a_body_is_never_in_the_log(poisoned: Rig, name: str) -> None:
    message = json.dumps(CONFIDENTIAL[name])
    log = poisoned.workers[0].log
    before = len(log.read_text())
    poisoned.redis.delete(broker_keys.DEAD)
    poisoned.redis.lpush(QUEUE, message)
    poisoned.until(poisoned.dead)
    check_idle(poisoned)
    assert (said := log.read_text()[before:]), "it is told of"
    assert SECRET.decode() not in said
    assert CONFIDENTIAL[name]["body"] not in said
    (letter,) = poisoned.dead()
    assert letter["message"] == message, "it is kept for `penstock dlq show`"
    assert SECRET.decode() not in letter["reason"]


TIMELIMIT = {"headers__penstock": None, "headers__timelimit": 7, "body": body([], {"prompt": "x"}, {})}


def test_nothing_is_kept_of_what_cannot_be_read(poisoned: Rig) -> None:
    """Neither by kombu, which holds what it has delivered, nor by Celery, which lists what is reserved."""
    for raw, _ in UNREADABLE.values():
        poisoned.redis.lpush(QUEUE, raw)
    poisoned.redis.lpush(QUEUE, json.dumps(envelope(**TIMELIMIT)))
    check_idle(poisoned)
    assert poisoned.sender().send_task("app.kept").get(timeout=PATIENCE_S) == []


HARMLESS = {
    "no record": envelope(),
    "unknown headers": envelope(headers__what={"x": 1}, what=2),
    "a size that is none": envelope(headers__penstock={"n": "many", "tokens": [1]}),
    "a size of a wrong type": envelope(headers__penstock=[1, 2]),
    "a huge size": envelope(headers__penstock={"n": 1e300, "tokens": -1}),
    "an unknown content encoding": envelope(**{"content-encoding": "zzz"}),
    "retries of a wrong type": envelope(headers__retries="x"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_message_without_its_record_is_dropped(poisoned: Rig, name: str) -> None:
    """A client's record may have expired; whatever else the message says is not asked for."""
    poisoned.redis.delete(broker_keys.DEAD)
    poisoned.redis.lpush(QUEUE, json.dumps(HARMLESS[name]))
    ids = poisoned.fill(6)
    poisoned.check(ids)
    check_idle(poisoned)
    assert poisoned.dead() == []


def test_a_message_that_a_dead_worker_was_to_keep_is_kept(poisoned: Rig) -> None:
    """It had settled the task, and died before it acknowledged the message."""
    poisoned.redis.delete(broker_keys.DEAD)
    (task_id,) = poisoned.fill(1)
    poisoned.until_settled([task_id])
    poisoned.redis.hset(keys.task(task_id), "letter", "Given up: 3 workers died while they held this task.")
    poisoned.redis.lpush(QUEUE, json.dumps(envelope(headers__id=task_id)))
    poisoned.until(lambda: poisoned.dead())
    (letter,) = poisoned.dead()
    assert letter["reason"] == "Given up: 3 workers died while they held this task."
    check_idle(poisoned)


INVALID = {
    "no kwargs": {},
    "no prompt": {"max_tokens": 4},
    "an empty prompt": {"prompt": ""},
    "a prompt of a wrong type": {"prompt": {"x": 1}},
    "another model": {"model": "other", "prompt": "x"},
    "an unknown field": {"prompt": "x", "temprature": 1},
    "too long": {"prompt": "x", "max_tokens": 100_000},
    "a token beyond the vocabulary": {"prompt": [5000]},
    "a temperature of a wrong type": {"prompt": "x", "temperature": "hot"},
    "a nested surprise": {"prompt": "x", "metadata": {"a": {"b": [1]}}},
}


@pytest.mark.parametrize("name", INVALID)
def test_a_plain_message_that_is_no_task_fails_with_a_record(poisoned: Rig, name: str) -> None:
    app = poisoned.sender()
    result = app.send_task(keys.TASK_NAME, kwargs=INVALID[name])
    ids = poisoned.fill(3)
    poisoned.until_settled([result.id, *ids])
    poisoned.check(ids)
    record = poisoned.record(result.id)
    assert record["status"] == "failed"
    assert json.loads(record["error"])["message"]
    assert poisoned.entries(result.id) == [poisoned.entries(result.id)[-1]]
    assert result.state == "FAILURE"
    check_idle(poisoned)


@pytest.mark.parametrize("task", ["no JSON", "[]", "{}", '{"model": "stub", "prompt": [1], "max_tokens": -4}'])
def test_a_record_whose_task_cannot_be_run_fails(poisoned: Rig, task: str) -> None:
    bad = over_and_done(poisoned)
    poisoned.store.hdel(keys.task(bad), "settled", "end", "status", "next:0", "finished", "started", "claims")
    poisoned.store.delete(keys.stream(bad))
    poisoned.store.hset(keys.task(bad), mapping={"status": "queued", "task": task})
    poisoned.redis.lpush(QUEUE, Message(bad, QUEUE, "default", 1, 20).envelope())
    ids = poisoned.fill(6)
    poisoned.until_settled([bad, *ids])
    poisoned.check(ids)
    assert poisoned.record(bad)["status"] == "failed"
    check_idle(poisoned)


def over_and_done(rig: Rig) -> str:
    """A task that is over, whose message is acknowledged: until then its worker looks after the record's end."""
    (task_id,) = rig.fill(1)
    rig.until_settled([task_id])
    check_idle(rig)
    return task_id


ENDED = ("completed", "failed")
BROKEN: dict[str, dict[str, str | bytes]] = {
    "more choices than its task": {"n": "2"},
    "choices that are no number": {"n": "many"},
    "no number of a next token": {"next:0": "x"},
    "an end, though it is not over": {"end": "completed"},
    "no number of discarded tokens": {"discarded": "x"},
    "no number of deaths": {"deaths": "x"},
    "a deadline that is none": {"deadline": "tomorrow"},
    "a life that is none": {"ttl": "x"},
    "an error that is no JSON": {"error": "{oops"},
    "bytes that are no text": {"error": b"\xff\xfe"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_record_that_is_broken_harms_its_own_task_alone(poisoned: Rig, name: str) -> None:
    """It fails, or its message is kept: no thread ends of it, nobody tries for ever, and no neighbour is lost."""
    bad = over_and_done(poisoned)
    poisoned.redis.delete(broker_keys.DEAD)
    poisoned.store.hdel(keys.task(bad), "settled", "end", "status", "next:0", "finished", "started", "claims", "claim")
    poisoned.store.delete(keys.stream(bad))
    poisoned.store.hset(keys.task(bad), mapping={"status": "queued", **BROKEN[name]})
    message = Message(bad, QUEUE, "default", 1, 20).envelope()
    poisoned.redis.lpush(QUEUE, message, message)  # the worker that holds the one answers `busy` to the other
    ids = poisoned.fill(6)
    poisoned.check(ids)

    def over() -> bool:
        """Both are kept with their bytes, or it ended and is settled."""
        if [letter["message"] for letter in poisoned.dead()] == [message, message]:
            return True
        return name != "bytes that are no text" and _ended(poisoned, bad)

    poisoned.until(over)
    check_idle(poisoned)
    assert not poisoned.store.hexists(keys.task(bad), "claim")


def _ended(rig: Rig, task_id: str) -> bool:
    status, settled = rig.store.hmget(keys.task(task_id), "status", "settled")
    return status in ENDED and bool(settled)


CALLBACKS: dict[str, Any] = {
    "embed of a wrong type": "x",
    "callbacks of a wrong type": {"callbacks": 5, "errbacks": None, "chain": None, "chord": None},
    "a callback that is no signature": {"callbacks": [{"no": "task"}], "errbacks": None, "chain": None, "chord": None},
    "a chord that is none": {"callbacks": None, "errbacks": None, "chain": None, "chord": "x"},
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_that_cannot_be_sent_do_not_hold_the_task(poisoned: Rig, name: str) -> None:
    """The output was made and is final; what Celery cannot do with it is a matter for the log and the dead letters."""
    good = "callbacks-" + name.replace(" ", "-")
    message = copy.deepcopy(envelope(headers__penstock=None, headers__id=good, headers__root_id=good))
    message["body"] = body([], {"prompt": [1], "seed": 3, "max_tokens": 4}, CALLBACKS[name])
    poisoned.redis.delete(broker_keys.DEAD)
    poisoned.redis.lpush(QUEUE, json.dumps(message))
    ids = poisoned.fill(6)
    poisoned.check([good, *ids])
    check_idle(poisoned)


def test_an_ordinary_task_that_exits_harms_nobody(poisoned: Rig) -> None:
    app = poisoned.sender()
    poisoned.redis.delete(broker_keys.DEAD)
    for _ in range(5):  # more than there are threads
        app.send_task("app.exits")
    assert app.send_task("app.add", (1, 2)).get(timeout=PATIENCE_S) == 3
    poisoned.until(lambda: poisoned.redis.llen(broker_keys.DEAD) == 5)
    check_idle(poisoned)


def check_idle(rig: Rig) -> None:
    """Nothing is held, waits, or is in flight; all of the room is there again (it has room for 4)."""
    places = (broker_keys.inflight("*"), broker_keys.delayed("*"), broker_keys.sorted_of("*"), QUEUE)
    rig.until(lambda: not any(rig.redis.keys(place) for place in places))
    assert rig.workers[0].process.poll() is None


def test_the_worker_counts_nothing_as_held(poisoned: Rig) -> None:
    ids = poisoned.fill(50)
    poisoned.until_settled(ids)
    lease = f"{keys.lease(poisoned.workers[0].name)}*"
    poisoned.store.delete(*poisoned.store.keys(lease))  # it tells of itself when it renews; a new life tells at once
    poisoned.until(lambda: poisoned.leases())
    assert poisoned.leases()[0]["tasks"] == 0
    poisoned.check_nothing_left()
