"""The autoscaler on a real store: it follows the queues, one leads, and nothing that fails makes it scale in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient
from producers.admin.roles import ROLES
from producers.contract import keys, levels
from producers.store.access.audit import Change
from producers.store.fleet.scaling import Pin, pin, retry, unpin
from tests.producers.proxy import Proxy
from tests.waiting import auntil as until
from tests.workers.autoscaler.conftest import POOL, Fleet, Recorder
from workers.autoscaler import autoscaler, control
from workers.autoscaler.actuators import Actuator
from workers.autoscaler.autoscaler import Autoscaler, AutoscalerSettings
from workers.autoscaler.policy import Rules
from workers.autoscaler.pools import Pools, PoolSettings, Scaled, fixed

RULES = Rules(max=4, cool_down=0.2, step=0.05)
OFTEN = AutoscalerSettings("one", lease=60.0, every=0.05, glance=0.02, look=0.05)
TINY = PoolSettings("tiny", rules=RULES)


@asynccontextmanager
async def scaling(
    client: AsyncClient, pools: Pools | Actuator | None, settings: AutoscalerSettings = OFTEN, pool: PoolSettings = TINY
) -> AsyncIterator[Autoscaler]:
    """A running autoscaler, of one pool with this actuator or of these pools."""
    given = pools if callable(pools) else fixed([Scaled(pool, pools)])
    one = Autoscaler(client, given, settings)
    task = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def test_from_zero_to_what_is_queued_and_to_zero_again(fleet: Fleet, aclient: AsyncClient) -> None:
    hand = Recorder()
    async with scaling(aclient, hand):
        await until(fleet.state)
        assert fleet.state()["wanted"] == 0
        assert not {"below", "levels"} & {*fleet.state()["memory"], *fleet.state()["signals"]}
        fleet.fill(30)
        await until(lambda: hand.numbers[-1:] == [4])
        assert hand.numbers[0] == 1
        for name in "abcd":
            fleet.lease(name)
        fleet.empty()
        await until(lambda: hand.numbers[-1:] == [0])
    history = fleet.history()
    assert [one["wanted"] for one in history if one["wanted"] != 0][:1] == [1]
    assert all(one["reason"] and one["by"] == "one" for one in history)
    assert fleet.valkey.get(keys.SCALE_LEADER) is None, "it resigned"


async def test_a_worker_is_started_for_what_an_idle_one_of_an_earlier_release_cannot_do(
    fleet: Fleet, aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "LEVEL", 1)
    hand = Recorder(1)
    fleet.lease("old")
    queue = levels.queue_of(POOL.version_queue, 1)
    fleet.fill(1, queue)
    async with scaling(aclient, hand):
        await until(lambda: hand.numbers == [2])
        fleet.lease("older", level=0)  # it is of no later release, and no other is started
        seen = fleet.state()["at"]
        await until(lambda: fleet.state()["at"] > seen and fleet.state()["signals"]["ready"] == 2)
        assert fleet.state()["wanted"] == 2
        assert fleet.state()["memory"]["below"] == [[1, 1]]
        fleet.lease("new", level=1, tasks=1, running=1)
        fleet.empty(queue)
        await until(lambda: hand.numbers[-1] < 2)
    assert hand.told[-1][1][-1] == "new"


async def test_at_zero_a_glance_sees_a_first_task_long_before_the_next_reading(
    fleet: Fleet, aclient: AsyncClient
) -> None:
    """A task that starts no worker is read once: what waits already is no news."""
    hand, seldom = Recorder(), AutoscalerSettings("one", lease=60.0, every=3600.0, glance=0.01, look=0.05)
    async with scaling(aclient, hand, seldom):
        first = await until(fleet.state)
        fleet.fill(1, tier="batch")
        second = await until(lambda: fleet.state()["at"] > first["at"] and fleet.state())
        await asyncio.sleep(0.2)
        assert fleet.state()["at"] == second["at"]
        fleet.fill(1, queue=keys.model_queue("tiny"))
        await until(lambda: hand.numbers == [1])


async def test_workers_go_idle_ones_first(fleet: Fleet, aclient: AsyncClient) -> None:
    hand = Recorder(3)
    fleet.lease("busy", running=5)
    fleet.lease("idle")
    fleet.lease("ending", draining=True, running=9)
    async with scaling(aclient, hand, pool=PoolSettings("tiny", rules=Rules(min=1, max=4, cool_down=0.2))):
        await until(lambda: hand.numbers)
    assert hand.told[0][1] == ["ending", "idle", "busy"]


async def test_another_goes_on_from_what_the_first_remembered(fleet: Fleet, aclient: AsyncClient) -> None:
    """One that is killed neither resigns nor is heard of: here its lease is taken from it."""
    slow = PoolSettings("tiny", rules=Rules(max=4, cool_down=60.0))
    hand, other = Recorder(3), Recorder(3)
    fleet.fill(1)
    async with scaling(aclient, hand, pool=slow) as first:
        before = await until(lambda: (fleet.state().get("memory") or {}).get("raw") and fleet.state())
        fleet.valkey.set(keys.SCALE_LEADER, "two", px=60_000)
        async with scaling(aclient, other, AutoscalerSettings("two", lease=60.0, every=0.05), slow):
            after = await until(lambda: fleet.state()["by"] == "two" and fleet.state())
            assert (after["wanted"], after["memory"]["changed_at"]) == (3, before["memory"]["changed_at"])
            assert first.leads, "by its own clock: what it decides is refused all the same"
            fleet.valkey.delete(keys.SCALE_POOLS)
            await until(fleet.state)
            assert fleet.state()["by"] == "two"
    assert hand.told == []


async def test_a_state_that_cannot_be_read_begins_anew_at_the_number_there_is(
    fleet: Fleet, aclient: AsyncClient
) -> None:
    hand = Recorder(3)
    for garbage in ("{", '{"starts": 3, "at": 1}', json.dumps({"at": 1e99, "starts": {}, "memory": {"raw": "x"}})):
        fleet.valkey.hset(keys.SCALE_POOLS, "tiny", garbage)
        async with scaling(aclient, hand, pool=PoolSettings("tiny", rules=Rules(max=4, cool_down=60.0))):
            await until(lambda: fleet.state().get("by") == "one")
        assert fleet.state()["wanted"] == 3
    assert hand.told == []


async def test_a_state_from_long_ago_is_no_ground_to_act_on(fleet: Fleet, aclient: AsyncClient) -> None:
    """The number that it wanted was that of another load: the platform's own counts, and a cool-down begins."""
    patient = PoolSettings("tiny", rules=Rules(max=4, cool_down=60.0))
    async with scaling(aclient, Recorder(), pool=patient):
        await until(fleet.state)
    old = fleet.state()
    assert old["wanted"] == 0
    fleet.valkey.hset(keys.SCALE_POOLS, "tiny", json.dumps(old | {"at": old["at"] - 31}))
    hand = Recorder(3)
    async with scaling(aclient, hand, pool=patient):
        await until(lambda: fleet.state()["wanted"] == 3)
    assert hand.told == []


