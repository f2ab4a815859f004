"""The broker's real scripts do what the reference says: every answer, and every list, hash and dead letter after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from redis import Redis

from producers.broker import redis as broker
from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.protocol.broker_histories import run_histories
from tests.protocol.broker_reference import Broker, Sent
from tests.protocol.messages import SEQS, TOKENS, good, messages
from tests.protocol.server import Mutant, Server

QUEUES = ["penstock:m", "penstock:m@1"]
INCS = ("i1", "i2")
LISTS = dict(broker.lists(QUEUES))
CAPACITY = (8, 1000)
PLAIN_TOKENS = 300
BITE = 3
LIMIT = 2
#: So long that a test's own time is nothing beside it.
AGEING_MS = 10**8

ages = st.sampled_from([-1, 0, 1, 3, 4])
LAST = broker.lists(QUEUES)[-1][0]
STEADY = good("a", keys.TASK_NAME, SEQS[0], TOKENS[0], True)
batches = st.lists(messages, min_size=1, max_size=6)
incs = st.sampled_from(INCS)
rarely = st.sampled_from([False, False, True])
#: Room per tier, as a worker has it: a lower tier has no more than a higher one.
credit = st.lists(st.sampled_from([8, 8, 8, 4, 2, 1, 0, -1]), min_size=4, max_size=4).map(
    lambda c: sorted(c, reverse=True)
)
#: Mostly the same few lists, so that something stands behind their heads.
names = st.sampled_from([*sorted(LISTS), *[n for n in sorted(LISTS) if n.startswith("penstock:m@1")] * 3])

#: Unpacks what only Lua can: deliveries in flight (inc, uuid, order, list, message, tier, size, number, tenant, charge,
#: weight), what is held back, and what was sorted (list, number, tenant, message).
DUMP = """
local out = {{}, {}, {}}
for i, inc in ipairs(ARGV) do
  local all = redis.call('HGETALL', KEYS[1] .. inc)
  for k = 1, #all, 2 do
    local e = cmsgpack.unpack(all[k + 1])
    table.insert(out[1], { inc, all[k], e[1], e[2], e[4], e[5], e[6], e[7], e[8], e[9], e[10], tostring(e[11]) })
  end
end
for _, packed in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local e = cmsgpack.unpack(packed)
  table.insert(out[2], { e[3], e[1], e[2], packed })
end
for k = 3, #KEYS do
  for _, packed in ipairs(redis.call('ZRANGE', KEYS[k], 0, -1)) do
    local e = cmsgpack.unpack(packed)
    table.insert(out[3], { KEYS[k], e[1], e[4], e[2] })
  end
