"""The ledger: each task that ended is counted once, whoever adds rows to sums, and whenever somebody reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers import Client
from producers.connection.script import run
from producers.contract import keys
from producers.contract.record import Run
from producers.store import protocol
from producers.store.measurements import ENERGY, WORKER_TIME, Tally, measure
from producers.store.usage.ledger import (
    COUNTS,
    STATUSES,
    Group,
    GroupUsage,
    add_overhead,
    fold,
    prune,
    roll,
    usage_between,
)
from producers.store.usage.report import report
from tests.exhaustive import few
from tests.histories import histories
from tests.producers.fake_worker import FakeWorker

ALL = 0, 2**40
HOUR, DAY = 3600, 86400
#: A Monday, 0:00.
BEGIN = 1_763_942_400


def read(url: str, since: int = ALL[0], until: int = ALL[1], tenant: str | None = None) -> list[GroupUsage]:
    async def found() -> list[GroupUsage]:
        async with AsyncRedis.from_url(url) as store:
            return await usage_between(store, since, until, tenant)

    return asyncio.run(found())


def totals(found: Iterable[GroupUsage]) -> Counter[tuple[Group, str]]:
    sums: Counter[tuple[Group, str]] = Counter()
    for one in found:
        sums.update({(one.group, name): count for name, count in zip(COUNTS, one.counts, strict=True)})
    return sums


def test_a_row_says_who_used_what_and_outlives_its_record(valkey: Redis, client: Client, worker: FakeWorker) -> None:
    handle = client.submit(model="tiny", prompt=[1, 2, 3], tier="flex", tenant="acme")
    valkey.hset(keys.task(handle.id), "key", "k1")
    worker.claim(handle.id)
    worker.append(handle.id, 0, ["a", "b"])
    worker.die()
    other = FakeWorker(valkey, "other")
    other.claim(handle.id)
    other.append(handle.id, 2, ["c"], finish_reason="stop")
    noted = Run("w", 1, 2, 3, 0, 1, [(5, "kv_room")], engine_us=1500, energy_uj=70).script_argument(1).partition(" ")[2]
    earlier = '["other",4,5,6,0,0,[]]'  # as a release wrote it that did not measure
    valkey.hset(keys.task(handle.id), mapping={"run:1": noted, "run:2": earlier})
    other.finish(handle.id, [3])
    other.settle(handle.id)
    valkey.delete(keys.task(handle.id))
    ((_, row),) = valkey.xrange(keys.LEDGER)
    said = {name.decode(): value.decode() for name, value in row.items()}
    assert int(said.pop("ms")) >= 0
    assert int(said.pop("created")) <= int(said.pop("started")) <= int(said.pop("first"))
    whose = {"key": "k1", "tenant": "acme", "model": "tiny", "version": "0123456789ab", "tier": "flex"}
    tokens = {
        "prompt": "3",
        "cached": "0",
        "output": "3",
        "discarded": "0",
        "again": "5",
        "engine": "1500",
        "energy": "70",
        "longest": "3",
        "alias": "",
        "generation": "",
        "drawn": "",
    }
    assert said == whose | tokens | {"id": handle.id, "status": "completed", "attempts": "2", "deaths": "1"}


def test_what_is_deleted_or_never_began_has_a_row_and_ends_once(
    valkey: Redis, valkey_url: str, client: Client, model: str
) -> None:
    cancelled, deleted = (client.submit(model=model, prompt=[1]) for _ in range(2))
    for _ in range(2):
        cancelled.cancel()
        run(valkey, protocol.delete(deleted.id, "x"))
    assert valkey.xlen(keys.LEDGER) == 2
    (found,) = read(valkey_url)
    assert found.counts == tuple(2 if name == "cancelled" else 0 for name in COUNTS)
    assert found.group == Group("", "", "tiny", "0123456789ab", "default")


class Machine(RuleBasedStateMachine):
    """Rows of all ages; FOLD and ROLL of any part of them; beside them a list of what was written."""

    valkey: Redis
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.valkey.flushall()
        self.now = int(self.valkey.time()[0])
        self.at = (self.now - 6 * DAY) * 1000
        self.written: list[GroupUsage] = []

    @rule(
        later=st.integers(0, 9 * HOUR),
        tenant=st.sampled_from(["", "a", 'b" c', "ünï"]),
        status=st.sampled_from(STATUSES),
        tokens=st.sampled_from([0, 7, 2**40]),
    )
    def end(self, later: int, tenant: str, status: str, tokens: int) -> None:
        self.at = min(self.at + later * 1000, self.now * 1000)
        group = Group("", tenant, "m", "v", "default")
        numbers = dict.fromkeys(COUNTS[len(STATUSES) :], tokens)
        self.valkey.xadd(keys.LEDGER, {**group._asdict(), "status": status, **numbers}, id=f"{self.at}-*")
        counts = [*(int(name == status) for name in STATUSES), *numbers.values()]
        self.written.append(GroupUsage(self.at // 1000, group, tuple(counts)))

    @rule(days=st.integers(0, 6), most=st.integers(1, 5))
    def fold(self, days: int, most: int) -> None:
        assert run(self.valkey, fold(days * DAY * 1000, most)) <= most

    @rule(days=st.integers(0, 6), most=st.integers(1, 5))
    def roll(self, days: int, most: int) -> None:
        run(self.valkey, roll(days * DAY, most))

    @rule()
    def write_as_an_earlier_release(self) -> None:
        """It had the sums of all tenants in one hash."""
        for raw in self.valkey.zrange(keys.USAGE, 0, -1):
            bucket = raw.decode()
            for tenant in self.valkey.smembers(keys.usage_tenants(bucket)):
                name = keys.usage(bucket, tenant.decode())
                if not self.valkey.exists(keys.usage_unsplit(bucket)):
                    self.valkey.hset(keys.usage_unsplit(bucket), mapping=self.valkey.hgetall(name))
                    self.valkey.zadd(keys.USAGE_UNSPLIT, {bucket: int(bucket.split(":")[1])})
                    self.valkey.delete(name)

    @invariant()
    def each_is_counted_once_and_whole_days_are_right_however_much_is_in_sums(self) -> None:
        since = (self.now // DAY - 3) * DAY
        for begin, end in (ALL, (since, since + 2 * DAY)):
            wanted = totals(one for one in self.written if begin <= one.start < end)
            assert totals(read(self.url, begin, end)) == wanted
            its = (one for one in self.written if begin <= one.start < end and one.group.tenant == "a")
            assert totals(read(self.url, begin, end, "a")) == totals(its)


@pytest.mark.parametrize("examples", few([3, 20], 3))
def test_rows_and_sums_count_each_task_once(valkey: Redis, valkey_url: str, examples: int) -> None:
    machine = type("OnThisServer", (Machine,), {"valkey": valkey, "url": valkey_url})
    run_state_machine_as_test(machine, settings=histories(examples, 25))


@pytest.mark.parametrize("folded", [False, True])
def test_numbers_beyond_a_doubles_fourteen_digits_are_exact(valkey: Redis, valkey_url: str, folded: bool) -> None:
    numbers = dict.fromkeys(COUNTS[len(STATUSES) :], 2**51 + 1)
    for k in (1, 2):
        row = Group("k", "t", "m", "v", "flex")._asdict() | {"status": "failed"} | numbers
        valkey.xadd(keys.LEDGER, row, id=f"{BEGIN * 1000}-{k}")
        if folded:
            run(valkey, fold(0))
    assert totals(read(valkey_url))[Group("k", "t", "m", "v", "flex"), "output"] == 2**52 + 2


async def test_who_reads_while_others_fold_counts_each_task_once(valkey: Redis, valkey_url: str) -> None:
    row = Group("k", "t", "m", "v", "flex")._asdict() | dict.fromkeys(COUNTS[len(STATUSES) :], 1)
    for k in range(1000):
        valkey.xadd(keys.LEDGER, row | {"status": "completed"}, id=f"{(BEGIN + 36 * k) * 1000}-0")

    async def folding(store: AsyncRedis) -> None:
        for _ in range(100):
            await store.execute_command(*fold(0, 10).whole)
            await store.execute_command(*roll(0, 1).whole)
            await asyncio.sleep(0.001)

    async with AsyncRedis.from_url(valkey_url) as store, asyncio.TaskGroup() as group:
        for _ in range(2):  # two sweepers
            group.create_task(folding(store))
        while valkey.xlen(keys.LEDGER):
            assert totals(await usage_between(store, *ALL))[Group("k", "t", "m", "v", "flex"), "output"] == 1000
            await asyncio.sleep(0)


async def test_of_the_sums_a_tenants_question_reads_its_own(valkey: Redis, valkey_url: str) -> None:
    numbers = dict.fromkeys(COUNTS[len(STATUSES) :], 1)
    for k in range(50):
        row = Group("k", f"t{k}", "m", "v", "flex")._asdict() | {"status": "completed"} | numbers
        valkey.xadd(keys.LEDGER, row, id=f"{(BEGIN + k) * 1000}-0")
    while run(valkey, fold(0)):
        pass
    async with AsyncRedis.from_url(valkey_url) as store, store.monitor() as seen, store.client() as asking:
        assert len(await usage_between(asking, *ALL, "t7")) == 1
        valkey.echo("done")
        commands = []
        while (said := (await seen.next_command())["command"]) != "ECHO done":
            commands.append(said)
    assert [said for said in commands if said.startswith(("HGETALL", "SMEMBERS"))] == [
        f"HGETALL {keys.usage(f'hour:{BEGIN}', 't7')}"
    ]


async def test_old_days_go_and_nothing_else_does(valkey: Redis, valkey_url: str) -> None:
    now = int(valkey.time()[0])
    row = Group("k", "t", "m", "v", "flex")._asdict() | dict.fromkeys(COUNTS[len(STATUSES) :], 1)
    for days in (9, 5, 2, 0):
        valkey.xadd(keys.LEDGER, row | {"status": "completed"}, id=f"{(now - days * DAY) * 1000}-*")
    run(valkey, fold(DAY * 1000))
    while run(valkey, roll(3 * DAY)):
        pass
    async with AsyncRedis.from_url(valkey_url) as store:
        assert await prune(store, 7.0 * DAY) == 1
        assert len(await usage_between(store, *ALL)) == 3
        assert await prune(store, 1.0) == 1
    left = {name.decode() for name in valkey.keys("penstock:usage:*:*")}
    hour = f"hour:{(now - 2 * DAY) // HOUR * HOUR}"
    assert left == {keys.usage(hour, "t"), keys.usage_tenants(hour)}
    assert valkey.xlen(keys.LEDGER) == 1


def worked(valkey: Redis, mark: int, model: str, **seconds: int) -> None:
    """As a worker adds to its model's counters, whose device draws 2 W."""
    tally = Tally()
    for state, its in seconds.items():
        tally.add(WORKER_TIME, 1_000_000 * its, state)
        tally.add(ENERGY, 2_000_000 * its, state)
    run(valkey, measure("worker", str(mark), {model: tally}))