@pytest.mark.parametrize("card", ["", "{"])
async def test_a_card_that_is_lost_or_broken_does_not_say_that_nothing_is_queued(
    fleet: Fleet, aclient: AsyncClient, card: str
) -> None:
    hand = Recorder(2)
    fleet.valkey.hset(keys.MODELS, "tiny", card) if card else fleet.valkey.delete(keys.MODELS)
    async with scaling(aclient, hand):
        state = await until(fleet.state)
        await until(lambda: fleet.state()["at"] > state["at"] + 0.5)
    assert hand.told == []
    assert state["reason"] == "holds 2: the model is not published, and no worker serves it (`penstock models publish`)"


async def test_a_lease_of_nonsense_is_a_workers_and_breaks_nothing(fleet: Fleet, aclient: AsyncClient) -> None:
    hand = Recorder(1)
    fleet.lease("nonsense")
    fleet.valkey.set(keys.lease("nonsense.1"), b"\xff{")
    fleet.lease("liar", running=-3, tasks="many", kv_blocks_used="NaN", profile={"knee": float("nan"), "duty": -1})
    fleet.fill(1)
    async with scaling(aclient, hand):
        state = await until(fleet.state)
    seen = state["signals"]
    assert (seen["ready"], seen["running"], seen["kv_used"], seen["missing"]) == (2, 0, None, ["running"])
    assert state["wanted"] == 1


async def test_the_store_goes_away_and_comes_back(fleet: Fleet, proxy: Proxy) -> None:
    hand = Recorder()
    fleet.fill(3)
    often = AutoscalerSettings("one", lease=1.0, every=0.05, look=0.05)
    async with AsyncClient(proxy.url) as client, scaling(client, hand, often) as one:
        await until(lambda: hand.numbers == [1])
        fault = proxy.fail(b"", "before", 10**9)
        fleet.empty()
        await until(lambda: not one.leads)
        assert hand.numbers == [1]
        assert fault.hits
        fleet.fill(30)
        proxy.heal()
        await until(lambda: hand.numbers[-1] == 4)
    assert 0 not in hand.numbers


