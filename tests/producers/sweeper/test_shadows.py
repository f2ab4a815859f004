"""Shadow traffic: which tasks are copied, what a copy is kept out of, and what becomes of it whoever dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient
from producers.admin import routes
from producers.broker.redis import keys as broker_keys
from producers.client.steps import Step
from producers.connection.script import run, text
from producers.contract import keys
from producers.rollouts.operations import checked
from producers.store import protocol, shadows
from producers.store.fleet import cards
from producers.store.fleet.canaries import Canary, Plan
from producers.store.fleet.routing import RoutingError, Shadow
from producers.store.measurements import count_ended
from producers.sweeper.shadows import Shadows
from producers.sweeper.tasks import send_unsent
from tests.producers.conftest import CARD
from tests.producers.fake_worker import FakeWorker

OTHER = keys.Pool("tiny", "ffffffffffff", "f")
#: A copy is not late for a pause of the machine.
PATIENT_S = 3600.0


@pytest.fixture
def shadowed(valkey: Redis, model: str) -> Redis:
    """All tasks of `tiny` are copied to another version, of which a worker lives."""
    cards.publish(valkey, CARD, {})
    cards.announce(valkey, {**CARD, "version": OTHER.version}, OTHER, {})
    routes.set_shadow(valkey, model, Shadow(OTHER.version, 100))
    valkey.sadd(keys.workers(OTHER.queue), "w")
    valkey.set(keys.lease("w"), "{}")
    return valkey


def copies(store: Redis) -> list[str]:
    return [text(key).removeprefix(keys.task("")) for key in store.scan_iter(keys.task("shadow:*"))]


def drops(store: Redis) -> dict[str, int]:
    return {text(name): int(count) for name, count in store.hgetall(keys.shadow_drops("tiny")).items()}


def rows(store: Redis) -> list[shadows.Pair]:
    entries: Any = store.xrange(keys.shadow_pairs("tiny"))
    return [row for _, fields in entries if (row := shadows.Pair.parse(fields[b"row"])) is not None]


async def test_a_copy_is_made_apart_from_all_that_is_its_owners_and_compared_once(
    aclient: AsyncClient, shadowed: Redis, worker: FakeWorker
) -> None:
    shadowed.hset(keys.WEBHOOK_ENDPOINTS, "e", json.dumps({"event_types": ["response.completed"], "tenant": None}))
    fields: dict[str, Any] = {
        "tenant": "acme",
        "metadata": {"a": "b"},
        "webhook": {"url": "http://127.0.0.1:9/"},
        "seed": 7,
    }
    task = await aclient.submit(model="tiny", prompt=[1, 2], max_tokens=9, idempotency_key="k", **fields)
    before = shadowed.hgetall(keys.task(task.id))
    waits, kept = shadowed.hgetall(keys.WAITING), shadowed.hgetall(keys.kept("acme"))
    sweeper = Shadows(aclient, unstarted_s=PATIENT_S)
    assert await sweeper.sweep() == {"shadows_copied": 1, "shadows_compared": 0}
    assert shadowed.hgetall(keys.task(task.id)) == before
    assert (shadowed.hgetall(keys.WAITING), shadowed.hgetall(keys.kept("acme"))) == (waits, kept)
    (copy,) = copies(shadowed)
    record = {text(name): text(value) for name, value in shadowed.hgetall(keys.task(copy)).items()}
    assert (record["tenant"], record["tier"], record["version"]) == (shadows.TENANT, "batch", OTHER.version)
    assert (record["status"], record["shadow_of"]) == ("queued", task.id)
    assert json.loads(record["task"])["seed"] == 7
    assert not {"webhook", "idempotency", "metadata", "key", "reserved", "waits"} & set(record)
    assert shadowed.llen(broker_keys.tier_list(OTHER.version_queue, "batch")) == 1
    for index in (keys.TASKS, keys.REQUESTS, keys.requests(shadows.TENANT)):
        assert shadowed.zscore(index, copy) is None
    assert [row.id for row in (await aclient.tasks.list(kind="all")).tasks] == [task.id]

    worker.serve(task.id, ["a", "b", "c", "d"])
    assert await sweeper.sweep() == {"shadows_copied": 0, "shadows_compared": 0}
    due = shadowed.zcard(keys.WEBHOOKS_DUE)
    other = FakeWorker(shadowed, "w")
    assert other.claim(copy).answer == "go"
    other.append(copy, 0, ["a", "b", "x"], token_ids=[0, 1, 9])
    other.finish(copy, [3], reasons=["length"])
    assert shadowed.zcard(keys.WEBHOOKS_DUE) == due
    assert await sweeper.sweep() == {"shadows_copied": 0, "shadows_compared": 1}
    (row,) = rows(shadowed)
    assert (row.task, row.version, row.shadow) == (task.id, CARD["version"], OTHER.version)
    assert (row.tokens, row.same, row.reasons) == ((4, 3), 0.5, (("stop",), ("length",)))
    (summary,) = shadows.summaries([row])
    assert (summary.pairs, summary.same, summary.equal, summary.same_reason, summary.length) == (1, 0.5, 0, 0, 0.75)
    assert not copies(shadowed)
    assert not shadowed.exists(keys.SHADOW_COPIES, keys.stream(copy))
    entries: Any = shadowed.xrange(keys.LEDGER)
    ledger = [fields for _, fields in entries]
    assert [(text(row[b"tenant"]), text(row[b"tier"])) for row in ledger] == [("acme", "default"), ("~shadow", "batch")]
    assert await sweeper.sweep() == {}
    assert drops(shadowed) == {}
    await count_ended(aclient.store)
    assert shadowed.hget(keys.metrics("tiny"), "tasks default completed n") == b"1"
    assert not [name for name in shadowed.hkeys(keys.metrics("tiny")) if b"batch" in name]


async def test_an_output_is_scored_by_both_versions_while_a_rollout_compares_that(
    aclient: AsyncClient, shadowed: Redis, worker: FakeWorker
) -> None:
    plan = checked(Plan())
    canary = Canary("tiny", "r", OTHER.version, CARD["version"], plan, 1, "me", phase="judging", since=1)
    sweeper, other = Shadows(aclient, unstarted_s=PATIENT_S), FakeWorker(shadowed, "w")

    async def compared() -> list[str]:
        task = await aclient.submit(model="tiny", prompt=[1, 2], max_tokens=9)
        await sweeper.sweep()
        (copy,) = copies(shadowed)
        worker.serve(task.id, ["a", "b"])
        other.serve(copy, ["a", "b"])
        await sweeper.sweep()
        return sorted(copies(shadowed))

    assert await compared() == [], "nobody compares it"
    shadowed.hset(keys.CANARIES, "tiny", canary.to_json())
    first, second = await compared()
    tasks = [json.loads(shadowed.hget(keys.task(name), "task") or "") for name in (first, second)]
    assert [task["prompt"] for task in tasks] == [[1, 2, 0, 1]] * 2, "the prompt and the output"
    assert {task["max_tokens"] for task in tasks} == {0}
    versions = [shadowed.hget(keys.task(name), "version") for name in (first, second)]
    assert versions == [CARD["version"].encode(), OTHER.version.encode()]
    for name, scores in ((second, (-1.0, -3.0)), (first, (-0.5, -1.5))):
        assert other.claim(name).answer == "go"
        other.prompt(name, [1, 2, 0, 1], [None, (-9.0, ()), *((score, ()) for score in scores)])
        other.finish(name, [0], reasons=["length"])
        assert await sweeper.sweep() == {"shadows_copied": 0, "shadows_compared": int(name == first)}
    assert (copies(shadowed), drops(shadowed)) == ([], {})
    assert not shadowed.exists(keys.SHADOW_COPIES)
    entries: Any = shadowed.xrange(keys.shadow_pairs("tiny"))
    (row,) = [score for _, fields in entries if (score := shadows.Score.parse(fields[b"row"])) is not None]
    assert (row.version, row.shadow, row.scored, row.scores) == (CARD["version"], OTHER.version, 2, (-1.0, -2.0))
    assert len(rows(shadowed)) == 2, "readers of pairs pass it over"

    first, second = await compared()
    await aclient.get(first.removeprefix(shadows.SCORES[0])).delete()
    assert copies(shadowed) == [], "they go with their task"
    first, second = await compared()
    await aclient.get(second).delete()
    other.serve(first)
    await sweeper.sweep()
    assert (copies(shadowed), drops(shadowed)) == ([], {"score": 1})
    before = shadowed.xlen(keys.shadow_pairs("tiny"))
    for name in reversed(await compared()):
        assert other.claim(name).answer == "go"
        other.prompt(name, [1, 2, 0, 1], [None, *((float("-inf"), ()) for _ in range(3))])
        other.finish(name, [0], reasons=["length"])
    await sweeper.sweep()
    assert (copies(shadowed), drops(shadowed)) == ([], {"score": 2})
    assert shadowed.xlen(keys.shadow_pairs("tiny")) == before + 1, "the pair alone: no rollout can compare such scores"


class TestSample:
    def test_a_part_of_the_tasks_by_their_ids_and_none_of_what_cannot_be_compared(self) -> None:
        shadow, fields = Shadow("b", 20), {"version": "a", "origin": "task"}
        ids = [f"t{number}" for number in range(5000)]
        assert sum(shadows.is_sampled(shadow, fields, name) for name in ids) == pytest.approx(1000, abs=120)
        everything = Shadow("b", 100)
        assert shadows.is_sampled(everything, fields, "t")
        assert not shadows.is_sampled(everything, {**fields, "version": "b"}, "t")
        assert not shadows.is_sampled(everything, {**fields, "origin": "shadow"}, "t")
        assert not shadows.is_sampled(everything, fields, "t" * 128)
        for name in ("adapter", "result_bytes", "chunks"):
            assert not shadows.is_sampled(everything, {**fields, name: 1}, "t")

    async def test_no_more_wait_to_be_copied_than_is_bounded(self, aclient: AsyncClient, shadowed: Redis) -> None:
        shadowed.rpush(keys.SHADOW_SAMPLES, *range(1000))
        await aclient.submit(model="tiny", prompt=[1])
        assert shadowed.llen(keys.SHADOW_SAMPLES) == 1000

    @pytest.mark.parametrize(
        ("shadow", "card", "message"),
        [
            (Shadow(OTHER.version, 0), {}, "0 percent are copied"),
            (Shadow(OTHER.version, float("nan")), {}, "nan percent are copied"),
            (Shadow("zzz", 5), {}, "'zzz' is no alias"),
            (Shadow(OTHER.version, 5), {"files": {"tokenizer.json": "0" * 64}}, "another tokenizer"),
        ],
    )
    def test_what_makes_no_sense_is_refused(
        self, shadowed: Redis, shadow: Shadow, card: dict[str, Any], message: str
    ) -> None:
        cards.add_version(shadowed, {**CARD, "version": OTHER.version, **card}, {})
        before = routes.current(shadowed, "tiny")
        with pytest.raises(RoutingError, match=message):
            routes.set_shadow(shadowed, "tiny", shadow)
        assert routes.current(shadowed, "tiny") == before

    def test_an_archived_version_gets_no_copies(self, shadowed: Redis) -> None:
        with pytest.raises(RoutingError, match=r"its shadow leads to .*`penstock models shadow tiny --off`"):
            routes.set_stages(shadowed, "tiny", {OTHER.version: "archived"})
        routes.set_shadow(shadowed, "tiny", None)
        routes.set_stages(shadowed, "tiny", {OTHER.version: "archived"})
        with pytest.raises(RoutingError, match="archived, and its shadow leads to it"):
            routes.set_shadow(shadowed, "tiny", Shadow(OTHER.version, 5))

    def test_it_makes_no_version_one_that_new_tasks_go_to(self, shadowed: Redis) -> None:
        state = routes.current(shadowed, "tiny")
        assert OTHER.version in state.versions()
        assert not state.leads_to(OTHER.version)


class TestDrops:
    """Copies give way, and say why."""

    async def test_nothing_is_copied_where_nobody_serves_the_version(
        self, aclient: AsyncClient, shadowed: Redis
    ) -> None:
        shadowed.delete(keys.lease("w"))
        await aclient.submit(model="tiny", prompt=[1])
        assert await Shadows(aclient, unstarted_s=PATIENT_S).sweep() == {"shadows_copied": 0, "shadows_compared": 0}
        assert (copies(shadowed), drops(shadowed)) == ([], {"unserved": 1})

    async def test_copies_go_where_live_work_waits(self, aclient: AsyncClient, shadowed: Redis) -> None:
        sweeper = Shadows(aclient, unstarted_s=PATIENT_S)
        await aclient.submit(model="tiny", prompt=[1])
        await sweeper.sweep()
        assert len(copies(shadowed)) == 1
        await aclient.submit(model=f"tiny@{OTHER.version}", prompt=[1])
        await aclient.submit(model="tiny", prompt=[1])
        await sweeper.sweep()
        assert len(copies(shadowed)) == 2, "it may have come this moment"
        await aclient.submit(model="tiny", prompt=[1])
        await sweeper.sweep()
        assert (copies(shadowed), drops(shadowed)) == ([], {"overload": 3})

    async def test_nothing_is_copied_in_a_stage_of_overload(self, aclient: AsyncClient, shadowed: Redis) -> None:
        shadowed.hset(keys.drain(OTHER.version_queue), "stage", 1)
        await aclient.submit(model="tiny", prompt=[1])
        await Shadows(aclient, unstarted_s=PATIENT_S).sweep()
        assert (copies(shadowed), drops(shadowed)) == ([], {"overload": 1})

    async def test_a_copy_that_does_not_begin_is_dropped(self, aclient: AsyncClient, shadowed: Redis) -> None:
        await aclient.submit(model="tiny", prompt=[1])
        await Shadows(aclient).sweep()
        (copy,) = copies(shadowed)
        shadowed.hincrby(keys.task(copy), "created", -30_000)
        await Shadows(aclient).sweep()
        assert (copies(shadowed), drops(shadowed)) == ([], {"late": 1})

    async def test_no_more_are_open_than_is_bounded(self, aclient: AsyncClient, shadowed: Redis) -> None:
        for _ in range(3):
            await aclient.submit(model="tiny", prompt=[1])
        sweeper = Shadows(aclient, max_open=2, unstarted_s=PATIENT_S)
        for _ in range(2):
            await sweeper.sweep()
            assert (len(copies(shadowed)), shadowed.llen(keys.SHADOW_SAMPLES)) == (2, 1)

    async def test_samples_of_a_shadow_that_ended_are_not_copied(self, aclient: AsyncClient, shadowed: Redis) -> None:
        await aclient.submit(model="tiny", prompt=[1])
        routes.set_shadow(shadowed, "tiny", None)
        await Shadows(aclient, unstarted_s=PATIENT_S).sweep()
        assert (copies(shadowed), drops(shadowed)) == ([], {"ended": 1})

    @pytest.mark.parametrize("ends", ["DELETE", "its time to live"])
    async def test_a_copy_goes_with_its_task(
        self, aclient: AsyncClient, shadowed: Redis, worker: FakeWorker, ends: str
    ) -> None:
        task = await aclient.submit(model="tiny", prompt=[1])
        await Shadows(aclient, unstarted_s=PATIENT_S).sweep()
        (copy,) = copies(shadowed)
        FakeWorker(shadowed, "w").claim(copy)
        if ends == "DELETE":
            await task.delete()
            assert not copies(shadowed)
            assert not shadowed.exists(keys.SHADOW_COPIES)
            assert (
                run(shadowed, protocol.admit(copy, "n", _now(shadowed), {"queue": "q", "shadow_of": task.id}))
                == b"erased"
            )
        else:
            worker.serve(task.id)
            shadowed.delete(keys.task(task.id))
            await Shadows(aclient, unstarted_s=PATIENT_S).sweep()
            assert (copies(shadowed), drops(shadowed)) == ([], {"task_gone": 1})

    async def test_a_task_of_a_callers_with_the_id_of_a_copy_stays(
        self, aclient: AsyncClient, shadowed: Redis, worker: FakeWorker
    ) -> None:
        await aclient.submit(model="tiny", prompt=[1], task_id="shadow:t")
        task = await aclient.submit(model="tiny", prompt=[1], task_id="t")
        await Shadows(aclient, unstarted_s=PATIENT_S).sweep()
        await task.delete()
        assert shadowed.exists(keys.task("shadow:t"))


def _now(store: Redis) -> int:
    return int(store.time()[0]) * 1000


class Killed(BaseException):
    """The sweeper's process is gone."""


