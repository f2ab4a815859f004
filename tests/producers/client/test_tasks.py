"""`client.tasks` and idempotency keys, of both clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from redis import Redis

from producers import (
    Client,
    IdempotencyKeyReused,
    InvalidQuery,
    InvalidTask,
    Task,
    TaskExists,
    TaskNotFinal,
    TaskNotFound,
    UnknownModel,
)
from producers.broker.redis import keys as broker_keys
from producers.client.operations import submit_once
from producers.client.steps import Step, Steps
from producers.contract import keys
from tests.producers.conftest import CARD, QUEUE
from tests.producers.faces import Face
from tests.producers.fake_worker import FakeWorker


def queued(valkey: Redis) -> int:
    return int(valkey.llen(broker_keys.tier_list(QUEUE, "default")))


def dies_after(calls: int, steps: Steps[str], perform: Callable[[Step], Any]) -> bool:
    """Whether a client that performs so many steps and no more has not got to its end."""
    try:
        step = next(steps)
        for _ in range(calls):
            step = steps.send(perform(step))
    except StopIteration:
        return False
    return True


class TestList:
    def test_gives_typed_tasks_and_where_to_go_on(self, client: Face, worker: FakeWorker, valkey: Redis) -> None:
        made = [client.submit(model="tiny", prompt=[1], metadata={"n": str(n)}).id for n in range(3)]
        valkey.zadd(keys.TASKS, {task_id: 1_790_000_000_000 + n for n, task_id in enumerate(made)})
        worker.serve(made[0], ["x"])
        first = client.tasks.list(limit=2, order="asc")
        assert (first.tasks[0].id, len(first), first.next) == (made[0], 2, first.tasks[1].id)
        (last,) = client.tasks.list(limit=2, order="asc", after=first.next)
        assert {task.id for task in (*first, last)} == set(made)
        task = first.tasks[0]
        assert (task.status, task.metadata) == ("completed", {"n": "0"})
        assert task.usage == {"prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 1}
        assert task.times["created"] <= task.times["finished"]
        assert [task.id for task in client.tasks.list(status="queued", metadata={"n": "1"})] == [made[1]]
        assert client.tasks.list().next is None

    @pytest.mark.parametrize(
        "wanted",
        [
            {"limit": 0},
            {"status": "done"},
            {"after": "a b"},
            {"after": 5},
            {"metadata": 5},
            {"created_after": float("nan")},
        ],
    )
    def test_refuses_what_cannot_be_listed(self, client: Face, wanted: dict[str, Any]) -> None:
        with pytest.raises(InvalidQuery) as refused:
            client.tasks.list(**wanted)
        assert refused.value.param in wanted


class TestRetry:
    def test_submits_a_final_task_again(self, client: Face, worker: FakeWorker, valkey: Redis) -> None:
        old = client.submit(model="tiny", prompt=[1], metadata={"a": "b"})
        with pytest.raises(TaskNotFinal):
            client.tasks.retry(old.id)
        worker.serve(old.id)
        new = client.tasks.retry(old.id, idempotency_key="k")
        assert new.status().task == old.status().task
        (listed,) = client.tasks.list(status="queued")
        assert (listed.id, listed.retried_from) == (new.id, old.id)
        assert client.tasks.retry(old.id, idempotency_key="k").id == new.id != client.tasks.retry(old.id).id
        with pytest.raises(TaskNotFound):
            client.tasks.retry("nobody")

    def test_of_a_task_that_named_its_version_goes_to_that_version(
        self, client: Face, worker: FakeWorker, valkey: Redis
    ) -> None:
        other = {**CARD, "version": "other"}
        valkey.hset(keys.VERSIONS, "tiny@other", json.dumps(other))
        valkey.hset(keys.POOLS, "penstock:queue:tiny@other.f", '{"model": "tiny", "version": "other"}')
        for model in ("tiny@other", "tiny"):
            old = client.submit(model=model, prompt=[1])
            worker.serve(old.id)
            assert client.tasks.retry(old.id).status().fields["version"] == old.status().fields["version"]


class TestIdempotencyKey:
    def test_the_same_task_is_submitted_once(self, client: Face, valkey: Redis) -> None:
        with pytest.raises(InvalidTask, match="idempotency_key is 5"):
            client.submit(model="tiny", prompt=[1], idempotency_key=5)  # type: ignore[arg-type]
        first = client.submit(model="tiny", prompt=[1], idempotency_key="k")
        assert client.submit(model="tiny", prompt=[1], idempotency_key="k").id == first.id
        valkey.delete(keys.task(first.id))
        assert client.submit(model="tiny", prompt=[1], idempotency_key="k").id == first.id
        assert queued(valkey) == 1
        others: list[dict[str, Any]] = [{"prompt": [2]}, {"prompt": [1], "task_id": "mine"}]
        for other in others:
            with pytest.raises(IdempotencyKeyReused):
                client.submit(model="tiny", idempotency_key="k", **other)

    def test_a_call_that_is_repeated_when_nobody_serves_its_model_gets_its_task(
        self, client: Face, valkey: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = client.submit(model="tiny", prompt=[1], idempotency_key="k")
        card = json.loads(valkey.hget(keys.MODELS, "tiny") or "")
        valkey.hset(keys.MODELS, "tiny", json.dumps(card | {"withdrawn": 1}))
        monkeypatch.setattr("producers.client.directory.FRESH_S", 0.0)
        assert client.submit(model="tiny", prompt=[1], idempotency_key="k").id == first.id
        others: list[dict[str, Any]] = [
            {"prompt": [2], "idempotency_key": "k"},
            {"prompt": [1], "idempotency_key": "new"},
        ]
        for other in others:
            with pytest.raises(UnknownModel, match="Nobody serves"):
                client.submit(model="tiny", **other)
        assert (queued(valkey), len(valkey.keys(keys.idempotency("*")))) == (1, 1)

    def test_a_client_that_dies_between_two_calls_is_repaired_by_the_next_try(
        self, model: str, valkey: Redis, valkey_url: str
    ) -> None:
        with Client(valkey_url) as client:
            task = Task(model="tiny", prompt=[1])
            for calls in count():
                steps = submit_once(client.directory, task, f"k{calls}", None, 1.0)
                died = dies_after(calls, steps, client._perform)
                before = set(valkey.keys(keys.task("*")))
                first, second = (client.submit(task, idempotency_key=f"k{calls}").id for _ in range(2))
                assert first == second
                assert set(valkey.keys(keys.task("*"))) == before | {keys.task(first).encode()}
                assert len(before) in (calls, calls + 1), "it had been made, or not"
                if not died:
                    break
        assert calls > 3, "a card, a key, a record, a message"

    def test_a_task_that_is_refused_takes_no_key(self, client: Face, valkey: Redis) -> None:
        bad: list[dict[str, Any]] = [
            {"prompt": [1], "idempotency_key": "a b"},
            {"prompt": [5000], "idempotency_key": "k"},
        ]
        for fields in bad:
            with pytest.raises(InvalidTask):
                client.submit(model="tiny", **fields)
        assert client.submit(model="tiny", prompt=[1], idempotency_key="k").id

    def test_a_stranger_with_the_chosen_id_is_not_taken_for_ones_own(self, client: Face) -> None:
        client.submit(model="tiny", prompt=[1], task_id="mine")
        for _ in range(2):
            with pytest.raises(TaskExists):
                client.submit(model="tiny", prompt=[2], task_id="mine", idempotency_key="k")