async def test_an_actuator_that_hangs_delays_no_other_and_one_that_refuses_is_told(
    fleet: Fleet, aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "FIRST_RETRY_S", 0.01)
    hangs, works = Recorder(), Recorder()
    named = [Scaled(PoolSettings("tiny", "v1", RULES), works), Scaled(PoolSettings("tiny", None, RULES), hangs)]
    async with scaling(aclient, fixed(named)):
        await until(fleet.state)
        hangs.answers.clear()
        fleet.fill(30)
        await until(lambda: works.numbers[-1:] == [4])
        works.refuses = "quota of GPUs is 0: ask for more"
        works.wanted = 1
        await until(lambda: "quota of GPUs" in fleet.state("tiny@v1")["trouble"])
        works.refuses = ""
        await until(lambda: works.numbers[-1] == 4 and not fleet.state("tiny@v1")["trouble"])
    assert hangs.told == []


async def test_a_pool_that_cannot_be_decided_stops_no_other_and_is_told(
    fleet: Fleet, aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaler, "SILENT_S", -60.0)
    works = Recorder()
    broken = PoolSettings("tiny", "v2", rules=None)  # type: ignore[arg-type]
    pools = fixed([Scaled(broken, None), Scaled(PoolSettings("tiny", "v1", RULES), works)])
    async with scaling(aclient, pools) as one:
        fleet.fill(30)
        await until(lambda: works.numbers[-1:] == [4])
        assert one.unready()[0].startswith("tiny@v2: ")


async def test_nothing_is_begun_while_an_actuator_does_not_say_what_there_is(
    fleet: Fleet, aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "FIRST_RETRY_S", 0.01)
    hand = Recorder(2)
    hand.refuses = "forbidden: patch deployments/scale"
    async with scaling(aclient, hand, pool=PoolSettings("tiny", rules=Rules(max=4, cool_down=3600.0))):
        state = await until(fleet.state)
        assert (state["trouble"], state["memory"]) == ("recorder: forbidden: patch deployments/scale", None)
        hand.refuses = ""
        await until(lambda: fleet.state()["wanted"] == 2)
    assert 0 not in hand.numbers


async def test_a_platform_that_gives_fewer_than_asked_is_said_and_told_again(
    fleet: Fleet, aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "FEWER_S", 0.1)
    hand = Recorder()
    hand.up, hand.failing = 1, "2 pods are pending: no node has a GPU"
    fleet.fill(30)
    async with scaling(aclient, hand):
        await until(lambda: fleet.state().get("trouble"))
        told = len(hand.numbers)
        await until(lambda: len(hand.numbers) > told)
        state = fleet.state()
        assert state["trouble"] == f"recorder was told {state['told']} and has 1: {hand.failing}"
        hand.up = None
        await until(lambda: not fleet.state()["trouble"])


async def test_starts_that_fail_are_given_up_until_an_operator_asks(fleet: Fleet, aclient: AsyncClient) -> None:
    hand = Recorder()
    fleet.fill(1)
    async with scaling(aclient, hand, pool=PoolSettings("tiny", rules=RULES, tries=2)):
        await until(lambda: hand.numbers == [1])
        hand.failures, hand.failing = 2, "CUDA driver is too old"
        await until(lambda: hand.numbers == [1, 0])
        state = fleet.state()
        assert (state["wanted"], state["told"]) == (1, 0)
        assert "2 tries in a row failed: CUDA driver is too old (given up" in state["trouble"]
        await retry(aclient.store, "tiny")
        await until(lambda: hand.numbers == [1, 0, 1])
        fleet.lease("a")
        await until(lambda: not fleet.state()["trouble"])


async def test_an_operators_number_holds_until_it_is_removed(fleet: Fleet, aclient: AsyncClient) -> None:
    hand, change = Recorder(), Change("ops", "scaling.pin", "tiny: 3")
    async with scaling(aclient, hand):
        await until(fleet.state)
        await pin(aclient.store, "tiny", Pin(3, "ops", 1.0), change)
        await until(lambda: hand.numbers[-1:] == [3])
        state = fleet.state()
        assert (state["pin"]["workers"], state["reason"][:20]) == (3, "3: pinned by ops; wi")
        assert await unpin(aclient.store, "tiny")
        await until(lambda: hand.numbers[-1:] == [0])
        await until(lambda: fleet.state()["pin"] is None)
    assert [one["wanted"] for one in fleet.history() if one["pin"]] == [3]


