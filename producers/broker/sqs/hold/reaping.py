"""The plan of REAP, for workers (blocking) and sweepers (asyncio): its scripts, and the requests to SQS between them.

    reap(inc) -> read_reap -> requests -> SQS, `BATCH` messages a request -> reaped(inc, fields)

It may be repeated between any two steps. What SQS does not take is shown by the visibility timeout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from producers.broker.redis import keys as shared
from producers.broker.sqs import keys
from producers.connection.script import Call, script, text
from producers.contract import keys as contract_keys

PACKAGE: Final = "producers.broker.sqs"
#: Messages of one request, at most.
BATCH: Final = 10
#: Ways out (`scripts/out.lua`) whose message is deleted; any other's is shown again.
DELETED: Final = frozenset({"done", "letter", "delay"})


@dataclass(frozen=True, slots=True)
class Flying:
    """A message in flight, as its worker's hash has it. `receipt`: empty where no message of SQS stands for it.

    `member`: its entry in the index. If SQS does not know its receipt, and it was to be shown, it is sent anew.
    """

    field: str
    list: str
    receipt: str
    id: str
    member: str
    out: str = ""
    group: str = ""
    """Its MessageGroupId."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the queue of the list `name`: DeleteMessageBatch, or ChangeMessageVisibilityBatch to 0."""

    name: str
    delete: bool
    messages: Sequence[Flying]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """As boto3 takes them; an entry's Id is its place in `messages`."""
        more = {} if self.delete else {"VisibilityTimeout": 0}
        return [{"Id": str(k), "ReceiptHandle": one.receipt, **more} for k, one in enumerate(self.messages)]


def reap(incarnation: str, looker: str = "", since: int = 0) -> Call:
    """See `read_reap`. `looker`: the incarnation that found it silent, if its lease stands, and `since` which join
    lease values count for it."""
    names = (contract_keys.lease(incarnation), keys.inflight(incarnation), shared.REAPED, shared.INCARNATIONS)
    return Call(script(PACKAGE, "reap"), names, (incarnation, looker, since))


def read_reap(answer: Sequence[Any]) -> tuple[int, list[Flying]]:
    """Messages that this call put on their way back, -1 while the lease stands; and all that are still in flight."""
    flying = [read_flying(text(field), raw) for field, raw in zip(answer[1::2], answer[2::2], strict=True)]
    return int(answer[0]), flying


def read_flying(field: str, raw: bytes | str) -> Flying:
    """A field of the hash of messages in flight, and its value."""
    said = json.loads(raw if isinstance(raw, str) else raw.decode(errors="surrogateescape"))
    return Flying(field, said["list"], said["receipt"], said["id"], said["member"], said.get("out", ""), said["group"])


def requests(flying: Sequence[Flying]) -> list[Request]:
    """The requests to SQS for them. A receipt that has become stale is no error: its message is back already."""

    def kind(one: Flying) -> tuple[str, bool]:
        return one.list, one.out in DELETED

    held = sorted((one for one in flying if one.receipt), key=kind)
    groups = [(key, list(group)) for key, group in groupby(held, key=kind)]
    return [Request(*key, some[at : at + BATCH]) for key, some in groups for at in range(0, len(some), BATCH)]


def reaped(incarnation: str, fields: Sequence[str]) -> Call:
    """Answers how many entries are left, -1 while the lease stands."""
    names = (contract_keys.lease(incarnation), keys.inflight(incarnation), shared.INCARNATIONS)
    return Call(script(PACKAGE, "reaped"), names, (incarnation, *fields))
