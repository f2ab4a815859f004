"""Targets of replies: SQS queues, SNS topics and lists of the store, by one text each.

    https://sqs.REGION.amazonaws.com/ACCOUNT/NAME      arn:aws:sns:REGION:ACCOUNT:NAME      list:NAME

A message may name one only if the source's settings allow it: else whoever may send a message could make Penstock
write anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from redis.asyncio import Redis

from producers.sources.aws import Service, last_part, region_of

LIST: Final = "list:"
_QUEUE: Final = re.compile(r"https?://[A-Za-z0-9.:-]+/[0-9]{12}/[A-Za-z0-9_-]{1,80}(\.fifo)?")
_TOPIC: Final = re.compile(r"arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_-]{1,256}(\.fifo)?")
#: Lists with names of ours hold our own state.
_LIST: Final = re.compile(r"list:(?!penstock:)[!-~]{1,200}")
FORMS: Final = "an SQS queue's URL, an SNS topic's ARN, or list: and the name of a list in the store"


def is_queue(target: str) -> bool:
    return _QUEUE.fullmatch(target) is not None


def is_list(target: str) -> bool:
    return _LIST.fullmatch(target) is not None


def is_target(target: str) -> bool:
    """Whether it has one of the three forms."""
    return is_queue(target) or is_list(target) or _TOPIC.fullmatch(target) is not None


def allowed(target: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern names it; `*` in a pattern stands for any text."""
    return is_target(target) and any(
        re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), target) for pattern in patterns
    )


class Targets:
    """Sends messages to targets. `close` it."""

    def __init__(self, store: Redis, region: str | None, endpoint_url: str | None) -> None:
        self._store = store
        self._region, self._endpoint = region, endpoint_url
        self._services: dict[tuple[str, str | None], Service] = {}

    async def send(self, target: str, body: str, *, key: str, content_type: str) -> None:
        """Send a message. `key`: the same at each try.

        Raises AwsError, redis.exceptions.RedisError or OSError.
        """
        if is_list(target):
            await self._store.execute_command("RPUSH", target.removeprefix(LIST), body)
            return
        more: dict[str, Any] = {
            "MessageAttributes": {"content-type": {"DataType": "String", "StringValue": content_type}}
        }
        if target.endswith(".fifo"):
            more |= {"MessageGroupId": key, "MessageDeduplicationId": key}
        if is_queue(target):
            doing = f"send to queue {last_part(target)}"
            await self._service("sqs", target).call("send_message", doing, QueueUrl=target, MessageBody=body, **more)
        else:
            doing = f"publish to topic {last_part(target)}"
            await self._service("sns", target).call("publish", doing, TopicArn=target, Message=body, **more)

    def close(self) -> None:
        for service in self._services.values():
            service.close()

    def _service(self, name: str, target: str) -> Service:
        region = self._region or region_of(target)
        if (name, region) not in self._services:
            self._services[name, region] = Service(name, region, self._endpoint)
        return self._services[name, region]
