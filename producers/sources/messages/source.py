"""The source type `messages`: each message becomes one task, and is removed once the task is queued.

read ─▶ IDEMPOTENT, ADMIT, send, QUEUED ─▶ remove ─▶ the key is kept a day longer
  └──────── refused: a row with the reply ─▶ bury

**Messages.** Reads a message: a task's fields as plain JSON, or as the data of a CloudEvent (CloudEvents 1.0).

    {"id": "order-7", "reply_to": "list:answers", "model": "tiny", "prompt": "def main():"}
    {"specversion": "1.0", "id": "order-7", "source": "/orders", "type": "...", "data": {"model": "tiny", ...}}

CloudEvents come in structured mode, or in binary mode, with their attributes as the message's (`ce-id`, ...). Batches
of events are refused: one message is one task.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from redis.asyncio import Redis

from producers.client.operations import submit_as
from producers.client.submission import TASK
from producers.connection.connect import SILENT_S, connect_async
from producers.connection.script import arun
from producers.contract import keys
from producers.contract.fields import MAX_TENANT
from producers.contract.record import trace_fields
from producers.contract.task import Task
from producers.errors import InvalidTask, PenstockError, TaskErased, TaskExists, shown
from producers.sources.inbox import BadMessage, Consumer, Inbox, ListInbox, Received, SqsInbox
from producers.sources.messages.replies import (
    FORMS,
    LIST,
    Replies,
    Reply,
    Targets,
    allowed,
    is_list,
    is_queue,
    is_target,
)
from producers.sources.source import Context, Source, SourceSettings, as_tuple, fitting, together
from producers.store import idempotency, outbox

Format = Literal["json", "cloudevents"]

#: Longest body (bytes), as of the gateway's requests; longest id and `reply_to` (characters).
MAX_BODY: Final = 4 << 20
MAX_ID: Final = 255
REQUIRED: Final = ("id", "source", "specversion", "type")
#: The begin of names of message attributes that are a CloudEvent's.
BINARY: Final = "ce-"


@dataclass(frozen=True, slots=True)
class Request:
    """The request in a message. `fields`: those of the task, unchecked."""

    identity: tuple[str, ...]
    """Messages of one source with the same identity request the same task."""
    correlation: str
    """The id in the reply: the sender's if there is one, else the message's."""
    format: Format
    fields: Mapping[str, Any] = field(default_factory=dict)
    reply_to: str | None = None
    traceparent: str | None = None

    @property
    def digest(self) -> str:
        """The fields that must be the same where the identity is."""
        return idempotency.digest(json.dumps([self.fields, self.reply_to], sort_keys=True).encode())


def read(message: Received) -> Request:
    """Parse a message. Raises InvalidTask."""
    size = len(message.body.encode("utf-8", "surrogateescape"))
    if size > MAX_BODY:
        raise InvalidTask(f"the message has {size} bytes; at most {MAX_BODY} are taken")
    attributes = {name.lower(): value for name, value in message.attributes.items()}
    if any(name.startswith(BINARY) for name in attributes):
        event = {name.removeprefix(BINARY): text for name, text in attributes.items() if name.startswith(BINARY)}
        _check_type(attributes.get("content-type"), "content-type")
        return _of_event(event, _parsed(message.body))
    body = _parsed(message.body)
    if isinstance(body, list):
        raise InvalidTask("the message is a list; events come one in a message, not as a batch", code="invalid_type")
    if not isinstance(body, dict):
        raise InvalidTask(f"the message is {shown(body)}; it must be a JSON object", code="invalid_type")
    if "specversion" in body:
        _check_type(body.get("datacontenttype"), "datacontenttype")
        return _of_event(body, _data(body))
    return _plain(message, body)


def _plain(message: Received, body: Mapping[str, Any]) -> Request:
    fields = {name: value for name, value in body.items() if name not in ("id", "reply_to")}
    sender_id, reply_to = _text(body, "id"), _text(body, "reply_to")
    identity = ("message", message.id) if sender_id is None else ("id", sender_id)
    return Request(identity, sender_id or message.id, "json", fields, reply_to)


def _of_event(event: Mapping[str, Any], data: Any) -> Request:
    for name in REQUIRED:
        if _text(event, name) is None:
            raise InvalidTask(f"the CloudEvent has no {name}", param=name, code="missing_parameter")
    if event["specversion"] != "1.0":
        raise InvalidTask(f"specversion is {shown(event['specversion'])}; 1.0 is taken", param="specversion")
    if not isinstance(data, dict):
        raise InvalidTask(f"data is {shown(data)}; it must be a task's JSON object", param="data", code="invalid_type")
    identity = ("event", event["source"], event["id"])
    trace = event.get("traceparent")
    return Request(identity, event["id"], "cloudevents", data, _text(event, "replyto"), trace)


def _data(event: Mapping[str, Any]) -> Any:
    """Returns the data of an event in structured mode. Raises InvalidTask."""
    if "data_base64" not in event:
        return event.get("data")
    if "data" in event:
        raise InvalidTask("data and data_base64 are both given; an event has one of them", param="data_base64")
    try:
        return _parsed(base64.b64decode(event["data_base64"], validate=True).decode())
    except (binascii.Error, TypeError, ValueError) as error:
        if isinstance(error, InvalidTask):
            raise
        raise InvalidTask(f"data_base64 is not base64 of UTF-8: {error}", param="data_base64") from None


def _check_type(value: Any, param: str) -> None:
    """Raise InvalidTask unless the value is a media type of JSON, or None."""
    media_type = value.partition(";")[0].strip().lower() if isinstance(value, str) else value
    if media_type is not None and not (isinstance(media_type, str) and media_type.endswith(("/json", "+json"))):
        raise InvalidTask(f"{param} is {shown(value)}; an event's data must be JSON", param=param)


def _parsed(body: str) -> Any:
    try:
        body.encode()
        return json.loads(body, parse_constant=_no_number)
    except UnicodeEncodeError as error:
        raise InvalidTask(f"the message is not UTF-8: bad byte at {error.start}", code="invalid_utf8") from None
    except (ValueError, RecursionError) as error:
        raise InvalidTask(f"the message is not JSON: {error}", code="invalid_json") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    """Returns a field's text, of bounded length; None if the field is missing. Raises InvalidTask."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID or not value.isprintable():
        raise InvalidTask(f"{name} is {shown(value)}; it must be text of 1 to {MAX_ID} characters", param=name)
    return value


