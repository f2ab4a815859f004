"""An SQS queue as an inbox."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from producers.connection.aws import AwsError, refusal
from producers.connection.log_throttle import warn_throttled
from producers.connection.trouble import Trouble
from producers.sources.aws import Service, last_part, region_of, too_large
from producers.sources.inbox import Inbox, Received

log = logging.getLogger(__name__)

#: Time (s) for which a received message is hidden, and for which a receive waits: a stop waits for it, too.
HIDDEN_S: Final = 60
WAIT_S: Final = 5
#: Time (s) until a bad message that stays in its queue is received again, until the redrive policy moves it.
BAD_AGAIN_S: Final = 10
#: Longest text (characters) of an attribute that says why a message is bad.
REASON: Final = 1024
#: Longest body, and longest of its sender's attributes, (characters) of a letter that is shortened.
SHORT_BODY, SHORT_ATTRIBUTE = 4096, 256


class SqsInbox(Inbox):
    """A queue by its URL. `visibility`: seconds for which a received message is hidden, renewed at half.

    `dead_letters`: the URL of the queue for bad messages; without it they are left to the queue's redrive policy.
    """

    def __init__(
        self,
        url: str,
        *,
        dead_letters: str | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        visibility: int = HIDDEN_S,
    ) -> None:
        self._url, self._dead_letters, self.hidden_s = url, dead_letters, visibility
        self._sqs = Service("sqs", region or region_of(url), endpoint_url, wait_s=WAIT_S)
        self._called = f"queue {last_part(url)}"

    async def open(self) -> None:
        """Raises AwsError, also for a queue that would give bad messages again and again."""
        doing = f"read the settings of {self._called}"
        said = await self._sqs.call("get_queue_attributes", doing, QueueUrl=self._url, AttributeNames=["All"])
        if self._dead_letters is None and "RedrivePolicy" not in said.get("Attributes", {}):
            raise AwsError(
                f"{self._called} has no redrive policy, so that bad messages would come again and again: give it one, "
                "or name a queue for them as dead_letters",
                "UnfitQueue",
                Trouble.UNUSABLE,
            )

    async def receive(self) -> list[Received]:
        answer = await self._sqs.call(
            "receive_message",
            f"receive from {self._called}",
            QueueUrl=self._url,
            MaxNumberOfMessages=10,
            WaitTimeSeconds=WAIT_S,
            VisibilityTimeout=int(self.hidden_s),
            MessageAttributeNames=["All"],
        )
        return [_received(one) for one in answer.get("Messages", ())]

    async def remove(self, messages: Sequence[Received]) -> None:
        entries = [{"Id": str(at), "ReceiptHandle": one.receipt} for at, one in enumerate(messages)]
        await self._batch("delete_message_batch", f"remove messages of {self._called}", entries)

    async def hide(self, messages: Sequence[Received], seconds: float) -> None:
        entries = [
            {"Id": str(at), "ReceiptHandle": one.receipt, "VisibilityTimeout": int(seconds)}
            for at, one in enumerate(messages)
        ]
        await self._batch("change_message_visibility_batch", f"hide messages of {self._called}", entries)

    async def bury(self, message: Received, reason: str) -> None:
        """Move a message to the queue of dead letters. If it dies in between, the letter may be there twice.

        What is too large for that queue is shortened. What it refuses for all that stays, as without such a queue.
        """
        if self._dead_letters is None:
            return await self.hide([message], BAD_AGAIN_S)
        try:
            await self._send_letter(self._dead_letters, message, reason)
        except AwsError as error:
            if error.trouble is not None:
                raise
            warn_throttled(log, "a bad message stays in %s: %s", self._called, error)
            return await self.hide([message], BAD_AGAIN_S)
        await self.remove([message])

    async def _send_letter(self, queue: str, message: Received, reason: str) -> None:
        try:
            await self._send(queue, message, reason)
        except AwsError as error:
            if not too_large(error):
                raise
            await self._send(queue, _shortened(message), reason)

    async def _send(self, queue: str, message: Received, reason: str) -> None:
        said = {**dict(list(message.attributes.items())[:8]), "penstock-reason": reason[:REASON]}
        said["penstock-message-id"] = message.id
        attributes = {name: {"DataType": "String", "StringValue": text} for name, text in said.items() if text}
        fifo = {"MessageGroupId": "dead", "MessageDeduplicationId": message.id}
        await self._sqs.call(
            "send_message",
            f"send to queue {last_part(queue)}",
            QueueUrl=queue,
            MessageBody=message.body,
            MessageAttributes=attributes,
            **(fifo if queue.endswith(".fifo") else {}),
        )

    def close(self) -> None:
        self._sqs.close()

    async def _batch(self, operation: str, doing: str, entries: list[dict[str, Any]]) -> None:
        """One call for all. A receipt that is out of date is no error: the message is received again, or is gone.

        Raises AwsError where an entry failed by no fault of ours.
        """
        if not entries:
            return
        answer = await self._sqs.call(operation, doing, QueueUrl=self._url, Entries=entries)
        for failed in answer.get("Failed", ()):
            if not failed.get("SenderFault"):
                raise refusal(doing, "sqs", failed.get("Code", ""), failed.get("Message", ""))
            warn_throttled(log, "cannot %s: %s", doing, failed.get("Code"))


def _shortened(message: Received) -> Received:
    """Its beginning, and an attribute with the length (characters) of its whole body."""
    attributes = {"penstock-shortened": str(len(message.body))}
    attributes |= {name: text[:SHORT_ATTRIBUTE] for name, text in message.attributes.items()}
    return replace(message, body=message.body[:SHORT_BODY], attributes=attributes)


def _received(raw: dict[str, Any]) -> Received:
    attributes = {
        name: value["StringValue"] for name, value in raw.get("MessageAttributes", {}).items() if "StringValue" in value
    }
    return Received(raw["MessageId"], raw["Body"], attributes, raw["ReceiptHandle"])
