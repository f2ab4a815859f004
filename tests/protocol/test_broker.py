"""The scripts do what the broker in memory does: every answer, and every list, hash and dead letter after it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from redis import Redis

from producers.broker.memory.broker import MemoryConsumer
from producers.broker.memory.message import task_id_of
from producers.broker.memory.server import Delayed, fetch
from producers.broker.redis import calls as broker
from producers.broker.redis import keys as broker_keys
from producers.broker.values import Credit
from producers.contract import keys
from producers.contract import leases as lease_protocol
from tests.histories import examples
from tests.protocol.broker import (
    AGE,
    AGEING_MS,
    CAPACITY,
    INCS,
    LIMIT,
    LISTS,
    PLAIN_TOKENS,
    QUEUES,
    RULES,
    SORT_LIMIT,
    BrokerPair,
)
from tests.protocol.broker_histories import run_histories
from tests.protocol.messages import MARKS, SEQS, TOKENS, good, messages
from tests.protocol.server import Mutant, run_machine

ages = st.sampled_from([-1, 0, 1, 3, 4])
LAST = broker.lists(QUEUES)[-1][0]
STEADY = good("a", keys.TASK_NAME, SEQS[0][0], TOKENS[0][0], True)
batches = st.lists(messages, min_size=1, max_size=6)
incs = st.sampled_from(INCS)
rarely = st.sampled_from([False, False, True])
marks = st.sampled_from(MARKS)
#: Room per tier, as a worker has it: a lower tier has no more than a higher one.
credit = st.lists(st.sampled_from([8, 8, 8, 4, 2, 1, 0, -1]), min_size=4, max_size=4).map(
    lambda c: sorted(c, reverse=True)
)
#: Mostly the same few lists, so that something stands behind their heads.
names = st.sampled_from([*sorted(LISTS), *[n for n in sorted(LISTS) if n.startswith("penstock:m@1")] * 3])

#: How a history begins.
BEGIN: dict[str, Any] = {
    "name": names,
    "batch": batches,
    "fetched": st.integers(1, 4),
    "tight": st.sampled_from([[2, 2, 2, 2], [4, 4, 3, 0], [8, 8, 8, 0]]),
    "age": ages,
    "dies": st.booleans(),
    "delay": st.booleans(),
}


def holding(machine: BrokerMachine) -> bool:
    return any(machine.model.inflight.values())


class BrokerMachine(BrokerPair):
    #: Whether the scripts of all processes know what workers hold.
    all_place = True

    @initialize(**BEGIN)
    def begin(
        self, name: str, batch: list[bytes], fetched: int, tight: list[int], age: int, dies: bool, delay: bool
    ) -> None:
        """A few lists with something in them, and some of it on its way."""
        self.open()
        self.send(name, batch)
        self.send("penstock:m@1", [STEADY, STEADY])
        self.send(LAST, [STEADY])
        self.fetch_more(INCS[0], fetched)
        if LAST in self.model.unserved:
            self.a_head_waits(sorted(self.model.unserved).index(LAST), age)
        self.fetch(INCS[0], 2, 2, tight, [8] * 4)
        if dies:
            self.dies(INCS[0])
            self.fetch_more(INCS[0], 2)
            self.ack(INCS[0], 0, False, "", 0, False)
        else:
            self.back(INCS[0], 0, False, delay)

    def open(self) -> None:
        """Two incarnations, and nothing else."""
        super().open()
        for inc, queue in zip(INCS, QUEUES, strict=True):
            self.lease(inc, True, queue)

    def reads(self, inc: str) -> list[str]:
        """The queues that a worker takes from."""
        return QUEUES

    # ---- the scripts -----------------------------------------------------------------------------------------

    @rule(name=names, batch=batches)
    def send(self, name: str, batch: list[bytes]) -> None:
        for message in batch:
            self.server.redis.lpush(name, message)  # as kombu does
            self.model.push(name, message)

    @rule(inc=incs, count=st.integers(0, 6), repeat=st.integers(0, 3), seqs=credit, tokens=credit)
    def fetch(self, inc: str, count: int, repeat: int, seqs: list[int], tokens: list[int]) -> None:
        known = self.known[inc][len(self.known[inc]) - repeat :] if repeat else []
        uuids = [*known, *(f"u{self.names + k}" for k in range(count))]
        self.names += count
        self.known[inc] += uuids[len(known) :]
        tokens = [n * 125 for n in tokens]

        queues, release = self.reads(inc), self.acts(inc)
        said = release.of(broker)
        room = Credit((seqs[0], seqs[1], seqs[2], seqs[3]), (tokens[0], tokens[1], tokens[2], tokens[3]))

        def step() -> None:
            call = said.fetch(
                inc,
                queues,
                uuids,
                room,
                capacity=CAPACITY,
                plain_tokens=PLAIN_TOKENS,
                ageing_ms=AGEING_MS,
                max_redeliveries=LIMIT,
                sort_limit=SORT_LIMIT,
                **({"places": True, "left_ms": RULES.left_ms} if release.places else {}),
            )
            answer = self.server.run(call)
            fetched = said.read_fetch(answer, said.places(queues))
            expected = fetch(self.model, inc, queues, uuids, room, RULES, SORT_LIMIT, places=release.places)
            assert fetched == (None if expected is None else expected[0])
            if release.places and expected is not None:
                assert (broker.read_look_again(answer) is None) is (expected[1] is None)

        self.do(step)

    @rule(inc=incs, count=st.integers(1, 6))
    @precondition(lambda self: any(self.model.lists.values()) or any(t.queues for t in self.model.turns.values()))
    def fetch_more(self, inc: str, count: int) -> None:
        """What a worker with room does."""
        self.fetch(inc, count, 0, [8, 8, 8, 8], [8, 8, 8, 8])

    @rule(inc=incs, enter=st.lists(marks, max_size=3), drop=st.sets(marks, max_size=1), anew=rarely)
    @precondition(lambda self: self.all_place)
    def hold(self, inc: str, enter: list[str], drop: set[str], anew: bool) -> None:
        """Its cache has these prefixes from now on."""
        call = broker.holds(inc, enter, sorted(drop), anew=anew)
        self.do(lambda: self._agree(call, lambda: self.model.hold(inc, enter, sorted(drop), anew=anew)))

    @rule(pick=st.integers(0, 20), age=ages)
    @precondition(lambda self: any(turns.left for turns in self.model.turns.values()))
    def was_left_for(self, pick: int, age: int) -> None:
        """For so many times as long as it may be left, and a half; the clock may have been set back meanwhile."""
        left = [(name, number) for name, turns in self.model.turns.items() for number in sorted(turns.left)]
        name, number = left[pick % len(left)]
        ms = age * AGEING_MS + AGEING_MS // 2
        self.server.redis.eval(AGE, 1, broker_keys.sorted_of(name), number, self.server.now() - ms)
        turns = self.model.turns[name]
        turns.left[number] = replace(turns.left[number], since=self.model.clock() - ms)

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
        held = self.model.inflight[inc].get(uuid)
        task = held.id if held else "a"
        call = self.acts(inc).of(broker).ack(inc, uuid, reason, used, task if settled else "")

        def expected() -> int:
            """The broker in memory holds no records."""
            lost = settled and uuid in self.model.inflight[inc] and self.records.get(task) is False
            return -1 if lost else self.model.ack(inc, uuid, reason, used)

        self.do(lambda: self._agree(call, expected))

    @rule(task=st.sampled_from("abcde"), settled=st.booleans())
    @precondition(holding)
    def a_record_is_here(self, task: str, settled: bool) -> None:
        """One server is both broker and store."""
        self.server.redis.hset(keys.task(task), "status", "completed" if settled else "in_progress")
        if settled:
            self.server.redis.hset(keys.task(task), "settled", 1)
        else:
            self.server.redis.hdel(keys.task(task), "settled")
        self.records[task] = settled

    @rule(
        inc=incs,
        pick=st.integers(0, 9),
        other=st.sampled_from([False, False, False, True]),
        delay=rarely,
        to=st.sampled_from(["", "", *QUEUES]),
    )
    @precondition(holding)
    def back(self, inc: str, pick: int, other: bool, delay: bool, to: str = "") -> None:
        uuid = self._delivery(inc, pick, other)
        call = self.acts(inc).of(broker).back(inc, QUEUES[0], uuid, AGEING_MS if delay else 0, to)
        delay_ms = AGEING_MS if delay else 0
        self.do(lambda: self._agree(call, lambda: self.model.back(inc, QUEUES[0], uuid, delay_ms, to)))

    @rule(inc=incs)
    @precondition(lambda self: not all(map(self.model.lives, INCS)))
    def reap(self, inc: str) -> None:
        call = self.acts().of(broker).reap(inc)
        self.do(lambda: self._agree(call, lambda: self.model.reap(inc)))

    @rule(
        inc=incs,
        mute=rarely,
        heard=rarely,
        looker_heard=rarely.map(lambda yes: not yes),
        joined=st.sampled_from(["long ago", "before", "after"]),
    )
    @precondition(holding)
    def reap_early(self, inc: str, mute: bool, heard: bool, looker_heard: bool, joined: str) -> None:
        """Where its lease says that it listens (it was heard then), and nobody does; as far as the looker is heard, and
        if the lease was written since that joined."""
        looker = next(other for other in INCS if other != inc)
        looks, leases = self.acts(looker), self.acts(inc)
        joined = joined if looks.counts_joins else "long ago"
        self.server.hear(inc, not mute)
        self.server.hear(looker, True)
        since = self.server.run(looks.of(lease_protocol).join(looker)) if joined == "before" else 0
        self.lease(inc, False, "")
        since = self.server.run(looks.of(lease_protocol).join(looker)) if joined == "after" else since
        self.server.hear(inc, heard)
        self.server.hear(looker, looker_heard)
        told = joined == "long ago" or (joined == "before" and leases.counts_joins)
        silent = not mute and not heard and looker_heard and told

        def expected() -> int:
            model = self.model
            if not (silent and model.lives(inc)):
                return model.reap(inc)
            held = model.inflight[inc]
            self.raised.setdefault(inc, Counter()).update(d.id for d in held.values())
            plain = [uuid for uuid, d in sorted(held.items(), key=lambda one: -one[1].order) if not d.seqs]
            for uuid in plain:
                model.reaped[held[uuid].id] = model.reaped.get(held[uuid].id, 0) + 1
                model.back(inc, QUEUES[0], uuid, AGEING_MS)
            model.leases.pop(inc)
            return model.reap(inc) + len(plain)

        call = looks.of(broker).reap(inc, looker, QUEUES[0], **({"since": since} if since else {}))
        self.do(lambda: self._agree(call, expected))

    @rule(task=st.sampled_from("abc"))
    @precondition(lambda self: self.model.reaped)
    def survived(self, task: str) -> None:
        """It got on: FETCH finds no suspect in it."""
        self.server.redis.hdel(broker_keys.REAPED, task)
        self.model.reaped.pop(task, None)

    @rule(inc=incs)
    @precondition(lambda self: self.raised)
    def retract(self, inc: str) -> None:
        """Its worker lives: what was counted is taken back, once."""
        said = self.acts(inc).of(lease_protocol)

        def step() -> None:
            found = said.read_retract(self.server.run(said.retract(inc, broker_keys.REAPED)))
            raised = self.raised.get(inc)
            assert (None if found is None else set(found)) == (None if raised is None else set(raised))
            for task, count in (raised or {}).items():
                left = self.model.reaped.pop(task, 0) - count
                self.model.reaped |= {task: left} if left > 0 else {}
                self.raised[inc][task] = 0

        self.do(step)

    @rule(inc=incs)
    @precondition(holding)
    def dies(self, inc: str) -> None:
        """What happens to every worker that is killed: its lease lapses, it is reaped; its name is taken up again."""
        queue = self.model.listed.get(inc, QUEUES[0])
        self.lapses(inc)
        call = self.acts().of(broker).reap(inc)
        self.do(lambda: self._agree(call, lambda: self.model.reap(inc)))
        self.lease(inc, True, queue)

    @rule(count=st.sampled_from([1, 100]))
    @precondition(holding)
    def dies_in_the_midst(self, count: int) -> None:
        """What it gave back first is sorted; then what came after that is at the front of the list."""
        inc, held = max(self.model.inflight.items(), key=lambda one: len(one[1]))
        names = [d.list for d in held.values()]
        uuid, first = min(held.items(), key=lambda one: (-names.count(one[1].list), one[1].number))
        if not self.model.lives(inc):
            self.lease(inc, True, QUEUES[0])
        call = self.acts(inc).of(broker).back(inc, QUEUES[0], uuid)
        self._agree(call, lambda: self.model.back(inc, QUEUES[0], uuid, 0))
        self.fetch(inc, 0, 0, [0] * 4, [0] * 4)
        self.dies(inc)
        queue = next(queue for queue in self.queues if first.list in dict(broker.lists([queue])))
        self.recall(queue, set(), count)

    @rule(queue=st.sampled_from(QUEUES), takers=st.sets(st.sampled_from(QUEUES)), count=st.sampled_from([1, 2, 100]))
    def recall(self, queue: str, takers: set[str], count: int) -> None:
        """What a queue's last worker does at its end, and a sweeper where all were killed."""
        call = self.acts().of(broker).recall(queue, sorted(takers), count)
        self.do(lambda: self._agree(call, lambda: self.model.recall(queue, sorted(takers), count)))

    @rule(name=names, pick=st.integers(0, 9), reason=st.sampled_from(["nobody", "no 'é'"]), there=st.booleans())
    @precondition(lambda self: any(self.model.lists.values()))
    def bury(self, name: str, pick: int, reason: str, there: bool) -> None:
        """What waits in a list becomes a dead letter; what a worker has sorted meanwhile does not."""
        waiting = [name for name in sorted(self.lists) if self.model.lists[name]]
        name = waiting[pick % len(waiting)] if there else name
        raw = self.model.lists[name][pick % len(self.model.lists[name])] if there else STEADY
        task_id = task_id_of(raw) or "a"
        call = broker.bury(name, raw, task_id, reason)
        self.do(lambda: self._agree(call, lambda: self.model.remove(name, raw, task_id, reason)))

    @rule(name=names, to=names, pick=st.integers(0, 9), there=st.booleans())
    @precondition(lambda self: any(self.model.lists.values()))
    def move(self, name: str, to: str, pick: int, there: bool) -> None:
        """What waits in a list goes to the front of another."""
        waiting = [name for name in sorted(self.lists) if self.model.lists[name]]
        name = waiting[pick % len(waiting)] if there else name
        raw = self.model.lists[name][pick % len(self.model.lists[name])] if there else STEADY
        call = broker.move(name, to, raw)
        self.do(lambda: self._agree(call, lambda: self.model.move(name, to, raw)))

    @rule(inc=incs, pick=st.integers(0, 9), known=st.booleans())
    @precondition(holding)
    def strays(self, inc: str, pick: int, known: bool) -> None:
        """With all that it holds in its books; or one forgotten, as a failover brings it back."""
        held = {*self.known[inc]} - ({self._delivery(inc, pick, False)} if not known else set())

        said = self.acts(inc).of(broker)

        def step() -> None:
            found = said.read_strays(self.server.run(said.strays(inc, sorted(held))))
            assert found == MemoryConsumer(self.model, QUEUES).strays(inc, sorted(held))

        self.do(step)

    @rule(back=st.booleans())
    @precondition(lambda self: not any(self.model.delayed.values()))
    def adopt(self, back: bool) -> None:
        source, target = reversed(QUEUES) if back else QUEUES
        call = self.acts().of(broker).adopt(source, target)
        self.do(lambda: self._agree(call, lambda: self.model.adopt(source, target)))

    def desert(self) -> None:
        """The pool's only worker dies, and what waits in the pool's own queue is adopted."""
        self.lapses(INCS[0])
        self.adopt(False)

    def _agree(self, call: Any, expected: Callable[[], int]) -> None:
        assert self.server.run(call) == expected()

    # ---- what happens around them ----------------------------------------------------------------------------

    @rule(inc=incs, take=rarely, queue=st.sampled_from(QUEUES))
    def lease(self, inc: str, take: bool, queue: str) -> None:
        """Taken, or renewed."""
        release = self.acts(inc)
        about = json.dumps({"worker": "w"} | ({"level": release.level} if release.level else {}))
        call = release.of(broker).lease(inc, about, AGEING_MS, take=take, queue=queue)
        self.do(lambda: self._agree(call, lambda: self.model.lease(inc, AGEING_MS, take=take, queue=queue)))
        assert self.server.redis.pttl(keys.lease(inc)) > 0 or not self.model.lives(inc)

    @rule(inc=incs)
    def lapses(self, inc: str) -> None:
        self.server.lease(inc, False)
        self.model.leases.pop(inc, None)

    @rule(inc=incs, queue=st.sampled_from(QUEUES))
    @precondition(lambda self: not all(map(self.model.lives, INCS)))
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
    @precondition(lambda self: self.model.unserved)
    def a_head_waits(self, pick: int, age: int) -> None:
        """For `age` periods and a half; the clock may have been set back meanwhile."""
        name = sorted(self.model.unserved)[pick % len(self.model.unserved)]
        self.server.redis.hset(broker_keys.UNSERVED, name, self.server.now() - age * AGEING_MS - AGEING_MS // 2)
        self.model.unserved[name] = self.model.clock() - age * AGEING_MS - AGEING_MS // 2

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: self._held_back())
    def a_delay_is_over(self, pick: int) -> None:
        waiting = self._held_back()
        late = waiting[pick % len(waiting)]
        self.names += 1
        held = self.model.delayed[QUEUES[0]]
        held[held.index(late)] = replace(late, due=self.names)
        _, delayed, _ = self.dump(self.server.redis)
        packed = next(e[3] for e in delayed if e[0] == late.uuid.encode())
        self.server.redis.zadd(broker_keys.delayed(QUEUES[0]), {packed: self.names})

    def _held_back(self) -> list[Delayed]:
        return [d for d in self.model.delayed[QUEUES[0]] if d.due > self.model.clock()]


def check_broker(redis: Redis, mutant: Mutant | None = None, **options: Any) -> None:
    """Run the machine; raises AssertionError (or what the server says) where scripts and reference part."""
    machine = type("Machine", (BrokerMachine,), {"redis": redis, "mutant": mutant})
    run_histories(machine)
    run_machine(machine, **options)


@pytest.mark.usefixtures("valkey_url")
def test_scripts_and_the_broker_in_memory_agree(valkey: Redis) -> None:
    check_broker(valkey, examples=examples(25, 60), steps=40)
