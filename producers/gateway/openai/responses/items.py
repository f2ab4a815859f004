"""The items of a conversation: messages of text, as requests give, templates read and `input_items` lists them.

input: text | messages of parts -> Item -> kept in the record -> message of a template | item of the API
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from producers.contract.chat import BETWEEN_PARTS, MAX_MESSAGES, read_string, refused, too_many
from producers.errors import InvalidTask, shown

#: Role -> the type of its text parts.
ROLES: Final = {"user": "input_text", "system": "input_text", "developer": "input_text", "assistant": "output_text"}
#: Fields of a message beside role, content and type; clients send them back as received, and none changes the prompt.
AS_RECEIVED: Final = ("id", "status", "phase")
_PART: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
}
#: The JSON schema of `input`, for OpenAPI.
INPUT: Final[dict[str, Any]] = {
    "description": "text, which is a user's message, or a list of messages",
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "type": {"const": "message"},
                    "role": {"enum": list(ROLES)},
                    "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _PART}]},
                    **{name: {"type": ["string", "null"]} for name in AS_RECEIVED},
                },
                "additionalProperties": False,
            },
        },
    ],
}


@dataclass(frozen=True, slots=True)
class Item:
    """One message. `texts`: its parts."""

    id: str
    role: str
    texts: tuple[str, ...]

    @classmethod
    def new(cls, role: str, *texts: str) -> Self:
        return cls(f"msg_{uuid.uuid4().hex}", role, texts)

    @classmethod
    def of(cls, kept: Sequence[Any]) -> Self:
        """The item that `kept` gave."""
        return cls(kept[0], kept[1], tuple(kept[2]))

    @property
    def kept(self) -> list[Any]:
        """The item as its record has it, as JSON."""
        return [self.id, self.role, list(self.texts)]

    @property
    def message(self) -> dict[str, Any]:
        """The item as chat templates take it."""
        return {"role": self.role, "content": BETWEEN_PARTS.join(self.texts)}

    @property
    def view(self) -> dict[str, Any]:
        """The item as callers see it."""
        kind = ROLES[self.role]
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        content = [{"type": kind, "text": text, **more} for text in self.texts]
        return {"id": self.id, "type": "message", "role": self.role, "status": "completed", "content": content}


def read_input(value: Any) -> list[Item]:
    """The items of `input`. Raises InvalidTask, which names the item and the field."""
    if isinstance(value, str):
        return [Item.new("user", read_string(value, "input"))]
    if not isinstance(value, list):
        raise refused("input", value, "text or a list of messages", "invalid_type")
    if not value:
        raise InvalidTask("input is empty; give text, or at least one message", code="empty_array", param="input")
    if len(value) > MAX_MESSAGES:
        raise too_many(len(value), "input")
    return [_message(item, f"input[{at}]") for at, item in enumerate(value)]


def _message(item: Any, parameter: str) -> Item:
    if not isinstance(item, dict):
        raise refused(parameter, item, "a message with role and content", "invalid_type")
    if item.get("type", "message") != "message":
        raise InvalidTask(
            f"{parameter}.type is {shown(item['type'])}, which is not offered here; give messages alone",
            code="unsupported_parameter",
            param=f"{parameter}.type",
        )
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refused(f"{parameter}.role", role, f"one of {', '.join(ROLES)}")
    unknown = next((name for name in item if name not in ("type", "role", "content", *AS_RECEIVED)), None)
    if unknown is not None:
        raise InvalidTask(
            f"{parameter} has {shown(unknown)}; a message has role and content",
            code="unknown_parameter",
            param=f"{parameter}.{unknown}",
        )
    return Item.new(role, *_content(item.get("content"), f"{parameter}.content"))


def _content(content: Any, parameter: str) -> list[str]:
    if isinstance(content, str):
        return [read_string(content, parameter)]
    if not isinstance(content, list) or not content:
        raise refused(parameter, content, "text or a list of text parts", "invalid_type")
    return [_part(part, f"{parameter}[{at}]") for at, part in enumerate(content)]


def _part(part: Any, parameter: str) -> str:
    if not isinstance(part, dict):
        raise refused(parameter, part, 'an object like {"type": "input_text", "text": "..."}', "invalid_type")
    if part.get("type") not in ("input_text", "output_text"):
        raise refused(
            f"{parameter}.type",
            part.get("type"),
            '"input_text" or "output_text": no other kind of content is offered here',
        )
    return read_string(part.get("text"), f"{parameter}.text")
