"""Reads a message: a task's fields as plain JSON, or as the data of a CloudEvent (CloudEvents 1.0).

    {"id": "order-7", "reply_to": "list:answers", "model": "tiny", "prompt": "def main():"}
    {"specversion": "1.0", "id": "order-7", "source": "/orders", "type": "...", "data": {"model": "tiny", ...}}

CloudEvents come in structured mode, or in binary mode, with their attributes as the message's (`ce-id`, ...). Batches
of events are refused: one message is one task.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from producers.errors import InvalidTask, shown
from producers.sources.inbox import Received
from producers.store import idempotency

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