log = logging.getLogger(__name__)

#: Time (s) for which a message's key is kept before it is removed: longer than SQS keeps a message.
UNREMOVED_S: Final = 15 * 24 * 3600
#: Time (s) from then on, in which a sender's repetition makes no second task.
REMOVED_S: Final = idempotency.KEPT_S

#: Task fields that make no sense for all messages of a source.
PER_MESSAGE: Final = ("prompt", "messages", "metadata", "seed")
QUEUE: Final = "an SQS queue's URL, or list: and the name of a list in the store"
Patterns = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]


class MessagesSettings(SourceSettings):
    """Messages of one queue, and what becomes of them."""

    type: Literal["messages"]
    queue: Annotated[str, fitting(lambda value: is_queue(value) or is_list(value), QUEUE)] = Field(description=QUEUE)
    dead_letters: str | None = Field(None, description="the URL of an SQS queue for bad messages")
    visibility: int = Field(60, ge=10, le=3600, description="10 to 3600 seconds")
    task: dict[str, Any] = Field(default_factory=dict, description="a table of fields that messages may leave out")
    tenant: str | None = Field(
        None, min_length=1, max_length=MAX_TENANT, description="a tenant's name, whatever a message says"
    )
    reply: Annotated[str, fitting(is_target, FORMS)] | None = Field(None, description=FORMS)
    reply_allow: Patterns = Field((), description="a list of targets that messages may name; * stands for any text")
    reply_format: Format | None = Field(None, description='"json" or "cloudevents"; unset: as the message came')
    region: str | None = Field(None, min_length=1, description="an AWS region; unset: the one in the queue's URL")
    endpoint_url: str | None = Field(None, min_length=1, description="the URL of another server than AWS's own")

    @field_validator("task")
    @classmethod
    def _a_task(cls, value: dict[str, Any]) -> dict[str, Any]:
        misplaced = next((name for name in PER_MESSAGE if name in value), None)
        if misplaced is not None:
            raise ValueError(f"it has {misplaced}, which each message must say itself")
        try:
            Task(**{"model": "any", "prompt": "x", **value})
        except InvalidTask as error:
            raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.dead_letters is not None and not (is_queue(self.queue) and is_queue(self.dead_letters)):
            at = f"those of a list are in {self.queue.removeprefix(LIST)}:dead" if is_list(self.queue) else ""
            raise ValueError(f"dead_letters: it must be an SQS queue's URL, for an SQS queue; {at}".rstrip("; "))
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        """Patterns of the targets that replies may have."""
        return self.reply_allow if self.reply is None else (*self.reply_allow, self.reply)

    def task_of(self, fields: Mapping[str, Any]) -> Task:
        """Make the task of a message's fields. Raises InvalidTask."""
        overrides = {} if self.tenant is None else {"tenant": self.tenant}
        return Task.parse({**self.task, **fields, **overrides})

    def source(self, name: str, context: Context) -> Source:
        return Messages(name, self, context)


SETTINGS = MessagesSettings


