"""The ways by which a message leaves a worker, each a generator of steps: a script's `Call`, or an `Ask` of SQS.

The order of steps is in docs/sqs.md. A step that failed is tried again, so each may be done twice. A generator is sent
the answer: the script's; of SQS, whether it does not know the message any more. It returns what `put_down` answers.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from producers.broker.memory.message import Unusable, read
from producers.broker.sqs.hold import calls
from producers.broker.sqs.hold.held import LONGEST_S, Held
from producers.broker.sqs.hold.reaping import DELETED, Flying, reaped
from producers.broker.sqs.keys import Entry, member
from producers.broker.values import PutDown
from producers.connection.script import Call

#: Longest delay (s) of a message or a hand-back on SQS; the store keeps what is delayed for longer.
MAX_DELAY_S: Final = 900.0
#: The same of what has no entry in the index, where its delay could not be seen.
MAX_UNSEEN_S: Final = 30.0
#: So long (s) before a receive reaches SQS's longest, its message is sent anew.
ANEW_BEFORE_S: Final = 1800.0


class Act(Enum):
    DELETE = "sqs:DeleteMessage"
    SHOW = "sqs:ChangeMessageVisibility"
    SEND = "sqs:SendMessage"


@dataclass(frozen=True, slots=True)
class Ask:
    """A message's part of a request. `seconds`: SHOW hides it for so long, SEND delays it."""

    act: Act
    list: str
    receipt_of: Held | Flying | None = None
    body: str = ""
    group: str = ""
    seconds: float = 0.0
    renews: bool = False

    @property
    def lingers(self) -> bool:
        """It may wait for others, to share a request."""
        return self.act is Act.DELETE

    @property
    def entry(self) -> dict[str, Any]:
        """Its entry of the request."""
        if self.receipt_of is None:
            return {"MessageBody": self.body, "group": self.group, "DelaySeconds": int(self.seconds)}
        more = {"VisibilityTimeout": int(self.seconds)} if self.act is Act.SHOW else {}
        return {"ReceiptHandle": self.receipt_of.receipt, **more}


Steps = Generator[Call | Ask, Any, PutDown]


@dataclass(slots=True, eq=False)
class Errand:
    """`held`: what it puts down, if it does. `step`: the next one, since `at`, and not before `after` (monotonic)."""

    steps: Steps
    step: Call | Ask | None = None
    at: float = 0.0
    after: float = 0.0
    failures: int = 0
    answer: PutDown | None = None
    """Not None: it has ended."""
    held: Held | None = None

    def advance(self, answer: Any = None) -> None:
        self.at, self.failures, self.after = time.monotonic(), 0, 0.0
        try:
            self.step = self.steps.send(answer)
        except StopIteration as end:
            self.step, self.answer = None, end.value


def ack(held: Held, reason: str = "", *, settled: bool = False) -> Steps:
    """Nobody needs it any more. With a reason it is a dead letter."""
    way = "letter" if reason else "done"
    answer = yield calls.out(held, way, kept=held.raw if reason else "", reason=reason, settled=settled)
    if answer != 1:
        return PutDown.UNSETTLED if answer == -1 else PutDown.GONE
    yield Ask(Act.DELETE, held.list, held)
    answer = yield calls.down(held, deleted=True)
    return PutDown.DONE if answer else PutDown.GONE


def back(held: Held, delay: float, *, fifo: bool, worn: bool) -> Steps:
    """It goes back to its own queue. `worn`: it is so old that its queue would soon drop it."""
    ends = held.received + LONGEST_S - ANEW_BEFORE_S < time.monotonic() + delay
    if delay > (MAX_DELAY_S if held.member else MAX_UNSEEN_S) or (delay > 0 and ends):
        return (yield from _keep(held, delay))
    answer = yield calls.out(held, "back", delay=delay)
    if answer != 1:
        return PutDown.GONE
    body = held.raw.decode(errors="surrogateescape")
    if worn and not fifo:
        yield Ask(Act.SEND, held.list, None, body, held.group, delay)
        yield Ask(Act.DELETE, held.list, held)
    elif (yield Ask(Act.SHOW, held.list, held, seconds=delay)):  # SQS has none: a failover has lost that it went
        yield Ask(Act.SEND, held.list, None, body, held.group, delay)
    yield calls.down(held, deleted=False)
    return PutDown.DONE


def _keep(held: Held, delay: float) -> Steps:
    kept = json.dumps({"list": held.list, "body": held.raw.decode(errors="surrogateescape"), "group": held.group})
    answer = yield calls.out(held, "delay", delay=delay, kept=kept)
    if answer != 1:
        return PutDown.GONE
    yield Ask(Act.DELETE, held.list, held)
    yield calls.down(held, deleted=False)
    return PutDown.DONE


def body_of(kept: bytes) -> bytes:
    """The message of what the store keeps."""
    body: str = json.loads(kept)["body"]
    return body.encode(errors="surrogateescape")


def move(held: Held, to: str) -> Steps:
    """It goes to another list."""
    answer = yield calls.out(held, "back", to=to)
    if answer != 1:
        return PutDown.GONE
    yield Ask(Act.SEND, to, None, held.raw.decode(errors="surrogateescape"), held.group)
    yield Ask(Act.DELETE, held.list, held)
    yield calls.down(held, deleted=False)
    return PutDown.DONE


def renew(held: Held, seconds: float) -> Steps:
    """SQS hides it for as long again; if it does not have it in flight, whoever has it by now renews it."""
    began = time.monotonic()
    gone = yield Ask(Act.SHOW, held.list, held, seconds=seconds, renews=True)
    held.until = math.inf if gone else began + seconds
    held.renewing = False
    return PutDown.DONE


def reap(incarnation: str, one: Flying) -> Steps:
    """A message that a dead worker had in flight goes the way that REAP has put it on."""
    deleted = one.out in DELETED
    gone = yield Ask(Act.DELETE if deleted else Act.SHOW, one.list, one)
    if gone and not deleted and one.member:  # SQS has none: a failover has lost that it went
        yield Ask(Act.SEND, one.list, None, Entry.parse(one.member).message(one.list).envelope(), one.group)
    yield reaped(incarnation, [one.field])
    return PutDown.DONE


def anew(held: Held) -> Steps:
    """SQS hides no message for longer than 12 h: a copy takes its place. Who gets that hears that the task is busy."""
    if held.member:
        yield calls.sent(held.list, held.member, held.at)
    yield Ask(Act.SEND, held.list, None, held.raw.decode(errors="surrogateescape"), held.group, MAX_DELAY_S)
    yield Ask(Act.DELETE, held.list, held)
    held.receipt = ""
    yield calls.note(held.incarnation, held.list, [(held, True)])
    return PutDown.DONE


def resend(queue: str, entry: bytes) -> Steps:
    """The delay of a kept message is over: it is sent before the store lets go of it."""
    said = json.loads(entry)
    with suppress(Unusable):
        message = read(body_of(entry))
        if found := member(message):
            yield calls.sent(said["list"], found, message.at)
    yield Ask(Act.SEND, said["list"], None, said["body"], said.get("group", ""))
    yield calls.due(queue, 0, sent=[entry])
    return PutDown.DONE
