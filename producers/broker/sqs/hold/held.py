"""A message that a worker process has received from SQS, with the receipt by which it puts it down."""

from __future__ import annotations

import base64
import binascii
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from producers.broker.memory.message import Sent, Unusable, read
from producers.broker.sqs.hold.reaping import Flying
from producers.broker.sqs.keys import Entry, member

#: Longest time (s) for which SQS hides a message after one receive, however often that is renewed.
LONGEST_S: Final = 12 * 3600.0
_arrivals = count()


@dataclass(slots=True, eq=False)
class Held:
    """`number`: its place among its tenant's messages. Times are of this process's monotonic clock."""

    incarnation: str
    list: str
    queue: str
    rank: int
    mid: str
    receipt: str
    raw: bytes
    sent: Sent | None
    """The message as read; None if it cannot be used, for this `reason`."""
    reason: str
    member: str
    """Its entry in the index; empty: it is not indexed, as it does not say its size."""
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
    """Of its delivery; empty: it is in the buffer."""
    given: bool = False
    """The store knows the delivery."""
    leaving: bool = False
    """An errand puts it down."""
    renewing: bool = False
    lost: bool = False
    """Its incarnation's lease is gone: others may have it."""
    stray: bool = False
    """Its record turned out not to be settled: it is nobody's until it is given back."""

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
        """Its value there (JSON; the script that reads it takes texts as they are)."""
        said = {"list": self.list, "mid": self.mid, "receipt": self.receipt, "id": self.id}
        said |= {"member": self.member, "at": str(self.at), "group": self.group}
        return json.dumps(said, ensure_ascii=False).encode(errors="surrogateescape")


def held_of(message: Mapping[str, Any], incarnation: str, place: tuple[str, str, int], until: float) -> Held:
    """A message as ReceiveMessage answers it. `place`: its list, queue and rank."""
    raw = _decoded(message["Body"])
    said = message.get("Attributes", {})
    sent, reason = None, ""
    try:
        sent = read(raw)
    except Unusable as why:
        reason = str(why)
    sent_at = float(said.get("SentTimestamp", 0)) / 1000
    return Held(
        incarnation,
        *place,
        message["MessageId"],
        message["ReceiptHandle"],
        raw,
        sent,
        reason,
        member(sent) if sent else "",
        said.get("MessageGroupId", ""),
        sent_at,
        time.monotonic(),
        until,
        _number(sent.at if sent else 0, sent_at),
    )


def stray_of(incarnation: str, flying: Flying, place: tuple[str, str, int]) -> Held:
    """A delivery that a failover of the store brought back: its body is not known any more, but for its size."""
    now = time.monotonic()
    raw = Entry.parse(flying.member).message(flying.list).envelope() if flying.member else ""
    member, group = flying.member, flying.group
    held = Held(incarnation, *place, "", flying.receipt, raw.encode(), None, "", member, group, time.time(), now, now)
    held.uuid, held.given, held.stray = flying.field, True, True
    return held


def _number(at: float, sent_at: float) -> int:
    """Messages are in the order in which their tasks were submitted; copies of one differ."""
    ms = at if 0 < at < math.inf else sent_at * 1000
    return (int(ms) << 24) + next(_arrivals) % (1 << 24)


def _decoded(body: str) -> bytes:
    """kombu's SQS transport writes its JSON in base64."""
    if not body.lstrip().startswith("{"):
        try:
            decoded = base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            decoded = b""
        if decoded.lstrip().startswith(b"{"):  # else it is a text that only looks like base64
            return decoded
    return body.encode(errors="surrogateescape")
