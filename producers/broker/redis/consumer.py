"""A worker's side of the broker on Redis or Valkey."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from redis import Redis

from producers.broker.base import Waker
from producers.broker.redis import calls, keys
from producers.broker.redis.leases import Leases
from producers.broker.redis.waker import TrackingWaker
from producers.broker.values import Ack, Back, Capabilities, Credit, Fetched, PutDown, Rules, sane_weights
from producers.connection.connect import SILENT_S, connect
from producers.connection.script import Call, run, run_many
from producers.contract import keys as contract_keys
from producers.contract.levels import beside

CAPABILITIES: Final = Capabilities(
    front_of_queue=True,
    max_message_bytes=512 * 1024 * 1024,  # proto-max-bulk-len, unless the server says otherwise
)
#: Messages that go back into their lists in one call.
PAGE: Final = 1000
_SAID: Final = {1: PutDown.DONE, 0: PutDown.GONE, -1: PutDown.UNSETTLED}


class RedisConsumer(Leases):
    capabilities = CAPABILITIES

    def __init__(self, url: str, queues: Sequence[str], timeout: float = SILENT_S, home: str | None = None) -> None:
        self._url = url
        self._redis: Redis = connect(url, timeout=timeout)
        self.queues = list(queues)
        self.home = home or self.queues[0]
        self._places = calls.places(queues)

    # ---- deliveries -----------------------------------------------------------------------------------------------

    def fetch(
        self, incarnation: str, uuids: Sequence[str], credit: Credit, rules: Rules, bite: int | None = None
    ) -> list[Fetched] | None:
        call = calls.fetch(
            incarnation,
            [queue for queue in self.queues if queue not in self.passed],
            uuids,
            credit,
            capacity=rules.capacity,
            plain_tokens=rules.plain_tokens,
            ageing_ms=int(rules.ageing * 1000),
            max_redeliveries=rules.max_redeliveries,
            bite=bite or calls.BITE,
            home=self.home,
        )
        return calls.read_fetch(run(self._redis, call), self._places)

    def put_down(self, what: Sequence[Ack | Back]) -> list[PutDown | Exception]:
        answers = run_many(self._redis, [self._call(one) for one in what])
        return [answer if isinstance(answer, Exception) else _SAID[answer] for answer in answers]

    def _call(self, one: Ack | Back) -> Call:
        if isinstance(one, Ack):
            return calls.ack(one.incarnation, one.uuid, one.reason, one.used, one.settled)
        return calls.back(one.incarnation, self.home, one.uuid, int(one.delay * 1000), one.to)

    def strays(self, incarnation: str, held: Sequence[str]) -> dict[str, str]:
        return calls.read_strays(run(self._redis, calls.strays(incarnation, held)))

    def scheduled(self, count: int) -> list[bytes]:
        return list(run(self._redis, calls.scheduled(self.home, count)))

    # ---- leases ---------------------------------------------------------------------------------------------------

    def leave(self, incarnation: str, takers: Mapping[str, Sequence[str]]) -> None:
        first = [calls.reap(incarnation)]
        if self.home != self.queues[0]:
            first += [calls.adopt(*pair) for pair in zip(beside(self.queues[0]), beside(self.home), strict=True)]
        recall = [calls.recall(queue, takers.get(queue, self.queues), PAGE) for queue in self.queues]
        with self._redis.pipeline(transaction=False) as pipe:
            for call in (*first, recall[0]):
                pipe.script_load(call.script.text)
            pipe.delete(contract_keys.lease(incarnation))
            for call in (*first, *recall):
                pipe.execute_command(*call.command)
            counts = pipe.execute()[-len(recall) :]
        while again := [call for call, count in zip(recall, counts, strict=True) if count == PAGE]:
            recall, counts = again, run_many(self._redis, again)

    def reap(self, incarnation: str, looker: str = "", since: int = 0) -> int:
        return int(run(self._redis, calls.reap(incarnation, looker, self.home, since)))

    # ---- queues ---------------------------------------------------------------------------------------------------

    def waiting(self, queue: str) -> int:
        with self._redis.pipeline(transaction=False) as pipe:
            for name, _ in calls.lists([queue]):
                pipe.llen(name)
                pipe.zcard(keys.sorted_of(name))
            pipe.zcard(keys.delayed(queue))
            return sum(pipe.execute())

    def weights(self) -> dict[str, float]:
        return sane_weights(self._redis.hgetall(keys.WEIGHTS))

    def waker(self, poke: Callable[[], None]) -> Waker:
        return TrackingWaker(self._url, self.queues, poke)

    def prepare(self) -> None:
        self._redis.script_load(calls.back("", "", "").script.text)

    def close(self) -> None:
        self._redis.close()
