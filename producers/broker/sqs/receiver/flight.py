"""A message in flight: as its worker has received it, as the store's books have it, and the scripts of those books.

The head of each `../scripts/*.lua` has its precondition, effect and answers. REAP is a plan of several steps, for
workers (blocking) and sweepers (asyncio), with requests to SQS between its scripts:

    reap(inc) -> read_reap -> batch_requests -> SQS, `BATCH` messages a request -> reaped(inc, fields)

It may be repeated between any two steps. If SQS refuses a request, the visibility timeout shows the message again.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any, Final

from producers.broker.memory.message import Sent, Unusable, read
from producers.broker.redis import keys as shared
from producers.broker.sqs import keys
from producers.broker.sqs.keys import Entry, member
from producers.connection.script import Call, script, text
from producers.contract import keys as contract_keys

PACKAGE: Final = "producers.broker.sqs"
#: Longest time (s) for which SQS hides a message after one receive, however often that is renewed.
LONGEST_S: Final = 12 * 3600.0
#: Messages of one request, at most.
BATCH: Final = 10
#: Routes out (`scripts/out.lua`) whose message is deleted; with any other route it is shown again.
DELETED: Final = frozenset({"done", "letter", "delay"})
#: An answer of NOTE and TAKE: the incarnation's lease is gone.
LOST: Final = [-1]
_arrivals = count()


@dataclass(slots=True, eq=False)
class ReceivedMessage:
    """A message that this process received. `number`: orders its tenant's messages. Times are monotonic."""

    incarnation: str
    list: str
    queue: str
    rank: int
    mid: str
    receipt: str
    raw: bytes
    sent: Sent | None
    """The message, parsed; None if it cannot be used, for this `reason`."""
    reason: str
    member: str
    """Its entry in the index; empty: it has none, since its size is unknown."""
    group: str
    """FIFO queues: its group's id."""
    sent_at: float
    """When SQS got it (s since the epoch)."""
    received: float
    until: float
    """When SQS shows it to others."""
    number: int = 0
    seqs: int = 0
    tokens: int = 0
    uuid: str = ""
    """The id of its delivery; empty while it is in the buffer."""
    delivered: bool = False
    """The store knows the delivery."""
    leaving: bool = False
    """A request puts it down."""
    renewing: bool = False
    lost: bool = False
    """Its incarnation's lease is gone: others may have it."""
    stray: bool = False
    """Its record turned out not to be settled: no thread has it until it is given back."""

    @property
    def id(self) -> str:
        return self.sent.id if self.sent else self.member.partition(" ")[0]

    @property
    def in_buffer(self) -> str:
        """Its field of the hash of messages in flight, while no thread of the worker has it."""
        return f"m:{self.mid}:{self.number}"

    @property
    def field(self) -> str:
        return self.uuid or self.in_buffer

    @property
    def at(self) -> int:
        """When its task was submitted, or else it was sent (ms)."""
        return self.number >> 24

    def entry(self) -> bytes:
        """Its value in the hash (JSON; the script that reads it takes texts as they are)."""
        values = {"list": self.list, "mid": self.mid, "receipt": self.receipt, "id": self.id}
        values |= {"member": self.member, "at": str(self.at), "group": self.group}
        return json.dumps(values, ensure_ascii=False).encode(errors="surrogateescape")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A message in flight, as its worker's hash has it. `receipt`: empty if SQS has no message of it.

    `member`: its entry in the index. If SQS does not know the receipt of a message to be shown, it is sent again.
    """

    field: str
    list: str
    receipt: str
    id: str
    member: str
    out: str = ""
    group: str = ""
    """Its MessageGroupId."""


def parse_received(
    message: Mapping[str, Any], incarnation: str, location: tuple[str, str, int], until: float
) -> ReceivedMessage:
    """A message as ReceiveMessage answers it. `location`: its list, queue and rank."""
    raw = _decoded(message["Body"])
    attributes = message.get("Attributes", {})
    sent, reason = None, ""
    try:
        sent = read(raw)
    except Unusable as why:
        reason = str(why)
    sent_at = float(attributes.get("SentTimestamp", 0)) / 1000
    return ReceivedMessage(
        incarnation,
        *location,
        message["MessageId"],
        message["ReceiptHandle"],
        raw,
        sent,
        reason,
        member(sent) if sent else "",
        attributes.get("MessageGroupId", ""),
        sent_at,
        time.monotonic(),
        until,
        _number(sent.at if sent else 0, sent_at),
    )


def stray_message(incarnation: str, entry: InFlight, location: tuple[str, str, int]) -> ReceivedMessage:
    """A delivery that a failover of the store restored: only the size of its body is known."""
    now = time.monotonic()
    raw = Entry.parse(entry.member).message(entry.list).envelope().encode() if entry.member else b""
    message = ReceivedMessage(
        incarnation, *location, "", entry.receipt, raw, None, "", entry.member, entry.group, time.time(), now, now
    )
    message.uuid, message.delivered, message.stray = entry.field, True, True
    return message


def _number(at: float, sent_at: float) -> int:
    """A number that orders messages by the submission of their tasks, and differs between copies of one."""
    ms = at if 0 < at < math.inf else sent_at * 1000
    return (int(ms) << 24) + next(_arrivals) % (1 << 24)


def _decoded(body: str) -> bytes:
    """The message's JSON, which kombu's SQS transport writes in base64."""
    if not body.lstrip().startswith("{"):
        try:
            decoded = base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            decoded = b""
        if decoded.lstrip().startswith(b"{"):  # else the body only looks like base64
            return decoded
    return body.encode(errors="surrogateescape")


# ---- kept messages: the store has those whose delay is too long for SQS ----------------------------------------------


def kept_message(name: str, raw: bytes, group: str) -> str:
    """A message of a list, as the store keeps it (JSON)."""
    return json.dumps({"list": name, "body": raw.decode(errors="surrogateescape"), "group": group})


def body_of(kept: bytes) -> bytes:
    """The body of a kept message."""
    body: str = json.loads(kept)["body"]
    return body.encode(errors="surrogateescape")


# ---- scripts --------------------------------------------------------------------------------------------------------


def note(incarnation: str, name: str, messages: Sequence[tuple[ReceivedMessage, bool]]) -> Call:
    """NOTE. `messages`: of one list; each with whether the worker has a copy of it already. Messages without a receipt
    stay in the index, since SQS has another copy."""
    names = (contract_keys.lease(incarnation), keys.inflight(incarnation), shared.REAPED)
    args: list[str | bytes | int] = [name]
    for message, is_copy in messages:
        indexed = message.member if message.receipt else ""
        args += [message.field, message.entry(), indexed, message.id, int(is_copy)]
    return Call(script(PACKAGE, "note"), names, args)


def take(incarnation: str, lists: Sequence[str], messages: Sequence[ReceivedMessage]) -> Call:
    """TAKE. Answers the counts that the index has of the `lists`, with or without `messages`."""
    names = (contract_keys.lease(incarnation), keys.inflight(incarnation), shared.UNSERVED)
    args = [arg for m in messages for arg in (m.in_buffer, m.uuid, m.entry(), m.tokens, m.list)]
    return Call(script(PACKAGE, "take"), (*names, *map(keys.waiting, lists)), (len(lists), *lists, *args))


def out(
    message: ReceivedMessage,
    route: str,
    *,
    to: str = "",
    delay: float = 0.0,
    kept: str | bytes = "",
    reason: str = "",
    settled: bool = False,
) -> Call:
    """OUT. `route`: see `scripts/out.lua`; `to`: the list that it goes to, its own by default; `delay`: seconds;
    `kept`: the text that the store keeps of it."""
    names = (
        keys.inflight(message.incarnation),
        keys.delayed(message.queue),
        shared.DEAD,
        contract_keys.task(message.id),
    )
    args = (message.field, route, to or message.list, int(delay * 1000), message.member, kept, reason, int(settled))
    return Call(script(PACKAGE, "out"), names, args)


def down(message: ReceivedMessage, *, deleted: bool) -> Call:
    names = (keys.inflight(message.incarnation), shared.REAPED, contract_keys.task(message.id))
    args = (message.field, message.id, message.list, message.member, int(deleted))
    return Call(script(PACKAGE, "down"), names, args)


def due(queue: str, count: int, seconds: float = 60.0, *, every: bool = False, sent: Sequence[bytes] = ()) -> Call:
    """Answers kept messages whose delay is over, or `every` one; they are the caller's for so many seconds. First it
    removes those that were `sent`."""
    return Call(script(PACKAGE, "due"), (keys.delayed(queue),), (count, int(seconds * 1000), int(every), *sent))


def sent(name: str, entries: Sequence[tuple[str, float]]) -> Call:
    """Messages of a list are about to be sent. `entries`: index member and time of submit (ms; 0: unknown) of each.

    Answers how many of them are new."""
    return Call(script(PACKAGE, "sent"), (), (name, *(part for member, at in entries for part in (member, int(at)))))


# ---- the plan of REAP -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request to the queue of the list `name`: DeleteMessageBatch, or ChangeMessageVisibilityBatch to 0."""

    name: str
    delete: bool
    messages: Sequence[InFlight]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """As boto3 takes them; an entry's Id is its index in `messages`."""
        more = {} if self.delete else {"VisibilityTimeout": 0}
        return [{"Id": str(k), "ReceiptHandle": message.receipt, **more} for k, message in enumerate(self.messages)]


