"""Batch requests to SQS, and the errors of their entries."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final, Protocol

from producers.broker.sqs.hold.errand import Act
from producers.broker.sqs.queues.lookup import Queues
from producers.connection.aws import AwsError, refusal
from producers.connection.trouble import Trouble

#: Most entries of one request.
BATCH: Final = 10
#: A message's own errors that a retry does not mend, by which SQS says that it does not have it, or not in flight.
GONE: Final = frozenset(
    {"ReceiptHandleIsInvalid", "InvalidParameterValue", "AWS.SimpleQueueService.InvalidReceiptHandle"}
)
NOT_IN_FLIGHT: Final = frozenset({"MessageNotInflight", "AWS.SimpleQueueService.MessageNotInflight"})
_DOING: Final = {Act.DELETE: "delete from", Act.SHOW: "change visibilities in", Act.SEND: "send to"}


class Desk(Protocol):
    """Whoever asks SQS."""

    @property
    def sqs(self) -> Any: ...

    @property
    def queues(self) -> Queues: ...


def request(desk: Desk, name: str, act: Act, entries: Sequence[dict[str, Any]]) -> dict[int, AwsError]:
    """One batch request to a list's queue. Returns the refused entries' errors by place. Raises AwsError."""
    asked = [{"Id": str(place), **entry} for place, entry in enumerate(entries)]
    with desk.queues.telling(_DOING[act], name, act.value):
        url = desk.queues.url(name)
        if act is Act.DELETE:
            answer = desk.sqs.delete_message_batch(QueueUrl=url, Entries=asked)
        elif act is Act.SHOW:
            answer = desk.sqs.change_message_visibility_batch(QueueUrl=url, Entries=asked)
        else:
            answer = desk.sqs.send_message_batch(QueueUrl=url, Entries=[_sendable(one, url) for one in asked])
    doing = f"{_DOING[act]} {desk.queues.called(name)}"
    refused = {}
    for one in answer.get("Failed", ()):
        code = one.get("Code", "")
        found = refusal(doing, act.value, code, one.get("Message", ""))
        if found.trouble is None and code not in GONE | NOT_IN_FLIGHT and not one.get("SenderFault", True):
            found = AwsError(str(found), code, Trouble.AWAY)
        refused[int(one["Id"])] = found
    return refused


def _sendable(entry: dict[str, Any], url: str) -> dict[str, Any]:
    """FIFO queues take no delay of a message, and drop for five minutes what has the id of an earlier one."""
    group = entry.pop("group")
    if url.endswith(".fifo"):
        entry.pop("DelaySeconds")
        entry |= {"MessageGroupId": group or str(uuid.uuid4()), "MessageDeduplicationId": str(uuid.uuid4())}
    elif group:
        entry["MessageGroupId"] = group
    return entry
