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
class Asked:
    """A message's request. `fields`: of the task, unchecked."""

    identity: tuple[str, ...]
    """Messages of one source with the same identity ask for the same task."""
    correlation: str
    """The id in the reply: the sender's id, else the message's."""
    format: Format
    fields: Mapping[str, Any] = field(default_factory=dict)
    reply_to: str | None = None
    traceparent: str | None = None

    @property
    def digest(self) -> str:
        """The fields that must be the same where the identity is."""
        return idempotency.digest(json.dumps([self.fields, self.reply_to], sort_keys=True).encode())


def read(message: Received) -> Asked:
    """The message's task. Raises InvalidTask."""
    size = len(message.body.encode("utf-8", "surrogateescape"))
    if size > MAX_BODY:
        raise InvalidTask(f"the message has {size} bytes; at most {MAX_BODY} are taken")
    attributes = {name.lower(): value for name, value in message.attributes.items()}
    if any(name.startswith(BINARY) for name in attributes):
        event = {name.removeprefix(BINARY): text for name, text in attributes.items() if name.startswith(BINARY)}
        _check_type(attributes.get("content-type"), "content-type")
        return _of_event(event, _parsed(message.body))
    said = _parsed(message.body)
    if isinstance(said, list):
        raise InvalidTask("the message is a list; events come one in a message, not as a batch", code="invalid_type")
    if not isinstance(said, dict):
        raise InvalidTask(f"the message is {shown(said)}; it must be a JSON object", code="invalid_type")
    if "specversion" in said:
        _check_type(said.get("datacontenttype"), "datacontenttype")
        return _of_event(said, _data(said))
    return _plain(message, said)


def _plain(message: Received, said: Mapping[str, Any]) -> Asked:
    fields = {name: value for name, value in said.items() if name not in ("id", "reply_to")}
    own, reply_to = _text(said, "id"), _text(said, "reply_to")
    identity = ("message", message.id) if own is None else ("id", own)
    return Asked(identity, own or message.id, "json", fields, reply_to)


def _of_event(event: Mapping[str, Any], data: Any) -> Asked:
    for name in REQUIRED:
        if _text(event, name) is None:
            raise InvalidTask(f"the CloudEvent has no {name}", param=name, code="missing_parameter")
    if event["specversion"] != "1.0":
        raise InvalidTask(f"specversion is {shown(event['specversion'])}; 1.0 is taken", param="specversion")
    if not isinstance(data, dict):
        raise InvalidTask(f"data is {shown(data)}; it must be a task's JSON object", param="data", code="invalid_type")
    identity = ("event", event["source"], event["id"])
    trace = event.get("traceparent")
    return Asked(identity, event["id"], "cloudevents", data, _text(event, "replyto"), trace)


def _data(event: Mapping[str, Any]) -> Any:
    """The data of an event in structured mode. Raises InvalidTask."""
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


def _check_type(said: Any, param: str) -> None:
    """Raise InvalidTask unless it is JSON's media type, or none."""
    kind = said.partition(";")[0].strip().lower() if isinstance(said, str) else said
    if kind is not None and not (isinstance(kind, str) and kind.endswith(("/json", "+json"))):
        raise InvalidTask(f"{param} is {shown(said)}; an event's data must be JSON", param=param)


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


def _text(said: Mapping[str, Any], name: str) -> str | None:
    """A text of bounded length; None if there is none. Raises InvalidTask."""
    value = said.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID or not value.isprintable():
        raise InvalidTask(f"{name} is {shown(value)}; it must be text of 1 to {MAX_ID} characters", param=name)
    return value
