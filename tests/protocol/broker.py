"""A broker on Redis beside the one in memory: calls go to both, and everything that is stored is compared."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from redis import Redis

from producers.broker.memory.server import Server as Memory
from producers.broker.redis import calls as broker
from producers.broker.redis import keys as broker_keys
from producers.broker.values import Rules
from producers.contract import keys
from tests.protocol.server import Calls, Mutant, Server

QUEUES = ["penstock:m", "penstock:m@1"]
INCS = ("i1", "i2")
LISTS = dict(broker.lists(QUEUES))
CAPACITY = (8, 1000)
PLAIN_TOKENS = 300
SORT_LIMIT = 3
LIMIT = 2
#: So long that a test's own time is nothing beside it.
AGEING_MS = 10**8
RULES = Rules(CAPACITY, PLAIN_TOKENS, AGEING_MS / 1000, LIMIT, AGEING_MS)

#: Unpacks what only Lua can: deliveries in flight (inc, uuid, order, list, message, tier, size, number, tenant, charge,
#: weight), what is held back, and what was sorted (list, number, tenant, message; as left: how many have overtaken it,
#: for whom, since when).
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
    table.insert(out[3], { KEYS[k], e[1], e[4], e[2], e[11] or 0, e[12] or '', tostring(e[10] or '') })
  end
end
return out
"""

#: Sets since when (ms) a sorted message is left. KEYS: sorted   ARGV: its number, since
AGE = """
local e = cmsgpack.unpack(redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], ARGV[1])[1])
e[10] = tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], ARGV[1], ARGV[1])
redis.call('ZADD', KEYS[1], ARGV[1], cmsgpack.pack(e))
"""


def letter_of(entry: bytes) -> tuple[str, str, str]:
    """All of it but its time."""
    said = json.loads(entry.decode("utf-8", "surrogateescape"))
    return said["reason"], said["list"], said["message"]


class BrokerPair(Calls):
    """`model` is what the broker should have."""

    redis: Redis
    mutant: Mutant | None = None
    #: All that there are.
    queues: tuple[str, ...] = tuple(QUEUES)

    def memory(self) -> Memory:
        return Memory(lambda queue: broker.lists([queue]))

    def open(self) -> None:
        self.server = Server(self.redis, self.mutant)
        self.lists = dict(broker.lists(self.queues))
        self.model = self.memory()
        #: Whether a task is settled, of those whose record is on this server, too.
        self.records: dict[str, bool] = {}
        self.names = 0
        self.known: dict[str, list[str]] = {inc: [] for inc in INCS}
        #: Incarnation that was reaped early -> task -> returns that were counted and not taken back.
        self.raised: dict[str, Counter[str]] = {}

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
            for name in self.lists:
                pipe.lrange(name, 0, -1)
            for key in expected:
                pipe.zrange(key, 0, -1, withscores=True)
            pipe.keys(broker_keys.turn("", "")[:-1] + "*")
            for key in (broker_keys.INCARNATIONS, broker_keys.RETURNED, broker_keys.REAPED, broker_keys.UNSERVED):
                pipe.hgetall(key)
            live = [inc for inc in INCS if model.lives(inc)]
            pipe.exists(*map(keys.lease, [*INCS, *live]))
            pipe.lrange(broker_keys.DEAD, 0, -1)
            pipe.time()
            pipe.hgetall(broker_keys.PREFIXES)
            for inc in INCS:
                pipe.hgetall(broker_keys.held(inc))
            (inflight, delayed, placed), *rest = pipe.execute()
        *rest, prefixes, held, also_held = rest
        lists, rest = rest[: len(self.lists)], rest[len(self.lists) :]
        found, (left, listed, returned, reaped, unserved, lives, letters, time) = rest[:-8], rest[-8:]
        assert lists == [model.lists[name] for name in self.lists]
        assert sorted(map(tuple, inflight)) == sorted(
            (
                *(inc.encode(), uuid.encode(), d.order, d.list.encode(), d.raw, d.rank, d.seqs, d.tokens),
                *(d.number, d.tenant.encode(), d.charge, b"%g" % d.weight),
            )
            for inc, held in model.inflight.items()
            for uuid, d in held.items()
        )
        assert sorted(tuple(e[:3]) for e in delayed) == sorted(
            (d.uuid.encode(), d.list.encode(), d.raw) for d in model.delayed[QUEUES[0]]
        )
        waiting = [
            (turns.left.get(number), name, number, sent)
            for name, turns in model.turns.items()
            for number, sent in turns.messages().items()
        ]
        assert sorted(tuple(e[:6]) for e in placed) == sorted(
            (broker_keys.sorted_of(name).encode(), number, sent.tenant.encode(), sent.raw)
            + ((0, b"") if its is None else (its.overtaken, its.to.encode()))
            for its, name, number, sent in waiting
        )
        assert [sorted(one) for one in found] == [sorted(one) for one in expected.values()]
        assert {name.decode() for name in left} <= expected.keys(), "an empty one is left"
        assert returned == {t.encode(): b"%d" % n for t, n in model.returned.items()}
        assert listed == {inc.encode(): queue.encode() for inc, queue in model.listed.items()}
        assert lives == 2 * len(live)  # of all, and of those: the same ones
        assert [letter_of(letter) for letter in letters] == [letter_of(letter) for letter in model.dead]
        assert reaped == {t.encode(): b"%d" % n for t, n in model.reaped.items()}
        now = time[0] * 1000 + time[1] // 1000
        ages = {name.decode(): (now - int(since)) // AGEING_MS for name, since in unserved.items()}
        assert {e[1]: (now - float(e[6])) // AGEING_MS for e in placed if e[6]} == {
            number: (model.clock() - its.since) // AGEING_MS
            for its, _, number, _ in waiting
            if its is not None and its.since is not None
        }
        # Entries of who has no lease may have been removed by others' HOLDS.
        entered = {mark.decode(): holder.decode() for mark, holder in prefixes.items()}
        assert entered.items() <= model.prefixes.items()
        assert {mark for mark, holder in model.prefixes.items() if model.lives(holder)} <= entered.keys()
        for inc, fields in zip(INCS, (held, also_held), strict=True):
            room = model.room.get(inc)
            said = {mark.encode(): b"1" for mark in model.held.get(inc, ())}
            if room is not None:
                said[b"room"] = " ".join(map(str, (*room.seqs, *room.tokens))).encode()
            assert fields == said
        assert ages == {name: (model.clock() - since) // AGEING_MS for name, since in model.unserved.items()}

    def dump(self, redis: Redis) -> Any:
        names = [broker_keys.inflight(""), broker_keys.delayed(QUEUES[0]), *map(broker_keys.sorted_of, self.lists)]
        return redis.eval(DUMP, len(names), *names, *INCS)
