"""A killed worker's tasks go on elsewhere before its lease lapses, and nobody else is taken for dead.

Leases are far longer than any test. Who looks need not have been heard for a whole one here.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from producers.broker.redis import keys as broker_keys
from producers.connection.script import run_many
from producers.contract import keys
from producers.contract.record import Record
from producers.store.protocol import delete
from tests.processes import Worker
from tests.workers.rig import TIMES, Rig, two_servers

SOON = {"times": TIMES | {"workers.leases.neighbours:STOOD_LEASES": 0.001}, "STUB_STEP_S": 0.01}
#: And ends no task of more than 20 tokens, however long it takes others to start.
HELD = SOON | {"STUB_HOLD_AT": 20}


def with_tasks(rig: Rig, how: dict[str, Any] = HELD) -> tuple[Worker, list[str]]:
    """A worker that has them all, and they have tokens."""
    worker = rig.worker(**how)
    ids = rig.submit(6, max_tokens=300)
    rig.until(lambda: all(rig.tokens(task_id) > 3 for task_id in ids))
    return worker, ids


def another(rig: Rig) -> Worker:
    """A worker whose lease says that it listens."""
    worker = rig.worker(**SOON)
    rig.until(lambda: all(lease.get("listens") for lease in rig.leases()))
    return worker


def deaths(rig: Rig, ids: list[str]) -> set[str]:
    return {rig.record(task_id)["deaths"] for task_id in ids}


def cut_pubsub(rig: Rig) -> None:
    for server in {rig.redis, rig.store}:
        server.execute_command("CLIENT", "KILL", "TYPE", "pubsub")


def _killed(rig: Rig) -> None:
    first, ids = with_tasks(rig)
    second = rig.worker(**SOON)
    first.stop(signal.SIGKILL)
    rig.check(ids)
    assert deaths(rig, ids) == {"1"}
    assert not rig.redis.exists(*[keys.lease(name) for name in first.incarnations] or ["none"])
    assert len(second.incarnations) == rig.redis.hlen(broker_keys.INCARNATIONS) == 1
    rig.check_nothing_left()


def test_a_killed_workers_tasks_go_on_before_its_lease_lapses(rig: Rig) -> None:
    _killed(rig)


def test_so_they_do_where_broker_and_store_are_two_servers() -> None:
    with two_servers() as rig:
        _killed(rig)


def test_what_a_killed_worker_did_is_in_the_records_until_shortly_before(rig: Rig) -> None:
    """Also its engine's time, which is in the same note: here each publication is noted, not one a second."""
    first = rig.worker(**HELD | {"times": SOON["times"] | {"workers.state.delivery:NOTE_S": 0.0}})
    (task_id,) = rig.submit(1, max_tokens=60)
    rig.until(lambda: rig.tokens(task_id) > 8)
    first.stop(signal.SIGKILL)
    rig.worker(**SOON)
    rig.check([task_id])
    lost = Record.parse(task_id, rig.record(task_id)).runs[1]
    assert lost.last is not None
    assert lost.marks[-1][0] >= 4


def test_two_killed_at_once_are_found_by_the_third(rig: Rig) -> None:
    first, ids = with_tasks(rig)
    others = [another(rig) for _ in range(2)]
    for worker in (first, others[0]):
        worker.stop(signal.SIGKILL)
    rig.check(ids)
    assert rig.redis.hkeys(broker_keys.INCARNATIONS) == others[1].incarnations


def test_a_suspended_worker_is_taken_by_nobody_before_its_lease_lapses(rig: Rig, tmp_path: Path) -> None:
    """Its neighbour looks at it, and at one that is dead."""
    suspended, ids = with_tasks(rig, HELD | {"STUB_GO": tmp_path / "go"})
    killed = another(rig)
    looker = rig.worker(**SOON)
    old = suspended.incarnations
    suspended.suspend()
    killed.stop(signal.SIGKILL)
    rig.until(lambda: "is dead" in looker.log.read_text())
    killed = another(rig)  # and again, with more looks
    killed.stop(signal.SIGKILL)
    rig.until(lambda: looker.log.read_text().count("is dead") == 2)
    assert suspended.incarnations == old
    (tmp_path / "go").touch()
    suspended.resume()
    rig.check(ids)
    assert deaths(rig, ids) == {"0"}
    assert suspended.incarnations == old


