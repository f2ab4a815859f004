"""Sends the replies of one source: rows of the outbox, due when a task ends or a message is refused.

    TAKE ─▶ allowed? ─▶ the task's outputs ─▶ send ─▶ DELIVERED      a failure: RETRY, after TRIES of them DEAD

A reply's body is a task with its outputs, as GET /v1/tasks/{id} has it, or why there is none. Killed anywhere, a row is
due again once its lease ends: a reply may come twice, with the same id.

A target is an SQS queue, an SNS topic or a list of the store, by one text each:

    https://sqs.REGION.amazonaws.com/ACCOUNT/NAME      arn:aws:sns:REGION:ACCOUNT:NAME      list:NAME

A message may name one only if the source's settings allow it: else whoever may send a message could make Penstock
write anywhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from redis.asyncio import Redis

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES, once, persistently
from producers.client.wake import wake
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call
from producers.connection.trouble import error_text
from producers.contract.stream import collect, view
from producers.errors import TaskNotFound
from producers.sources.aws import Service, last_part, region_of, too_large
from producers.sources.source import together
from producers.store import outbox
from producers.store.outbox import Attempt, Row

log = logging.getLogger(__name__)

LIST: Final = "list:"
_QUEUE: Final = re.compile(r"https?://[A-Za-z0-9.:-]+/[0-9]{12}/[A-Za-z0-9_-]{1,80}(\.fifo)?")
_TOPIC: Final = re.compile(r"arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_-]{1,256}(\.fifo)?")
#: Lists with names of ours hold our own state.
_LIST: Final = re.compile(r"list:(?!penstock:)[!-~]{1,200}")
FORMS: Final = "an SQS queue's URL, an SNS topic's ARN, or list: and the name of a list in the store"
JSON: Final = "application/json"
EVENT: Final = "application/cloudevents+json"
#: Time (s) in which the outputs of a task that has ended are read.
READ_S: Final = 20.0
#: Most rows that are sent at a time, and their lease (ms): longer than any try.
BATCH_ROWS: Final = 32
LEASE_MS: Final = 60_000
#: Longest try (s), and longest time for telling the store how it ended.
TRY_S, PATIENCE_S = 40.0, 8.0
#: Time (s) for what is on its way when the process stops.
END_S: Final = 5.0
#: Longest time (s) between two looks: rows become due silently, and a wake-up may be lost.
LOOK_S: Final = 1.0
#: Longest pause (s) between two tries, and the try after which a reply is given up: with these pauses, after three days
#: of tries. Tries are counted, not time, so that a reply that is old, or is replayed, has all of them.
LONGEST_S: Final = 300.0
TRIES: Final = 873


def is_queue(target: str) -> bool:
    return _QUEUE.fullmatch(target) is not None


def is_list(target: str) -> bool:
    return _LIST.fullmatch(target) is not None


def is_target(target: str) -> bool:
    """Whether the text has one of the three forms of a target."""
    return is_queue(target) or is_list(target) or _TOPIC.fullmatch(target) is not None


def allowed(target: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the target; `*` in a pattern stands for any text."""
    return is_target(target) and any(
        re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), target) for pattern in patterns
    )


class Targets:
    """Sends messages to targets. Call `close` at the end."""

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


@dataclass(frozen=True, slots=True)
class Reply:
    """A record's or a row's `reply`."""

    source: str
    url: str
    """The target."""
    correlation: str
    """The sender's id of the request."""
    format: str
    error: Mapping[str, Any] | None = None
    """The reason why the message was refused and no task made."""

    @classmethod
    def parse(cls, text: str) -> Reply:
        """Raises ValueError, TypeError or KeyError."""
        fields = json.loads(text)
        return cls(fields["source"], fields["url"], fields["correlation"], fields["format"], fields.get("error"))

    def to_json(self) -> str:
        fields = {"source": self.source, "url": self.url, "correlation": self.correlation, "format": self.format}
        return json.dumps(fields if self.error is None else fields | {"error": dict(self.error)})


async def task_view(client: AsyncClient, row: Row, reply: Reply) -> dict[str, Any]:
    """Returns the task of a row, as a JSON object. Raises redis.exceptions.RedisError or OSError."""
    if reply.error is not None:
        return _without_outputs(None, "failed", dict(reply.error))
    handle = client.get(row.object)
    try:
        record = await handle.status()
        if record.chunks and record.final:  # its rows have up to 64 MiB
            return shortened(view(collect(record, ()))) | {"metadata": record.metadata}
        task = view(await handle.result(READ_S, raise_for_status=False))
        return task | {"metadata": (await handle.status()).metadata}
    except TaskNotFound:
        status = row.type.partition(".")[2]
        why = "The task has ended; its outputs are gone, since its time to live was over before this was sent."
        return _without_outputs(row.object, status, {"code": "task_not_found", "message": why, "param": None})


def shortened(task: Mapping[str, Any]) -> dict[str, Any]:
    """The task without its outputs, for a target that takes no message of this size."""
    why = "The outputs are too large for this target; GET /v1/tasks/{id} has them."
    return {**task, "choices": None, "prompt_logprobs": None, "rows": None} | {"omitted": why}


