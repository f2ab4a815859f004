"""Keeps the index true, and messages from ending with their queue's retention. The leading sweeper does it.

an entry whose task is settled, or gone       -> leaves the index; if its message comes, CLAIM says `done`
an entry older than the retention less a day  -> its message is sent anew; of two copies CLAIM lets one run
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from producers.broker.sqs import calls, keys
from producers.broker.sqs.connection import Connection
from producers.broker.sqs.queues.lookup import MIN_RETENTION_S, RENEW_BEFORE_S
from producers.broker.sqs.sending.outgoing import BATCH, send_anew
from producers.connection.aws import AwsError
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import ms, run, text
from producers.connection.trouble import Trouble, trouble
from producers.contract import keys as contract_keys

logger = logging.getLogger(__name__)

#: Entries of each list that one call looks at.
PAGE: Final = 2000
#: Time (ms) after which nothing tells any more that a message was sent anew: SQS keeps none for longer than 14 days.
RENEWED_MS: Final = 15 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An entry of the index. `since`: ms at which its message was sent, or earlier."""

    member: str
    id: str
    since: int
    over: bool
    """Its task needs no message any more."""


class Repair:
    """The sweeper's memory of how far it has looked. One thread at a time may use it."""

    def __init__(self, connection: Connection) -> None:
        self._to = connection
        self._cursors: dict[str, int] = {}

    def step(self) -> None:
        """Look at some entries of each list. Raises redis.exceptions.RedisError, and AwsError if SQS is away."""
        store = self._to.store
        now = ms(store.time())
        for name in sorted(map(text, store.smembers(keys.LISTS))):
            found = self._page(name)
            run(store, calls.gone(name, [one.member for one in found if one.over]))
            self._renew(name, [one for one in found if not one.over], now)
        store.zremrangebyscore(keys.RENEWED, "-inf", now - RENEWED_MS)

    def _page(self, name: str) -> list[_Waiting]:
        store = self._to.store
        self._cursors[name], raw = store.zscan(keys.waiting(name), self._cursors.get(name, 0), count=PAGE)
        page = [(text(member), float(score)) for member, score in raw]
        with store.pipeline(transaction=False) as pipe:
            for member, _ in page:
                pipe.hmget(contract_keys.task(_id(member)), "status", "settled", "created")
                pipe.zscore(keys.RENEWED, _id(member))
            said = pipe.execute()
        found = []
        for (member, score), (status, settled, created), renewed in zip(page, said[::2], said[1::2], strict=True):
            since = int(max(float(created or score), renewed or 0))
            found.append(_Waiting(member, _id(member), since, over=not status or settled is not None))
        return found

    def _renew(self, name: str, entries: Sequence[_Waiting], now: int) -> None:
        """Send anew what is so old that its queue is about to drop it."""
        old = [one for one in entries if now - one.since > (MIN_RETENTION_S - RENEW_BEFORE_S) * 1000]
        if not old:
            return
        try:
            keeps_ms = (self._to.queues.check(name).retention - RENEW_BEFORE_S) * 1000
            late = [one.id for one in old if now - one.since > keeps_ms]
            for start in range(0, len(late), BATCH):
                send_anew(self._to, name, late[start : start + BATCH])
        except AwsError as error:
            if trouble(error) is Trouble.AWAY:
                raise
            warn_throttled(logger, "Old messages are not sent anew: %s", error)


def _id(member: str) -> str:
    return member.partition(" ")[0]
