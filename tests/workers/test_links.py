"""What lies between a worker, a client and their server: connections that are forgotten on the way, and a long one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis import Redis

from producers import Client
from producers.client import aio, hub, reader
from tests.chaos.links import Links
from tests.processes import TESTS, running_valkey
from tests.stub_engine import STALLED
from tests.waiting import PATIENCE_S
from tests.workers.rig import TIMES, Rig

pytestmark = pytest.mark.slow


@pytest.fixture
def linked() -> Iterator[tuple[Rig, Links, str]]:
    """A rig whose worker reaches the server by one link, and the URL of another, for clients.

    A worker's calls wait for half a second: redis-py's option in the URL.
    """
    with running_valkey() as server:
        links = Links()
        near = {name: f"redis://127.0.0.1:{links.add(name, server.port)}/0" for name in ("worker", "client")}
        eyes = Redis(port=server.port, decode_responses=True, client_name=TESTS)
        rig = Rig(f"{near['worker']}?socket_timeout=0.5", eyes)
        yield rig, links, near["client"]
        rig.close()
        links.close()


def test_connections_that_are_forgotten_on_the_way(
    linked: tuple[Rig, Links, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody closes them, and nothing passes: those with a call under way, and those that only listen. So also the ones
    that are made anew, once: they are taken, and hear no answer."""
    rig, links, url = linked
    for module in (aio, hub):
        monkeypatch.setattr(module, "SILENT_S", 0.5)
    monkeypatch.setattr(hub, "PING_S", 0.2)
    monkeypatch.setattr(reader, "SILENCE_S", 600.0)  # the reader is to hear of the end, not to look for it
    worker = rig.worker(STUB_STEP_S=0.01, WORKER_PLUGINS="tests.workers.plugins:pings_often")
    with Client(url) as client, ThreadPoolExecutor(4) as readers:
        tasks = [client.submit(model="stub", prompt=[1], seed=k, max_tokens=150) for k in range(4)]
        (stalled,) = rig.fill(1, prompt=[STALLED])
        reading = [readers.submit(lambda task=task: list(task.stream())) for task in tasks]
        ids = [task.id for task in tasks]
        rig.until(lambda: all(rig.tokens(task_id) > 20 for task_id in ids) and rig.status(stalled) == "in_progress")
        claims = {task_id: rig.record(task_id)["claims"] for task_id in (*ids, stalled)}
        newest = max(int(one["id"]) for one in rig.redis.client_list())
        for again in (False, True):
            for name in ("worker", "client"):
                links.make(name, "silence" if not again else "forget")
            if not again:
                rig.until(lambda: _connected_since(rig, newest) >= 2)
        for future in reading:
            assert [event.position for event in future.result(PATIENCE_S)] == list(range(151))
    rig.check(ids)
    rig.until(lambda: rig.cancel(stalled) and rig.settled([stalled]))
    rig.check([stalled], "cancelled")
    late = rig.fill(2)
    rig.check(late)
    # A claim whose answer came too late, as on a busy machine, is made again: what runs is not claimed by anybody.
    assert {task_id: rig.record(task_id)["claims"] for task_id in claims} == claims
    assert {rig.record(task_id)["deaths"] for task_id in (*ids, stalled, *late)} == {"0"}
    assert worker.stop() == 0
    rig.check_nothing_left()


def _connected_since(rig: Rig, newest: int) -> int:
    return sum(int(one["id"]) > newest for one in rig.redis.client_list())


@pytest.mark.parametrize(("away", "drain"), [(0.15, 0.75), pytest.param(0.45, 7.5, marks=pytest.mark.exhaustive)])
def test_a_server_that_is_far_away(linked: tuple[Rig, Links, str], away: float, drain: float) -> None:
    """Twice as long for each round trip. What does not end in time is handed back in time: where seven trips take
    longer than that, it begins sooner."""
    rig, links, _ = linked
    rig.url = rig.store_url = rig.url.replace("socket_timeout=0.5", "socket_timeout=5")
    # Longer than it is, as the way is: a machine that is busy is not what takes it.
    worker = rig.worker(times=TIMES | {"workers.runtime.drain:HAND_BACK_S": 2.25}, STUB_STEP_S=0.01, drain=drain)
    links.make("worker", "delay", away)
    ids = rig.fill(6, max_tokens=40)
    stalled = rig.fill(2, prompt=[STALLED])
    rig.check(ids)
    rig.until(lambda: [one["tasks"] for one in rig.leases()] == [2])  # renewed since: it knows how far it is
    assert worker.stop() == 0, rig.logs()
    for task_id in (*ids, *stalled):
        assert (rig.record(task_id)["claims"], rig.record(task_id)["deaths"]) == ("1", "0")
    assert [rig.status(task_id) for task_id in stalled] == ["queued"] * 2
    assert "lapsed" not in rig.logs()
    assert not rig.leases()
    assert not rig.redis.keys("penstock:inflight:*")
