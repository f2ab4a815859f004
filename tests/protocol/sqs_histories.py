"""Random histories of workers on SQS, through its real consumers, and what each message should be at after every call.

    send -> waiting ─ fetch ─▶ held by a worker ─ ack ─▶ over        with a reason: a dead letter
               ▲                    │
               └── back, REAP ──────┘    to: waits in another queue

SQS promises no order, so the model has none. At rest the books on the store and SQS's own counts equal the model.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from redis import Redis

from producers.broker.connect import connect_broker, connect_sender
from producers.broker.redis import keys as shared
from producers.broker.sqs import keys
from producers.broker.sqs.address import Address, lists, read, sqs_name
from producers.broker.sqs.consumer import SqsConsumer
from producers.broker.values import Ack, Back, Credit, Fetched, PutDown, Rules
from producers.connection.script import text
from producers.contract import keys as contract
from producers.contract.message import Message
from tests.aws import Aws
from tests.aws_faults import Faults
from tests.protocol.messages import POISON
from tests.waiting import PATIENCE_S

QUEUES: Final = ["penstock:queue:m@1.f", "penstock:queue:m@1"]
HOME, OTHER = QUEUES[1], "penstock:queue:m@2"
CAPACITY: Final = (8, 1000)
LIMIT: Final = 2
RULES: Final = Rules(CAPACITY, 300, 1e6, LIMIT)
ROOM: Final = Credit((8, 8, 8, 8), (1000, 1000, 1000, 1000))


@dataclass(slots=True)
class Worker:
    """A consumer with a hold of its own, and its incarnation now. `held`: task id by UUID."""

    consumer: SqsConsumer
    name: str
    lives: int = 0
    held: dict[str, str] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return f"{self.name}.{self.lives}"


class History:
    """`faulty`: SQS may give a message to two workers, and give what is over once more."""

    def __init__(self, aws: Aws, store_url: str, redis: Redis, seed: int, faults: Faults | None = None) -> None:
        self.luck, self.redis, self.faults = random.Random(seed), redis, faults
        self.aws, self.store_url = aws, store_url
        self.address: Address = read(aws.broker())
        self.sqs = aws.client("sqs")
        self.urls = {name: self._make(name) for queue in (HOME, OTHER) for name, _ in lists(queue)}
        # Consumers of one process, address and store share a hold: of another visibility they do not.
        # A lost answer hides messages for that long.
        shortest = 10 if faults else 60
        self.workers = [Worker(self._consumer(shortest + k), f"w{k}") for k in range(2)]
        self.sender = connect_sender(aws.broker(), store_url)
        self.waiting: dict[str, str] = {}
        """Task id -> its list."""
        self.over: set[str] = set()
        self.moved: set[str] = set()
        """Of those that are over, what waits in the other queue for good."""
        self.cut: set[str] = set()
        """Of those that are over, what may come again: a lease ended before the books had the acknowledgement."""
        self.letters: Counter[str] = Counter()
        """What is to be a dead letter: task ids, and strangers' messages."""
        self.reaps: Counter[str] = Counter()
        self.messages: dict[str, Message] = {}
        self.hastened: set[Any] = set()

    def _make(self, name: str) -> str:
        wanted = {"VisibilityTimeout": "60", "MessageRetentionPeriod": "345600"}
        return str(self.sqs.create_queue(QueueName=sqs_name(self.address, name), Attributes=wanted)["QueueUrl"])

    def _consumer(self, visibility: int) -> SqsConsumer:
        return SqsConsumer(read(self.aws.broker(visibility=str(visibility))), QUEUES, self.store_url, home=HOME)

    def close(self) -> None:
        for worker in self.workers:
            worker.consumer.close()
        self.sender.close()

    # ---- steps ----------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """A history of so many steps, then to its end: everything is fetched and over."""
        for worker in self.workers:
            worker.consumer.take_lease(worker.incarnation, "{}", 3600)
        for _ in range(steps):
            step = self.luck.choices([self.send, self.fetch, self.put_down, self.lapse, self.bad], [3, 6, 6, 1, 1])[0]
            step()
        if self.faults:
            self.faults.calm()
        self.at_rest()
        self.finish()

    def send(self) -> None:
        for _ in range(self.luck.randint(1, 4)):
            size = self.luck.choice([(1, 100), (2, 300), (4, 600)])
            tier, tenant = self.luck.choice(list(contract.TIERS)), self.luck.choice(["", "t1", "é t"])
            message = Message(uuid.uuid4().hex[:8], HOME, tier, *size, tenant, int(time.time() * 1000))
            self.messages[message.id] = message
            self.redis.hset(contract.task(message.id), mapping={"status": "queued"})
            self.waiting[message.id] = keys.list_of(message)
            self._until(partial(self._sent, message), "a message is sent")

    def _sent(self, message: Message) -> bool:
        try:
            self.sender.send(message)
        except OSError:
            assert self.faults
            return False
        return True

    def bad(self) -> None:
        """A stranger sends what nobody can use."""
        body = self.luck.choice([one for raw, _ in POISON if (one := _sendable(raw))])
        name = self.luck.choice([name for name, _ in lists(HOME)])
        try:
            self.sqs.send_message(QueueUrl=self.urls[name], MessageBody=body)
        except Exception:  # botocore has many names for a server that is away
            assert self.faults
        else:
            self.letters[body] += 1

    def fetch(self) -> None:
        worker = self.luck.choice(self.workers)
        room = [self.luck.choice([8, 4, 2]) for _ in range(4)]
        room.sort(reverse=True)
        tokens = [min(1000, n * 250) for n in room]
        self.take(worker, self.luck.randint(1, 4), Credit(tuple(room), tuple(tokens)))  # type: ignore[arg-type]

    def take(self, worker: Worker, count: int, room: Credit) -> list[Fetched]:
        """Fetch for a moment, as intake does, and judge what came."""
        uuids = [uuid.uuid4().hex for _ in range(count)]
        deadline, fetched = time.monotonic() + 0.3, list[Fetched]()
        while not any(one.uuid for one in fetched) and time.monotonic() < deadline:
            said = worker.consumer.fetch(worker.incarnation, uuids, room, RULES)
            assert said is not None, "the lease stands"
            fetched += said
            time.sleep(0.02)
        given = [one for one in fetched if one.uuid]
        assert len({one.uuid for one in given}) == len(given)
        self._fits(given, room)
        for one in given:
            self._given(worker, one)
        suspects = [id_ for id_ in worker.held.values() if self.reaps[id_] >= LIMIT - 1]
        assert len(suspects) <= 1 or self.faults, f"{suspects} are suspects, and given together"
        return given

    def _fits(self, given: list[Fetched], room: Credit) -> None:
        seqs, tokens = list(room.seqs), list(room.tokens)
        for one in given:
            message = self.messages[_id(one.raw)]
            for rank in range(one.rank, 4):
                seqs[rank] -= message.n
                tokens[rank] -= message.tokens
            assert seqs[one.rank] >= 0, f"{message} exceeds the credit {room}"
            assert tokens[one.rank] >= 0, f"{message} exceeds the credit {room}"

    def _given(self, worker: Worker, one: Fetched) -> None:
        id_ = _id(one.raw)
        assert f"{one.queue}#{_tier(one.rank)}" == self.waiting.get(id_, f"{one.queue}#{_tier(one.rank)}")
        if id_ in self.waiting:
            assert one.condemned == (self.reaps[id_] >= LIMIT)
            del self.waiting[id_]
            worker.held[one.uuid] = id_
            return
        cut = id_ in self.cut
        assert cut or self.faults, f"{id_} was given to {worker.name}, and {self._where(id_)}"
        self.cut.discard(id_)
        if cut and self.letters[id_]:  # nobody can use it now, either
            self._said(worker, Ack(worker.incarnation, one.uuid, "no 'é'"))
        elif id_ in self.over:  # CLAIM says done
            self._said(worker, Ack(worker.incarnation, one.uuid, settled="" if id_ in self.moved else id_))
        else:  # busy
            self._said(worker, Back(worker.incarnation, one.uuid, 1.0))

    def _where(self, id_: str) -> str:
        return "is over" if id_ in self.over else f"held: {[(w.name, w.held) for w in self.workers]}"

    def put_down(self) -> None:
        holding = [(worker, uid) for worker in self.workers for uid in worker.held]
        if not holding:
            return
        worker, uid = self.luck.choice(holding)
        id_ = worker.held.pop(uid)
        name = keys.list_of(self.messages[id_])
        way = self.luck.choice(["settled", "settled", "letter", "back", "back", "delay", "later", "to", "unsettled"])
        if way == "settled":
            self._settle(id_)
            self._said(worker, Ack(worker.incarnation, uid, used=50, settled=id_))
        elif way == "letter":
            self.letters[id_] += 1
            self._settle(id_)
            self._said(worker, Ack(worker.incarnation, uid, "no 'é'"))
        elif way == "unsettled":  # a failover lost that it was settled: what was said is looked for, and goes back
            self._said(worker, Ack(worker.incarnation, uid, settled=id_))
            self._until(lambda: uid in self._strays(worker), "an unsettled task is a stray")
            self.waiting[id_] = name
            self._said(worker, Back(worker.incarnation, uid))
        elif way == "to":
            self.over.add(id_)
            self.moved.add(id_)
            self._said(worker, Back(worker.incarnation, uid, to=OTHER))
        else:
            self.waiting[id_] = name
            delay = {"back": 0.0, "delay": 1.0, "later": 1000.0}[way]
            self._said(worker, Back(worker.incarnation, uid, delay))

    def _strays(self, worker: Worker) -> dict[str, str]:
        return worker.consumer.strays(worker.incarnation, list(worker.held))

    def _settle(self, id_: str) -> None:
        self.redis.hset(contract.task(id_), mapping={"status": "completed", "settled": "1"})
        self.over.add(id_)
        self.reaps.pop(id_, None)

    def _said(self, worker: Worker, what: Ack | Back) -> None:
        def say() -> bool:
            try:
                (answer,) = worker.consumer.put_down([what])
            except ConnectionError:
                return False
            if self.faults and isinstance(what, Back) and answer is PutDown.UNSETTLED:
                return False  # it met an Ack that was still on its way: it is a stray, and given back again
            assert answer in ((PutDown.DONE, PutDown.GONE) if self.faults else (PutDown.DONE,)), (what, answer)
            return True

        self._until(say, f"{what} is taken")

    def lapse(self) -> None:
        """A worker's lease is gone; the other reaps what it held. It begins anew, and its old calls do nothing."""
        worker, other = self.luck.sample(self.workers, 2)
        if self.luck.random() < 0.5 and len(worker.held) < 2:
            return
        self.cut |= self._unmarked(worker) & self.over
        self.redis.delete(contract.lease(worker.incarnation))
        self._until(lambda: self._reaped(other, worker.incarnation), "a dead worker is reaped")
        late = [Back(worker.incarnation, uid) for uid in worker.held]
        for id_ in worker.held.values():
            self.waiting[id_] = keys.list_of(self.messages[id_])
            self.reaps[id_] += 1
        worker.held.clear()
        for what in late:
            assert worker.consumer.put_down([what]) == [PutDown.GONE]
        worker.lives += 1
        worker.consumer.take_lease(worker.incarnation, "{}", 3600)

    def _unmarked(self, worker: Worker) -> set[str]:
        """What is on no way out in the books. An acknowledgement is answered before it is there."""
        said: dict[Any, Any] = self.redis.hgetall(keys.inflight(worker.incarnation))  # type: ignore[assignment]
        return {one["id"] for one in map(json.loads, said.values()) if not one.get("out")}

    def _reaped(self, other: Worker, incarnation: str) -> bool:
        other.consumer.reap(incarnation)
        return not self.redis.exists(keys.inflight(incarnation))

    # ---- at rest --------------------------------------------------------------------------------------------------

    def at_rest(self) -> None:
        """The books have what is held; index, buffers and what is stored have what waits."""

        def differs() -> str:
            given = {
                w.incarnation: {f: id_ for f, id_ in self._fields(w).items() if f[:2] != "m:"} for w in self.workers
            }
            held = {w.incarnation: w.held for w in self.workers}
            waits = self._indexed() + [id_ for w in self.workers for f, id_ in self._fields(w).items() if f[:2] == "m:"]
            waits += self._stored()
            wanted = sorted(self.waiting)
            return (
                "" if given == held and sorted(set(waits)) == wanted else f"{given} {held}\n{sorted(waits)}\n{wanted}"
            )

        if self.faults:
            return
        self._until(lambda: not differs(), "the books are what is", differs)

    def finish(self) -> None:
        """All that waits is fetched and over, also by who serves the other queue; then nothing is left in SQS, nor in
        the books: a copy of what was moved may have entered it into its former list, until it is settled."""
        for id_ in self.moved:
            self._settle(id_)
        worker = self.workers[0]
        deadline = time.monotonic() + PATIENCE_S
        while self.waiting or any(one.held for one in self.workers):
            assert time.monotonic() < deadline, f"lost: {self.waiting}, {self._left()}"
            for one in self.workers:
                for uid, id_ in list(one.held.items()):
                    self._settle(id_)
                    self._said(one, Ack(one.incarnation, uid, settled=id_))
                one.held.clear()
            self._hasten()
            self.take(worker, 8, ROOM)

        def settle_copies() -> str:
            self._hasten()
            self.take(worker, 8, ROOM)
            asyncio.run(self._tidy())
            return self._left()

        self._until(lambda: not settle_copies(), "nothing is left", self._left)
        found = Counter(map(self._letter, self.redis.lrange(shared.DEAD, 0, -1)))
        missing = self.letters - found
        assert not missing, f"no dead letter of {missing}"
        assert self.faults or found == self.letters, f"too many dead letters: {found - self.letters}"

    def _letter(self, entry: Any) -> str:
        """A dead letter's task, or the whole text of what a stranger sent."""
        message = str(json.loads(entry)["message"])
        return next((id_ for id_ in self.messages if f'"{id_}"' in message), message)

    async def _tidy(self) -> None:
        """A sweeper removes entries of what is over, which a copy may have left."""
        broker = connect_broker(self.aws.broker(), self.store_url)
        await broker.tidy()
        await broker.aclose()

    def _hasten(self) -> None:
        """What the store keeps for later is due, once: a second time it would be sent by two."""
        for entry in set(self.redis.zrange(keys.delayed(HOME), 0, -1)) - self.hastened:
            self.hastened.add(entry)
            self.redis.zadd(keys.delayed(HOME), {entry: 1})

    def _left(self) -> str:
        """What SQS and the books have yet, of what is not over for good."""
        found: dict[str, Any] = {}
        for name, _ in lists(HOME):
            asked = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
            said = self.sqs.get_queue_attributes(QueueUrl=self.urls[name], AttributeNames=asked)["Attributes"]
            if any(int(count) for count in said.values()):
                found[name] = said
        found |= {w.incarnation: fields for w in self.workers if (fields := self._fields(w))}
        if self._indexed() or self._stored():
            found["waits"] = (self._indexed(), self._stored())
        returns: Any = self.redis.hgetall(shared.REAPED)
        if not self.faults and (reaped := {text(id_) for id_ in returns} - self.moved):
            found["reaped"] = reaped
        return f"{found}" if found else ""

    def _fields(self, worker: Worker) -> dict[str, str]:
        said: dict[Any, Any] = self.redis.hgetall(keys.inflight(worker.incarnation))  # type: ignore[assignment]
        return {text(name): json.loads(raw)["id"] for name, raw in said.items()}

    def _indexed(self) -> list[str]:
        found = [one for name, _ in lists(HOME) for one in self.redis.zrange(keys.waiting(name), 0, -1)]
        return [keys.Entry.parse(text(one)).id for one in found]

    def _stored(self) -> list[str]:
        return [_id(json.loads(one)["body"].encode()) for one in self.redis.zrange(keys.delayed(HOME), 0, -1)]

    def _until(self, condition: Callable[[], Any], what: str, why: Callable[[], str] = str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}: {why()}"
            time.sleep(0.02)


def _id(raw: bytes) -> str:
    return str(json.loads(raw)["headers"]["id"])


def _tier(rank: int) -> str:
    return next(tier for tier, (its, _) in contract.TIERS.items() if its == rank)


def _sendable(raw: bytes) -> str:
    """The text, of what SQS takes."""
    try:
        body = raw.decode()
    except UnicodeDecodeError:
        return ""
    return body if body.isprintable() else ""