def test_who_loses_no_more_than_alive_connections_is_taken_by_nobody(rig: Rig) -> None:
    """Nor by one who was cut off as well. Afterwards they look as before."""
    first, ids = with_tasks(rig)
    second = another(rig)
    old = [first.incarnations, second.incarnations]
    channels = [keys.alive(name) for worker in (first, second) for name in worker.incarnations]
    for cuts in (1, 2, 3):
        cut_pubsub(rig)
        for worker in (first, second):
            rig.until(lambda at=worker, n=cuts: at.log.read_text().count("Lost the control channel") >= n)
        rig.until(lambda: all(count for _, count in rig.redis.pubsub_numsub(*channels)))
        rig.until(lambda: [lease.get("listens") for lease in rig.leases()] == [True, True])
    assert [first.incarnations, second.incarnations] == old
    assert {lease["false_takeovers"] for lease in rig.leases()} == {0}
    first.stop(signal.SIGKILL)
    rig.check(ids)
    assert deaths(rig, ids) == {"1"}
    assert not first.incarnations


def _wronged(rig: Rig, go: Path) -> None:
    wronged, ids = with_tasks(rig, HELD | {"STUB_GO": go})
    (old,) = wronged.incarnations
    second = rig.worker(**SOON)
    wronged.suspend()
    cut_pubsub(rig)  # the other one listens again, and has not been heard for a whole lease
    rig.until(lambda: deaths(rig, ids) == {"1"})
    go.touch()
    wronged.resume()
    rig.until(lambda: wronged.incarnations and wronged.incarnations != [old])
    rig.until(lambda: deaths(rig, ids) == {"0"})
    rig.check(ids)
    assert {rig.record(task_id).get("stuck") for task_id in ids} == {"0"}
    assert rig.redis.hgetall(broker_keys.REAPED) == {}
    rig.until(lambda: sum(lease["false_takeovers"] for lease in rig.leases()) == 1)
    rig.until(lambda: sum(lease["recomputed_tokens"] for lease in rig.leases()) > 0)
    assert wronged.stop() == second.stop() == 0
    rig.check_nothing_left()


def test_a_living_worker_that_is_taken_loses_nothing_and_takes_the_counts_back(rig: Rig, tmp_path: Path) -> None:
    _wronged(rig, tmp_path / "go")


@pytest.mark.exhaustive
def test_so_it_does_where_broker_and_store_are_two_servers(tmp_path: Path) -> None:
    with two_servers() as rig:
        _wronged(rig, tmp_path / "go")


def test_what_was_deleted_while_it_ran_is_not_computed_again(rig: Rig) -> None:
    """Nor is it held, or anybody's concern, when its worker is taken."""
    wronged, ids = with_tasks(rig, SOON)
    run_many(rig.store, [delete(task_id, "x") for task_id in ids])
    rig.check_nothing_left()
    second = rig.worker(**SOON)
    wronged.suspend()
    cut_pubsub(rig)
    rig.until(lambda: "is dead" in second.log.read_text())
    wronged.resume()
    rig.until(lambda: sum(lease["false_takeovers"] for lease in rig.leases()) == 1)
    assert {lease["recomputed_tokens"] for lease in rig.leases()} == {0}
    assert "not ours" not in wronged.log.read_text()


def test_ordinary_tasks_wait_for_the_lease(rig: Rig) -> None:
    """The engine's tasks go on."""
    app = rig.sender()
    first = rig.worker(**HELD, WORKER_PLUGINS="tests.workers.plugins:ordinary_tasks")
    app.send_task("app.note", ("kept",), {"go": "/nowhere"})
    rig.until(lambda: rig.redis.llen("seen:kept") == 1)
    ids = rig.begun(3, more_than=3, max_tokens=300)
    rig.worker(**SOON, WORKER_PLUGINS="tests.workers.plugins:ordinary_tasks")
    first.stop(signal.SIGKILL)
    rig.check(ids)
    assert rig.redis.zcard(broker_keys.delayed(keys.version_queue("stub", "v1"))) == 1
    assert rig.redis.lrange("seen:kept", 0, -1) == ["begun"]


def test_without_the_right_to_ask_the_lease_decides(rig: Rig) -> None:
    """And nobody is taken for dead."""
    rig.redis.execute_command("ACL", "SETUSER", "mute", "on", ">secret", "~*", "&*", "+@all", "-pubsub|numsub")
    rig.url = rig.store_url = rig.url.replace("://", "://mute:secret@")
    first, ids = with_tasks(rig)
    second = rig.worker(**SOON)
    assert "may not call PUBSUB" in second.log.read_text()
    assert {lease.get("listens") for lease in rig.leases()} == {None}
    rig.kill(first)
    rig.check(ids)