def reap(incarnation: str, looker: str = "", since: int = 0) -> Call:
    """REAP; see `read_reap`. `looker`: the incarnation that found it silent, if its lease is valid; `since`: the join
    from which on leases count."""
    names = (contract_keys.lease(incarnation), keys.inflight(incarnation), shared.REAPED, shared.INCARNATIONS)
    return Call(script(PACKAGE, "reap"), names, (incarnation, looker, since))


def read_reap(answer: Sequence[Any]) -> tuple[int, list[InFlight]]:
    """The number of messages that this call put on their way back, -1 while the lease is valid; and all in flight."""
    entries = [read_entry(text(field), raw) for field, raw in zip(answer[1::2], answer[2::2], strict=True)]
    return int(answer[0]), entries


def read_entry(field: str, raw: bytes | str) -> InFlight:
    """Parse a field of the hash of messages in flight, and its value."""
    values = json.loads(raw if isinstance(raw, str) else raw.decode(errors="surrogateescape"))
    return InFlight(
        field,
        values["list"],
        values["receipt"],
        values["id"],
        values["member"],
        values.get("out", ""),
        values["group"],
    )


def batch_requests(entries: Sequence[InFlight]) -> list[BatchRequest]:
    """The requests to SQS for these messages. A stale receipt is no error: its message is back already."""

    def kind(entry: InFlight) -> tuple[str, bool]:
        return entry.list, entry.out in DELETED

    with_receipt = sorted((entry for entry in entries if entry.receipt), key=kind)
    groups = [(key, list(group)) for key, group in groupby(with_receipt, key=kind)]
    return [
        BatchRequest(*key, group[start : start + BATCH])
        for key, group in groups
        for start in range(0, len(group), BATCH)
    ]


def reaped(incarnation: str, fields: Sequence[str]) -> Call:
    """Answers how many entries remain, -1 while the lease is valid."""
    names = (contract_keys.lease(incarnation), keys.inflight(incarnation), shared.INCARNATIONS)
    return Call(script(PACKAGE, "reaped"), names, (incarnation, *fields))
