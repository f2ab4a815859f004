"""Every key that the broker on SQS keeps in the store, beside those of `producers.broker.redis.keys` that it shares.

It shares leases and the list of incarnations, dead letters, redeliveries (`REAPED`), weights, `UNSERVED` and the counts
of deliveries. The scripts spell the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final, Self

from producers.broker.memory.message import Sent
from producers.broker.sqs.address import is_celery, split
from producers.contract.message import Message

#: Hash: list -> URL of its queue, if an operator chose it; queues without an entry are found by their names.
QUEUES: Final = "penstock:sqs:queues"
#: Sorted set: task id -> ms at which its message was last sent anew, before its queue would have dropped it.
RENEWED: Final = "penstock:sqs:renewed"
#: Set: lists that have an index.
LISTS: Final = "penstock:sqs:lists"


def waiting(name: str) -> str:
    """Sorted set: the index of a list. Member: see `Entry`; score: ms since when it waits, or will wait."""
    return f"penstock:sqs:waiting:{name}"


def tenants(name: str) -> str:
    """Hash: tenant -> its entries in the index of a list; the empty name is that of all tasks without a tenant."""
    return f"penstock:sqs:tenants:{name}"


def inflight(incarnation: str) -> str:
    """Hash: a worker's messages in flight, by `m:MESSAGE_ID` while they are in its buffer, then by delivery UUID."""
    return f"penstock:sqs:inflight:{incarnation}"


def delayed(queue: str) -> str:
    """Sorted set: messages whose delay is longer than SQS's longest, by the time at which they are due (ms)."""
    return f"penstock:sqs:delayed:{queue}"


def list_of(message: Message) -> str:
    """The list of a message."""
    tier = "default" if is_celery(message.queue) else message.tier
    return f"{message.queue}#{tier}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A waiting message in the index, as text `ID N TOKENS TENANT`: a function of the task, so that each is there once.

    No id has a space; a tenant may. `tokens`: KV tokens that it may need.
    """

    id: str
    n: int
    tokens: int
    tenant: str

    @classmethod
    def of(cls, message: Message) -> Self:
        return cls(message.id, message.n, message.tokens, message.tenant)

    @classmethod
    def parse(cls, member: str) -> Self:
        """Parse a member of the index. Raises ValueError."""
        task_id, n, tokens, tenant = member.split(" ", 3)
        return cls(task_id, int(n), int(tokens), tenant)

    def __str__(self) -> str:
        return f"{self.id} {self.n} {self.tokens} {self.tenant}"

    def message(self, name: str) -> Message:
        """A message of this size in a list."""
        queue, tier = split(name)
        return Message(self.id, queue, tier, self.n, self.tokens, self.tenant)


def member(sent: Sent) -> str:
    """The index's member of a received message; empty for plain Celery's, which have no size and are not indexed."""
    if not sent.counts or not 0 < sent.seqs < inf or sent.tokens == inf or " " in sent.id:
        return ""
    return str(Entry(sent.id, int(sent.seqs), int(sent.tokens), sent.tenant))
