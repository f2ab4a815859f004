"""Workers are killed, one of three is always spared: each death is seen by a look, however young the looker is.

Leases are far longer than the test, so that no worker ever stands for one, and none that was killed lapses.
"""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path

import pytest
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.chaos.kills import blows
from tests.histories import examples
from tests.processes import TESTS, running_valkey
from tests.workers.rig import Rig, rig, two_servers

WORKERS, KILLS = 3, 12


def test_a_plan_is_a_function_of_its_seed_and_spares_one() -> None:
    plans = [blows(seed, workers=WORKERS, kills=KILLS, seconds=120.0) for seed in range(20)]
    assert plans[3] == blows(3, workers=WORKERS, kills=KILLS, seconds=120.0) != plans[4]
    for plan in plans:
        assert len(plan) == KILLS
        assert {blow.victim for blow in plan} == {*range(WORKERS)}
        assert [blow.at for blow in plan] == sorted(blow.at for blow in plan)
        assert 0.0 <= plan[0].at <= plan[-1].at < 120.0


def judged(on: Rig, lives: int, living: int) -> bool:
    """Whether each of the `living` was heard, and renewed since the last of `lives` that there were so far joined."""
    for server in {on.redis, on.store}:
        if int(server.get(keys.JOINS) or 0) != lives:
            return False
        said = [json.loads(server.get(name) or "{}") for name in server.keys(keys.lease("*"))]
        if [one.get("joins") for one in said] != [lives] * living:
            return False
    return True


def seen_dead(on: Rig) -> list[str]:
    """Incarnations that a look found dead, as the workers' logs say."""
    lines = [line for worker in on.workers for line in worker.log.read_text().splitlines() if " is dead: " in line]
    return [line.partition("Worker ")[2].split()[0] for line in lines]


def _strike(on: Rig, seed: int, kills: int) -> None:
    for server in {on.redis, on.store}:
        server.set(keys.JOINS, 0)  # then it is the number of lives
    slots = [on.worker(STUB_STEP_S=0.01) for _ in range(WORKERS)]
    lives, dead, ids = WORKERS, list[str](), list[str]()
    for blow in blows(seed, workers=WORKERS, kills=kills, seconds=120.0):
        ids += on.submit(4, max_tokens=100)
        on.until(lambda: judged(on, lives, WORKERS))  # noqa: B023 - it is over before the next
        (name,) = slots[blow.victim].incarnations
        slots[blow.victim].stop(signal.SIGKILL)
        dead.append(name)
        on.until(lambda: name not in on.redis.hkeys(broker_keys.INCARNATIONS))  # noqa: B023
        lives += 1
        slots[blow.victim] = on.worker(STUB_STEP_S=0.01)
    on.check(ids)
    assert {*seen_dead(on)} == {*dead}, "each of them, by one looker or by two at once, and nobody else"
    assert "is gone: returned" not in on.logs()
    assert {lease["false_takeovers"] for lease in on.leases()} == {0}


@pytest.mark.slow
def test_each_death_is_judged_by_a_look() -> None:
    with rig() as on:
        _strike(on, 1, examples(6, KILLS))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_so_it_is_where_broker_and_store_are_two_servers() -> None:
    with two_servers() as on:
        _strike(on, 2, 5)


@pytest.mark.slow
def test_after_a_restart_of_the_server_nobody_waits_for_a_lease(tmp_path: Path) -> None:
    """Counter and leases are as they were; whoever looks has joined anew."""
    with running_valkey(tmp_path, appendonly="yes", appendfsync="always") as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        with contextlib.closing(Rig(url, Redis.from_url(url, decode_responses=True, client_name=TESTS))) as on:
            on.redis.set(keys.JOINS, 0)
            workers = [on.worker(STUB_STEP_S=0.01) for _ in range(2)]
            ids = on.begun(4, max_tokens=300)
            on.until(lambda: judged(on, 2, 2))
            server.stop(30)
            server.start(60)
            on.until(lambda: judged(on, 4, 2))
            (name,) = workers[0].incarnations
            workers[0].stop(signal.SIGKILL)
            on.check(ids)
            assert seen_dead(on) == [name]