class Mortal(AsyncClient):
    """A client whose process dies at its `calls`-th call to a server, before or after it."""

    calls, after = -1, False

    async def _perform(self, step: Step) -> Any:
        self.calls -= 1
        if self.calls == 0 and not self.after:
            raise Killed
        answer = await super()._perform(step)
        if self.calls == 0:
            raise Killed
        return answer


def _lives() -> Iterator[tuple[int, bool]]:
    for calls in range(1, 40):
        yield calls, False
        yield calls, True


@pytest.mark.parametrize("phase", ["copies", "compares"])
async def test_a_sweeper_may_die_between_any_two_calls(
    aclient: AsyncClient, valkey_url: str, shadowed: Redis, worker: FakeWorker, phase: str
) -> None:
    """Every task has one copy or none, every copy one row or none, and nothing of it is left."""
    died = 0
    for calls, after in _lives():
        task = await aclient.submit(model="tiny", prompt=[1])
        if phase == "compares":
            await Shadows(aclient, unstarted_s=PATIENT_S).sweep()
            (copy,) = copies(shadowed)
            FakeWorker(shadowed, "w").serve(copy)
        worker.serve(task.id)
        async with Mortal(valkey_url, patience=0.2) as client:
            client.calls, client.after = calls, after
            try:
                await Shadows(client, unstarted_s=PATIENT_S).sweep()
            except Killed:
                died += 1
            lasted = client.calls > 0
        assert len(copies(shadowed)) <= 1
        await send_unsent(aclient, age_ms=0)
        await Shadows(aclient, unstarted_s=PATIENT_S).sweep()
        for copy in copies(shadowed):
            FakeWorker(shadowed, "w").serve(copy)
        await Shadows(aclient, unstarted_s=PATIENT_S).sweep()
        assert len([row for row in rows(shadowed) if row.task == task.id]) <= 1
        assert not copies(shadowed)
        assert not shadowed.exists(keys.SHADOW_COPIES, keys.SHADOW_SAMPLES)
        if lasted:
            break
    else:
        pytest.fail("it never came to its end")
    assert died > 10