def test_workers_time_without_tasks_is_shared_by_who_used_the_model(valkey: Redis, valkey_url: str) -> None:
    """To the microsecond, however many sweepers enter it; what was counted before the first is nobody's any more."""

    def entered() -> int:
        async def many() -> int:
            async with AsyncRedis.from_url(valkey_url) as store:
                return sum(await asyncio.gather(*(add_overhead(store) for _ in range(3))))

        return asyncio.run(many())

    def lines(*by: str, tenant: str | None = None) -> list[dict[str, object]]:
        async def rows() -> list[dict[str, object]]:
            async with AsyncRedis.from_url(valkey_url) as store:
                return (await report(store, *ALL, by, tenant=tenant)).rows()

        return asyncio.run(rows())

    valkey.hset(keys.MODELS, mapping={"used": "{}", "unused": "{}", "silent": "{}"})
    worked(valkey, 1, "used", idle=500, starting=7)
    assert entered() == 0
    worked(valkey, 2, "used", busy=40, idle=90, starting=3)
    worked(valkey, 3, "unused", idle=11)
    for tenant, seconds in (("a", 30), ("b", 10)):
        row: dict[Any, Any] = dict.fromkeys(COUNTS[4:], 0) | {"engine": 1_000_000 * seconds, "status": "completed"}
        row["energy"] = 2 * row["engine"]
        valkey.xadd(keys.LEDGER, row | {"key": "k", "tenant": tenant, "model": "used", "version": "1", "tier": "flex"})
    assert entered() == 3
    times = ("engine_seconds", "idle_seconds", "starting_seconds", "joules", "overhead_joules")
    expected = {"a": (30, 67.5, 2.25, 60, 139.5), "b": (10, 22.5, 0.75, 20, 46.5), "": (0, 11, 0, 0, 22)}
    assert {line["tenant"]: tuple(line[name] for name in times) for line in lines("tenant")} == expected
    by_model = {line["model"]: tuple(line[name] for name in times) for line in lines("model")}
    assert by_model == {"used": (40, 90, 3, 80, 186), "unused": (0, 11, 0, 0, 22)}
    assert [line["tasks"] for line in lines()] == [2]
    assert not {"idle_seconds", "joules", "overhead_joules"} & lines("tenant", tenant="a")[0].keys()
    run(valkey, fold(-1000))
    assert {line["tenant"]: tuple(line[name] for name in times) for line in lines("tenant")} == expected
    valkey.delete(keys.metrics("used"))
    worked(valkey, 4, "used", idle=5)  # from zero again, as after a failover that lost the counters
    assert entered() == 1
    assert sum(float(str(line["idle_seconds"])) for line in lines("tenant")) == 106