async def test_a_pin_and_its_entry_of_the_audit_log_are_one_step(
    fleet: Fleet, aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is its end: no call but the script's changes anything."""
    execute, calls = aclient.store.execute_command, []

    def noted(name: str, *args: Any, **options: Any) -> Any:
        calls.append(name)
        return execute(name, *args, **options)

    monkeypatch.setattr(aclient.store, "execute_command", noted)
    await pin(aclient.store, "tiny", Pin(3, "ops", 1.0), Change("ops", "scaling.pin", "tiny: 3"))
    assert fleet.valkey.hlen(keys.SCALE_PINS) == fleet.valkey.xlen(keys.AUDIT) == 1
    for removed in (True, False):
        assert await unpin(aclient.store, "tiny", Change("ops", "scaling.unpin", "tiny")) is removed
        assert (fleet.valkey.hlen(keys.SCALE_PINS), fleet.valkey.xlen(keys.AUDIT)) == (0, 2)
    assert {*calls} <= {"HGET", "EVALSHA", "EVAL"}


async def test_what_comes_to_a_pool_that_is_pinned_at_zero_is_no_news(fleet: Fleet, aclient: AsyncClient) -> None:
    await pin(aclient.store, "tiny", Pin(0, "ops", 1.0), Change("ops", "scaling.pin", "tiny: 0"))
    seldom = AutoscalerSettings("one", lease=60.0, every=3600.0, glance=0.01, look=0.05)
    async with scaling(aclient, Recorder(), seldom):
        first = await until(fleet.state)
        for _ in range(10):
            fleet.fill(1, tier="priority")
            await asyncio.sleep(0.03)
        assert fleet.state()["at"] == first["at"]


async def test_a_pin_goes_with_its_pool_unless_another_leads(fleet: Fleet, aclient: AsyncClient) -> None:
    await pin(aclient.store, "tiny", Pin(1, "ops", 1.0), Change("ops", "scaling.pin", "tiny: 1"))
    for leader, kept in (("two", True), ("one", False)):
        one = Autoscaler(aclient, fixed([Scaled(TINY, None)]), OFTEN)
        fleet.valkey.set(keys.SCALE_LEADER, "one")
        assert await one._tick()
        assert fleet.state()["wanted"] == 1
        fleet.valkey.set(keys.SCALE_LEADER, leader)
        one._pools = fixed([])
        assert await one._tick() is not kept
        assert fleet.valkey.hexists(keys.SCALE_PINS, "tiny") is kept


async def test_an_autoscaler_that_may_not_read_pins_scales_without(fleet: Fleet, valkey_url: str) -> None:
    """Users of the server as an earlier release made them."""
    rules = ROLES["autoscaler"].rules().replace("penstock:scale:pins", "penstock:scale:other")
    fleet.valkey.execute_command("ACL", "SETUSER", "scales", "reset", "on", ">pw", "-@all", *rules.split())
    async with AsyncClient(valkey_url.replace("://", "://scales:pw@")) as client, scaling(client, Recorder()):
        await until(fleet.state)
    fleet.valkey.acl_deluser("scales")


async def test_old_versions_live_until_nothing_of_them_is_left(
    fleet: Fleet, aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "SETTLED_S", 0.2)
    new = keys.Pool("tiny", "v2", "cafe")
    old_hand, new_hand = Recorder(2), Recorder()
    rules = Rules(min=1, max=4, cool_down=60.0)
    hands = (("v1", old_hand), ("v2", new_hand))
    pools = fixed([Scaled(PoolSettings("tiny", v, rules, keep_warm=0.0), h) for v, h in hands])
    fleet.lease("a")
    fleet.fill(1)
    fleet.valkey.hset(
        keys.ROLLOUTS, "tiny", json.dumps({"model": "tiny", "version": "v2", "workers": 2, "phase": "starting"})
    )
    async with scaling(aclient, pools):
        await until(lambda: new_hand.numbers[-1:] == [2])
        fleet.card("v2")
        fleet.valkey.hset(keys.ROLLOUTS, "tiny", json.dumps({"phase": "draining", "version": "v2"}))
        fleet.lease("b", new)
        await until(lambda: fleet.state("tiny@v2").get("rules", {}).get("min") == 1)
        assert old_hand.told == []
        fleet.empty()
        await until(lambda: old_hand.numbers == [0])
    assert new_hand.numbers[-1] >= 1


async def test_a_version_that_was_the_default_keeps_a_worker_for_a_time_unless_another_rollout_needs_its_room(
    fleet: Fleet, aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a new leader. What was never the default ends at once."""
    monkeypatch.setattr(control, "SETTLED_S", 0.2)
    hands = {"v1": Recorder(2), "v2": Recorder(1), "v3": Recorder(1)}
    rules = Rules(min=1, max=4, cool_down=0.1)  # with 0 it would have none any more when it is replaced
    pools = fixed([Scaled(PoolSettings("tiny", v, rules, keep_warm=9e9), hand) for v, hand in hands.items()])
    fleet.lease("a")
    async with scaling(aclient, pools):
        await until(lambda: fleet.state("tiny@v1").get("default_at"))
        fleet.card("v2")
        await until(lambda: fleet.state("tiny@v2").get("rules", {}).get("min") == 1)
        seen = fleet.state("tiny@v1")["at"]
        await until(lambda: fleet.state("tiny@v1")["at"] > seen)
        assert fleet.state("tiny@v1")["rules"]["min"] == 1
        await until(lambda: hands["v3"].numbers[-1:] == [0])
        await until(lambda: hands["v1"].numbers[-1:] == [1])
    async with scaling(aclient, pools):
        seen = fleet.state("tiny@v1")["at"]
        await until(lambda: fleet.state("tiny@v1")["at"] > seen)
        assert fleet.state("tiny@v1")["rules"]["min"] == 1
        rollout = {"model": "tiny", "version": "v3", "workers": 1, "phase": "starting"}
        fleet.valkey.hset(keys.ROLLOUTS, "tiny", json.dumps(rollout))
        await until(lambda: hands["v1"].numbers[-1:] == [0])


async def test_a_store_that_has_lost_all_takes_no_worker_away(fleet: Fleet, aclient: AsyncClient) -> None:
    """Neither is the exported number lower: the leases come again one after another."""
    pool = PoolSettings("tiny", rules=Rules(max=4, cool_down=60.0))
    for name in "abc":
        fleet.lease(name)
    async with scaling(aclient, None, pool=pool):
        await until(lambda: fleet.state().get("wanted") == 3)
        fleet.valkey.flushall()
        state = await until(fleet.state)
        assert (state["wanted"], state["reason"]) == (
            3,
            "holds 3: the model is not published, and no worker serves it (`penstock models publish`)",
        )
        fleet.card("v1")
        fleet.lease("a")
        await until(lambda: (fleet.state()["signals"] or {}).get("ready") == 1)
        assert fleet.state()["wanted"] == 3


async def test_pools_come_and_go(fleet: Fleet, aclient: AsyncClient) -> None:
    """So do their states; that of another's pool stays for a day."""
    hand, there = Recorder(), [Scaled(TINY, None)]
    now = float(fleet.valkey.time()[0])
    for name, age in {"forgotten": 90_000, "others": 3600}.items():
        fleet.valkey.hset(keys.SCALE_POOLS, name, json.dumps({"at": now - age}))
    async with scaling(aclient, lambda fleet: there):
        await until(fleet.state)
        there[:] = [Scaled(PoolSettings("tiny", "v1", RULES), hand)]
        await until(lambda: fleet.state("tiny@v1") and not fleet.state())
        fleet.fill(1)
        await until(lambda: hand.numbers == [1])
    assert set(fleet.valkey.hkeys(keys.SCALE_POOLS)) == {b"others", b"tiny@v1"}


async def test_a_dry_run_shows_and_changes_nothing(fleet: Fleet, aclient: AsyncClient, valkey: Redis) -> None:
    hand, shown = Recorder(), list[int]()
    one = Autoscaler(
        aclient,
        fixed([Scaled(TINY, hand)]),
        OFTEN,
        dry_run=True,
        show=lambda _, state, new: shown.append(state["wanted"]),
    )
    task = asyncio.create_task(one.run())
    fleet.fill(30)
    await until(lambda: shown[-1:] == [4])
    task.cancel()
    await asyncio.wait((task,))
    assert (hand.told, valkey.exists(keys.SCALE_LEADER, keys.SCALE_POOLS, keys.SCALE_DECISIONS)) == ([], 0)
