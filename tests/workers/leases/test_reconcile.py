"""A live worker finds what a server that forgot its last words has in flight under its name, and lets it go.

What was forgotten is put back as it was: the broker's entry of a delivery, and the task's record and stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.workers.rig import Rig

pytestmark = pytest.mark.slow

BROUGHT_BACK = "A failover brought back 1 tasks that had left here"


@dataclass(slots=True)
class Past:
    """What broker and store held of a task that ran."""

    raw: Redis
    task_id: str
    inflight: str
    deliveries: dict[bytes, bytes]
    keys: dict[str, bytes]

    @classmethod
    def of(cls, raw: Redis, task_id: str) -> Past | None:
        """Of this moment; None where it does not run."""
        names = keys.task(task_id), keys.stream(task_id)
        for inflight in raw.keys(broker_keys.inflight("*")):
            with raw.pipeline(transaction=True) as pipe:
                pipe.hgetall(inflight)
                pipe.xlen(names[1])
                for name in names:
                    pipe.dump(name)
                held, tokens, *dumps = pipe.execute()
            if held and tokens == 20:
                return cls(raw, task_id, inflight.decode(), held, dict(zip(names, dumps, strict=True)))
        return None

    def deliver(self) -> None:
        """The broker has lost the ACK."""
        self.raw.hset(self.inflight, mapping=self.deliveries)

    def unmake(self) -> None:
        """The store has lost all since then."""
        for name, dump in self.keys.items():
            self.raw.restore(name, 0, dump, replace=True)
        for index in (keys.UNSETTLED, keys.SETTLED):
            self.raw.zrem(index, self.task_id)


@pytest.fixture
def past(rig: Rig, tmp_path: Path) -> Iterator[Past]:
    """Of a task that is over by now."""
    rig.worker(STUB_STEP_S=0.01, STUB_HOLD_AT=20, STUB_GO=tmp_path / "go")
    (task_id,) = rig.fill(1, max_tokens=200)
    seen: list[Past] = []
    with Redis.from_url(rig.url) as raw:
        rig.until(lambda: seen.extend(filter(None, [Past.of(raw, task_id)])) or seen)
        found = seen[0]
        (tmp_path / "go").touch()
        rig.until_settled([task_id])
        rig.until(lambda: not raw.exists(found.inflight))
        yield found


def test_a_message_whose_ack_was_forgotten_is_put_down_again(rig: Rig, past: Past) -> None:
    before = rig.record(past.task_id), rig.entries(past.task_id)
    past.deliver()
    rig.until(lambda: BROUGHT_BACK in rig.logs())
    rig.check_nothing_left()
    assert (rig.record(past.task_id), rig.entries(past.task_id)) == before
    assert rig.workers[0].stop() == 0


def test_a_task_whose_end_was_forgotten_too_is_finished_by_the_worker_that_did_not_know_it(
    rig: Rig, past: Past
) -> None:
    """Its claim is that worker's own, which lives: nobody else could ever take it up."""
    others = rig.begun(8, max_tokens=600)
    past.unmake()
    assert rig.record(past.task_id)["status"] == "in_progress"
    past.deliver()
    rig.check([past.task_id])
    assert rig.record(past.task_id)["deaths"] == "0"
    rig.check(others)
    assert {rig.record(task_id)["claims"] for task_id in others} == {"1"}, "what it knows is left to it"
    rig.check_nothing_left()
    assert rig.logs().count("A failover brought back") == 1
    assert rig.workers[0].stop() == 0