class Messages(Source):
    """One table of type "messages"."""

    def __init__(self, name: str, settings: MessagesSettings, context: Context) -> None:
        self.name, self._settings, self._client = name, settings, context.client
        self._store_url, self._outcomes = context.store_url, context.outcomes
        self._outcomes.begin(name)
        self._replies: Replies | None = None
        self._consumer: Consumer | None = None

    async def run(self) -> None:
        waiting = connect_async(self._store_url)
        inbox = self._inbox(waiting)
        refused = partial(self._outcomes.add, self.name, "refused")
        self._consumer = Consumer(self.name, inbox, self._handle, self._removed, refused)
        settings = self._settings
        targets = Targets(self._client.store, settings.region, settings.endpoint_url)
        self._replies = Replies(self.name, self._client, waiting, targets, settings.targets, settings.reply)
        try:
            await together(self._consumer.run(), self._replies.run())
        finally:
            inbox.close()
            await waiting.aclose()

    def unready(self) -> list[str]:
        parts = (self._consumer, self._replies)
        return [part.trouble for part in parts if part is not None and part.trouble]

    def _inbox(self, waiting: Redis) -> Inbox:
        settings = self._settings
        if is_list(settings.queue):
            return ListInbox(self._client.store, waiting, settings.queue.removeprefix(LIST), settings.visibility)
        return SqsInbox(
            settings.queue,
            dead_letters=settings.dead_letters,
            region=settings.region,
            endpoint_url=settings.endpoint_url,
            visibility=settings.visibility,
        )

    async def _handle(self, message: Received) -> None:
        """Submit a message's task. Raises BadMessage, after the reply to its sender is in the outbox."""
        request = Request(("message", message.id), message.id, "json")
        try:
            request = read(message)
            await self._submit(request)
        except TaskErased:  # the message came once more
            log.info("source %s: the task of message %s was deleted", self.name, message.id)
        except (InvalidTask, TaskExists) as refused:
            await self._refuse(request, refused)
            raise BadMessage(str(refused)) from refused

    async def _submit(self, request: Request) -> None:
        reply = self._reply(request)
        task = self._settings.task_of(request.fields)
        more = {**TASK, **trace_fields(request.traceparent)}
        if reply is not None:
            more["reply"] = reply.to_json()
        entry, task_id = self._entry(request), self._task_id(request)
        client = self._client  # `withdrawn`: what came waits here as it would wait at its source
        steps = submit_as(
            client.directory, task, entry, request.digest, task_id, client.patience, more, UNREMOVED_S, withdrawn=True
        )
        if await client.run(steps) is None:
            raise InvalidTask(
                "an earlier message with this id asked for something else; give each message an id of its own",
                param="id",
                code="idempotency_key_reused",
            )

    def _reply(self, request: Request, *, strict: bool = True) -> Reply | None:
        """Returns the reply's target and form. If the target is not allowed, raises InvalidTask if `strict`, else takes
        the settings' own target."""
        target = request.reply_to or self._settings.reply
        if target is not None and not allowed(target, self._settings.targets):
            if strict:
                raise InvalidTask("reply_to is not among the targets that this source allows", param="reply_to")
            target = self._settings.reply
        if target is None:
            return None
        return Reply(self.name, target, request.correlation, self._settings.reply_format or request.format)

    async def _refuse(self, request: Request, error: PenstockError) -> None:
        """Put the reply to a bad message into the outbox, once."""
        if (reply := self._reply(request, strict=False)) is None:
            return
        details = {
            "code": getattr(error, "code", "invalid_value"),
            "message": str(error),
            "param": getattr(error, "param", None),
        }
        refusal = Reply(reply.source, reply.url, reply.correlation, reply.format, details)
        webhook_id = f"evt_{idempotency.digest(self._entry(request).encode(), request.digest.encode())[:40]}"
        row = {
            "webhook_id": webhook_id,
            "type": "response.failed",
            "object": self._task_id(request),
            "url": reply.url,
            "source": self.name,
            "reply": refusal.to_json(),
        }
        async with asyncio.timeout(SILENT_S):
            await arun(self._client.store, outbox.put(f"{webhook_id}.reply", row))

    async def _removed(self, messages: Sequence[Received]) -> None:
        """Count removed messages, and keep their keys for a day: no more is promised for a sender's repetition."""
        self._outcomes.add(self.name, "done", len(messages))
        async with asyncio.timeout(SILENT_S), self._client.store.pipeline(transaction=False) as pipe:
            for message in messages:
                pipe.expire(self._entry(read(message)), REMOVED_S)
            await pipe.execute()

    def _entry(self, request: Request) -> str:
        return keys.idempotency(self._identity(request))

    def _task_id(self, request: Request) -> str:
        return f"{self.name}-{self._identity(request)[:32]}"

    def _identity(self, request: Request) -> str:
        return idempotency.digest(json.dumps(["source", self.name, *request.identity]).encode())