end
return out
"""


def holding(machine: BrokerMachine) -> bool:
    return any(machine.model.inflight.values())


class BrokerMachine(RuleBasedStateMachine):
    redis: Redis
    mutant: Mutant | None = None

    @initialize(
        name=names,
        batch=batches,
        fetched=st.integers(1, 4),
        tight=st.sampled_from([[2, 2, 2, 2], [4, 4, 3, 0], [8, 8, 8, 0]]),
        age=ages,
        dies=st.booleans(),
        delay=st.booleans(),
    )
    def begin(
        self, name: str, batch: list[Sent], fetched: int, tight: list[int], age: int, dies: bool, delay: bool
    ) -> None:
        """A few lists with something in them, and some of it on its way."""
        self.open()
        self.send(name, batch)
        self.send("penstock:m@1", [STEADY, STEADY])
        self.send(LAST, [STEADY])
        self.fetch_more(INCS[0], fetched)
        if LAST in self.model.ages:
            self.a_head_waits(sorted(self.model.ages).index(LAST), age)
        self.fetch(INCS[0], 2, 2, tight, [8] * 4)
        if dies:
            self.dies(INCS[0])
            self.fetch_more(INCS[0], 2)
            self.ack(INCS[0], 0, False, "", 0, False)
        else:
            self.back(INCS[0], 0, False, delay)

    def open(self) -> None:
        """Two incarnations, and nothing else."""
        self.server = Server(self.redis, self.mutant)
        self.model = Broker(LISTS, CAPACITY, PLAIN_TOKENS, LIMIT, BITE)
        self.last: Callable[[], None] = lambda: None
        self.names = 0
        self.known: dict[str, list[str]] = {inc: [] for inc in INCS}
        for inc, queue in zip(INCS, QUEUES, strict=True):
            self.lease(inc, True, queue)

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.server.close()

    def do(self, step: Callable[[], None]) -> None:
        self.last = step
        step()
        self.compare()

    def compare(self) -> None:
        model = self.model
        expected: dict[str, list[tuple[bytes, float]]] = {}
        for name, turns in model.turns.items():
            for key, served in ((broker_keys.turns(name), turns.served), (broker_keys.rested(name), turns.rested)):
                expected[key] = [(tenant.encode(), n) for tenant, n in served.items()]
            for tenant, waiting in turns.queues.items():
                expected[broker_keys.turn(name, tenant)] = [(b"%d" % number, number) for number in waiting]
        with self.server.redis.pipeline(transaction=False) as pipe:  # one round trip: this is most of a step's time
            self.dump(pipe)
            for name in LISTS:
                pipe.lrange(name, 0, -1)
            for key in expected:
                pipe.zrange(key, 0, -1, withscores=True)
            pipe.keys(broker_keys.turn("", "")[:-1] + "*")
            for key in (broker_keys.INCARNATIONS, broker_keys.RETURNED, broker_keys.REAPED, broker_keys.UNSERVED):
                pipe.hgetall(key)
            pipe.exists(*map(keys.lease, [*INCS, *sorted(model.live)]))
            pipe.lrange(broker_keys.DEAD, 0, -1)
            pipe.time()
            (inflight, delayed, placed), *rest = pipe.execute()
        lists, rest = rest[: len(LISTS)], rest[len(LISTS) :]
        found, (left, listed, returned, reaped, unserved, lives, letters, time) = rest[:-8], rest[-8:]
        assert lists == [[m.raw for m in model.lists[name]] for name in LISTS]
        assert sorted(map(tuple, inflight)) == sorted(
            (
                *(inc.encode(), d.uuid.encode(), d.order, d.list.encode(), d.message.raw, d.rank, d.seqs, d.tokens),
                *(d.number, d.message.tenant.encode(), d.charge, b"%g" % d.weight),
            )
            for inc, held in model.inflight.items()
            for d in held.values()
        )
        assert sorted(tuple(e[:3]) for e in delayed) == sorted(
            (d.uuid.encode(), d.list.encode(), d.message.raw) for d in model.delayed
        )
        assert sorted(map(tuple, placed)) == sorted(
            (broker_keys.sorted_of(name).encode(), number, sent.tenant.encode(), sent.raw)
            for name, turns in model.turns.items()
            for number, sent in turns.messages().items()
        )
        assert [sorted(one) for one in found] == [sorted(one) for one in expected.values()]
        assert {name.decode() for name in left} <= expected.keys(), "an empty one is left"
        assert returned == {t.encode(): b"%d" % n for t, n in model.returned.items()}
        assert listed == {inc.encode(): queue.encode() for inc, queue in model.listed.items()}
        assert lives == 2 * len(model.live)  # of all, and of those: the same ones
        dead = [json.loads(letter.decode("utf-8", "surrogateescape")) for letter in letters]
        assert [(d["reason"], d["list"], d["message"].encode("utf-8", "surrogateescape")) for d in dead] == model.dead
        assert reaped == {t.encode(): b"%d" % n for t, n in model.reaped.items()}
        now = time[0] * 1000 + time[1] // 1000
        ages = {name.decode(): (now - int(since)) // AGEING_MS for name, since in unserved.items()}
        assert ages == model.ages

    def dump(self, redis: Redis) -> Any:
        names = [broker_keys.inflight(""), broker_keys.delayed(QUEUES[0]), *map(broker_keys.sorted_of, LISTS)]
        return redis.eval(DUMP, len(names), *names, *INCS)

    # ---- the scripts -----------------------------------------------------------------------------------------

    @rule(name=names, batch=batches)
    def send(self, name: str, batch: list[Sent]) -> None:
        for message in batch:
            self.server.redis.lpush(name, message.raw)  # as kombu does
            self.model.lists[name].insert(0, message)

    @rule(inc=incs, count=st.integers(0, 6), repeat=st.integers(0, 3), seqs=credit, tokens=credit)
    def fetch(self, inc: str, count: int, repeat: int, seqs: list[int], tokens: list[int]) -> None:
        known = self.known[inc][len(self.known[inc]) - repeat :] if repeat else []
        uuids = [*known, *(f"u{self.names + k}" for k in range(count))]
        self.names += count
        self.known[inc] += uuids[len(known) :]
        tokens = [n * 125 for n in tokens]

        def step() -> None:
            call = broker.fetch(
                inc,
                QUEUES,
                uuids,
                broker.Credit((seqs[0], seqs[1], seqs[2], seqs[3]), (tokens[0], tokens[1], tokens[2], tokens[3])),
                capacity=CAPACITY,
                plain_tokens=PLAIN_TOKENS,
                ageing_ms=AGEING_MS,
                max_redeliveries=LIMIT,
                bite=BITE,
            )
            answer = self.server.run(call)
            fetched = broker.read_fetch(answer)
            expected = self.model.fetch(inc, uuids, seqs, tokens)
            if expected is None:
                assert fetched is None
                return
            assert [tuple(answer[i : i + 4]) for i in range(0, len(answer), 4)] == [
                (uuid.encode(), name.encode(), raw, said.encode()) for uuid, name, raw, said in expected
            ]
            assert fetched is not None
            assert [f.condemned for f in fetched] == [said == "condemned" for *_, said in expected]
            assert [f.buried for f in fetched] == ["" if uuid else said for uuid, *_, said in expected]

        self.do(step)

    @rule(inc=incs, count=st.integers(1, 6))
    @precondition(lambda self: any(self.model.lists.values()) or any(t.queues for t in self.model.turns.values()))
    def fetch_more(self, inc: str, count: int) -> None:
        """What a worker with room does."""
        self.fetch(inc, count, 0, [8, 8, 8, 8], [8, 8, 8, 8])

    def _delivery(self, inc: str, pick: int, other: bool) -> str:
        """One of its deliveries, or another's."""
        held = [u for i, d in self.model.inflight.items() if (i != inc) == other for u in d]
        return held[pick % len(held)] if held else f"u{pick}"

    @rule(
        inc=incs,
        pick=st.integers(0, 9),
        other=st.sampled_from([False, False, False, True]),
        reason=st.sampled_from(["", "", "no 'é'"]),
        used=st.sampled_from([0, 10, 150, 5000]),
        settled=st.booleans(),
    )
    @precondition(holding)
    def ack(self, inc: str, pick: int, other: bool, reason: str, used: int, settled: bool) -> None:
        uuid = self._delivery(inc, pick, other)
        held = self.model.inflight.get(inc, {}).get(uuid)
        task = held.message.id if held else "a"
        call = broker.ack(inc, uuid, reason, used, task if settled else "")
        self.do(lambda: self._agree(call, lambda: self.model.ack(inc, uuid, reason, used, settled)))

    @rule(task=st.sampled_from("abcde"), settled=st.booleans())
    @precondition(holding)
    def a_record_is_here(self, task: str, settled: bool) -> None:
        """Where broker and store are one server."""
        self.server.redis.hset(keys.task(task), "status", "completed" if settled else "in_progress")
        if settled:
            self.server.redis.hset(keys.task(task), "settled", 1)
        else:
            self.server.redis.hdel(keys.task(task), "settled")
        self.model.records[task] = settled

    @rule(inc=incs, pick=st.integers(0, 9), other=st.sampled_from([False, False, False, True]), delay=rarely)
    @precondition(holding)
    def back(self, inc: str, pick: int, other: bool, delay: bool) -> None:
        uuid = self._delivery(inc, pick, other)
        call = broker.back(inc, QUEUES[0], uuid, AGEING_MS if delay else 0)
        self.do(lambda: self._agree(call, lambda: self.model.back(inc, uuid, delay)))

    @rule(inc=incs)
    @precondition(lambda self: len(self.model.live) < len(INCS))
    def reap(self, inc: str) -> None:
        self.do(lambda: self._agree(broker.reap(inc), lambda: self.model.reap(inc)))

    @rule(inc=incs)
    @precondition(holding)
    def dies(self, inc: str) -> None:
        """What happens to every worker that is killed: its lease lapses, it is reaped; its name is taken up again."""
        queue = self.model.listed.get(inc)
        self.lapses(inc)
        self.do(lambda: self._agree(broker.reap(inc), lambda: self.model.reap(inc)))
        self.lease(inc, True, queue)

    @rule(count=st.sampled_from([1, 100]))
    @precondition(holding)
    def dies_in_the_midst(self, count: int) -> None:
        """What it gave back first is sorted; then what came after that is at the front of the list."""
        inc, held = max(self.model.inflight.items(), key=lambda one: len(one[1]))
        names = [d.list for d in held.values()]
        first = min(held.values(), key=lambda d: (-names.count(d.list), d.number))
        if inc not in self.model.live:
            self.lease(inc, True, QUEUES[0])
        self._agree(broker.back(inc, QUEUES[0], first.uuid), lambda: self.model.back(inc, first.uuid, False))
        self.fetch(inc, 0, 0, [0] * 4, [0] * 4)
        self.dies(inc)
        queue = next(queue for queue in QUEUES if first.list in dict(broker.lists([queue])))
        self.recall(queue, set(), count)

    @rule(queue=st.sampled_from(QUEUES), takers=st.sets(st.sampled_from(QUEUES)), count=st.sampled_from([1, 2, 100]))
    def recall(self, queue: str, takers: set[str], count: int) -> None:
        """What a queue's last worker does at its end, and a sweeper where all were killed."""
        lists = [name for name, _ in broker.lists([queue])]
        call = broker.recall(queue, sorted(takers), count)
        self.do(lambda: self._agree(call, lambda: self.model.recall(lists, sorted(takers), count)))

    @rule(inc=incs, pick=st.integers(0, 9), known=st.booleans())
    @precondition(holding)
    def strays(self, inc: str, pick: int, known: bool) -> None:
        """With all that it holds in its books; or one forgotten, as a failover brings it back."""
        held = {*self.known[inc]} - ({self._delivery(inc, pick, False)} if not known else set())

        def step() -> None:
            found = broker.read_strays(self.server.run(broker.strays(inc, sorted(held))))
            assert found == self.model.strays(inc, held)

        self.do(step)

    @rule(back=st.booleans())
    @precondition(lambda self: not self.model.delayed)
    def adopt(self, back: bool) -> None:
        source, target = reversed(QUEUES) if back else QUEUES
        lists = [[name for name, _ in broker.lists([queue])] for queue in (source, target)]
        self.do(lambda: self._agree(broker.adopt(source, target), lambda: self.model.adopt(*lists)))

    def _agree(self, call: Any, expected: Callable[[], int]) -> None:
        assert self.server.run(call) == expected()

    # ---- what happens around them ----------------------------------------------------------------------------

    @rule()
    def again(self) -> None:
        """The reply was lost: the very same call once more."""
        self.do(self.last)

    @rule(inc=incs, take=rarely, queue=st.sampled_from([*QUEUES, None]))
    def lease(self, inc: str, take: bool, queue: str | None) -> None:
        """Taken, or renewed; on the store there is no list."""
        call = broker.lease(inc, "{}", AGEING_MS, take=take, queue=queue)
        self.do(lambda: self._agree(call, lambda: self.model.lease(inc, take, queue)))
        assert self.server.redis.pttl(keys.lease(inc)) > 0 or inc not in self.model.live

    @rule(inc=incs)
    def lapses(self, inc: str) -> None:
        self.server.lease(inc, False)
        self.model.live.discard(inc)

    @rule(inc=incs, queue=st.sampled_from(QUEUES))
    @precondition(lambda self: len(self.model.live) < len(INCS))
    def begins(self, inc: str, queue: str) -> None:
        self.lease(inc, True, queue)

    @rule(ids=st.sets(st.sampled_from("abcde"), min_size=2, max_size=4))
    def have_come_back(self, ids: set[str]) -> None:
        """Once more, and they are condemned."""
        self.server.redis.hset(broker_keys.REAPED, mapping=dict.fromkeys(ids, LIMIT - 1))
        self.model.reaped |= dict.fromkeys(ids, LIMIT - 1)

    @rule(tenant=st.sampled_from(["", "t1", "t2"]), weight=st.sampled_from(["4", "0.5", "0", "nan", "much"]))
    def weigh(self, tenant: str, weight: str) -> None:
        """What is no sane weight is 1."""
        self.server.redis.hset(broker_keys.WEIGHTS, tenant, weight)
        self.model.weights[tenant] = {"4": 4.0, "0.5": 0.5}.get(weight, 1.0)

    @rule(pick=st.integers(0, 20), age=ages)
    @precondition(lambda self: self.model.ages)
    def a_head_waits(self, pick: int, age: int) -> None:
        """For `age` periods and a half; the clock may have been set back meanwhile."""
        name = sorted(self.model.ages)[pick % len(self.model.ages)]
        self.server.redis.hset(broker_keys.UNSERVED, name, self.server.now() - age * AGEING_MS - AGEING_MS // 2)
        self.model.ages[name] = age

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: any(d.due is None for d in self.model.delayed))
    def a_delay_is_over(self, pick: int) -> None:
        waiting = [d for d in self.model.delayed if d.due is None]
        late = waiting[pick % len(waiting)]
        self.names += 1
        late.due = self.names
        _, delayed, _ = self.dump(self.server.redis)
        packed = next(e[3] for e in delayed if e[0] == late.uuid.encode())
        self.server.redis.zadd(broker_keys.delayed(QUEUES[0]), {packed: late.due})


def check_broker(redis: Redis, mutant: Mutant | None = None, **options: Any) -> None:
    """Run the machine; raises AssertionError (or what the server says) where scripts and reference part."""
    machine = type("Machine", (BrokerMachine,), {"redis": redis, "mutant": mutant})
    run_histories(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(derandomize=True, database=None, deadline=None, phases=[Phase.generate], **options),
    )


@pytest.mark.usefixtures("valkey_url")
def test_scripts_and_reference_agree(valkey: Redis) -> None:
    check_broker(valkey, max_examples=60, stateful_step_count=40)
