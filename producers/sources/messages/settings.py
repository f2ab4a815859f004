"""A table of type "messages"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from producers.contract.task import MAX_TENANT, Task
from producers.errors import InvalidTask
from producers.sources.messages.envelope import Format
from producers.sources.messages.targets import FORMS, LIST, is_list, is_queue, is_target
from producers.sources.source import Context, Source, SourceSettings, as_tuple, fitting

#: Task fields that make no sense for all messages of a source.
_OWN: Final = ("prompt", "messages", "metadata", "seed")
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
        own = next((name for name in _OWN if name in value), None)
        if own is not None:
            raise ValueError(f"it has {own}, which each message must say itself")
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
        """Patterns of where replies may go."""
        return self.reply_allow if self.reply is None else (*self.reply_allow, self.reply)

    def task_of(self, fields: Mapping[str, Any]) -> Task:
        """The task of a message's fields. Raises InvalidTask."""
        own = {} if self.tenant is None else {"tenant": self.tenant}
        return Task.parse({**self.task, **fields, **own})

    def source(self, name: str, context: Context) -> Source:
        from producers.sources.messages.source import Messages

        return Messages(name, self, context)