def body_of(row: Row, reply: Reply, task: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the reply's message, the same at each try, and its media type."""
    data = {**task, "correlation_id": reply.correlation}
    if reply.format == "json":
        return json.dumps(data), JSON
    event = {
        "specversion": "1.0",
        "id": row.webhook_id,
        "source": f"/penstock/{reply.source}",
        "type": f"penstock.{row.type}",
        "subject": reply.correlation,
        "time": datetime.fromtimestamp(row.at, UTC).isoformat(),
        "datacontenttype": JSON,
        "data": data,
    }
    return json.dumps(event), EVENT


def _without_outputs(task_id: str | None, status: str, error: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": task_id, "object": "task", "status": status, "error": error, "choices": None}


class Replies:
    """Sends a source's replies, to targets that fit one of `patterns`. `waiting`: connections to the store that may
    wait; `default`: the settings' own target."""

    def __init__(
        self,
        name: str,
        client: AsyncClient,
        waiting: Redis,
        targets: Targets,
        patterns: Sequence[str],
        default: str | None,
    ) -> None:
        self._name, self._client, self._waiting = name, client, waiting
        self._targets, self._patterns, self._default = targets, patterns, default
        self._due = asyncio.Event()
        self.trouble = ""
        """The reason why the last reply to the settings' own target was not sent; empty if it was sent. A target that a
        message names says nothing about this process."""

    async def run(self) -> None:
        """Send until cancelled; then replies on their way have END_S seconds. Others are due after their leases."""
        try:
            await together(wake(self._waiting, self._due, self._name), self._send_due())
        finally:
            self._targets.close()

    async def _send_due(self) -> None:
        while True:
            self._due.clear()
            try:
                again = await self._whole_round()
            except FAILURES as error:
                warn_throttled(log, "the store does not answer, trying again: %s", error)
                again = False
            if not again:
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._due.wait()
                except TimeoutError:
                    pass

    async def _whole_round(self) -> bool:
        """Run a round. If this is cancelled, the round still has END_S seconds to end."""
        sending = asyncio.create_task(self._round())
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait((sending,), timeout=END_S)
            sending.cancel()
            raise

    async def _round(self) -> bool:
        """Send the replies that are due. Returns whether there may be more."""
        holder = uuid.uuid4().hex
        answer = await self._client.run(once(outbox.take(holder, BATCH_ROWS, LEASE_MS, self._name)))
        rows = outbox.read_take(answer).rows
        await asyncio.gather(*(self._end(row, holder) for row in rows))
        return len(rows) == BATCH_ROWS

    async def _end(self, row: Row, holder: str) -> None:
        """Try a row once, and store the outcome. If the store stays away, the row's lease ends."""
        began, at = time.monotonic(), int(time.time())

        def tried(error: str = "") -> Attempt:
            return Attempt(at, round(1000 * (time.monotonic() - began)), error=error[:1024])

        reply = None
        try:
            reply = Reply.parse(row.reply or "")
            if not allowed(reply.url, self._patterns):
                raise ValueError("the source's settings do not allow this target any more")
            async with asyncio.timeout(TRY_S):
                await self._send(row, reply)
            call = outbox.delivered(row, holder, tried())
            self._note(reply, "")
        except FAILURES as error:
            self._note(reply, error_text(error))
            call = self._failed(row, holder, tried(error_text(error)), error)
        except Exception as error:  # an error that no retry mends must not be tried for ever
            log.exception("reply %s is given up", row.name)
            call = outbox.dead(row, holder, tried(f"{type(error).__name__}: {error}"))
        try:
            await self._client.run(persistently(call, PATIENCE_S))
        except FAILURES as error:
            warn_throttled(log, "the end of a reply could not be stored, it will be sent again: %s", error)

    def _failed(self, row: Row, holder: str, attempt: Attempt, error: BaseException) -> Call:
        """Returns the call that stores a failed try: the next one is due after a pause, or this was the last."""
        if row.tries + 1 >= TRIES:
            log.error("reply %s is given up after %d tries: %s", row.name, row.tries + 1, error)
            return outbox.dead(row, holder, attempt)
        warn_throttled(log, "a reply is not sent yet: %s", error)
        return outbox.retry(row, holder, int(1000 * min(LONGEST_S, 2.0**row.tries)), attempt)

    def _note(self, reply: Reply | None, trouble: str) -> None:
        if reply is not None and reply.url == self._default:
            self.trouble = trouble

    async def _send(self, row: Row, reply: Reply) -> None:
        task = await task_view(self._client, row, reply)
        try:
            await self._send_task(row, reply, task)
        except FAILURES as error:
            if not too_large(error) or task["choices"] is None:
                raise
            await self._send_task(row, reply, shortened(task))

    async def _send_task(self, row: Row, reply: Reply, task: dict[str, Any]) -> None:
        body, content_type = body_of(row, reply, task)
        async with asyncio.timeout(TRY_S / 2):
            await self._targets.send(reply.url, body, key=row.webhook_id, content_type=content_type)
