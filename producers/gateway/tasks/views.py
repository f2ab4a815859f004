"""The JSON that callers see. Times are unix seconds by the store's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, Literal, Self, TypeVar, cast

from pydantic import BaseModel, Field, ValidationError

from producers.contract.record import Kind, Record, trace_id
from producers.errors import BrokenRecord

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]

#: A time of a task as it is shown -> as its record has it.
TIMES: Final = {
    "queued": "queued",
    "started": "started",
    "first_token": "first",
    "finished": "finished",
    "settled": "settled",
}


class Named(BaseModel):
    """A record with an id."""

    id: str


N = TypeVar("N", bound=Named)


class Page(BaseModel, Generic[N]):
    """A page of a list, as OpenAI has them."""

    object: Literal["list"] = "list"
    data: list[N]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, rows: Sequence[N], limit: int) -> Self:
        """The first `limit` of what was found; one more was asked for, which says whether there is more."""
        data = [*rows[:limit]]
        ids: list[str | None] = [row.id for row in data] or [None]
        return cls(data=data, first_id=ids[0], last_id=ids[-1], has_more=len(rows) > limit)


class TopLogprob(BaseModel):
    token_id: int
    logprob: float


class TokenLogprobs(BaseModel):
    """A token's log probabilities: natural logarithms, before any parameter changes them."""

    logprob: float
    top: list[TopLogprob] = Field(description="the most likely tokens at this place, as many as were asked for")


class PromptToken(BaseModel):
    """A token of the prompt with its log probability given those before it; the first token has none."""

    token_id: int
    logprob: float | None
    top: list[TopLogprob]


class ChoiceView(BaseModel):
    """One of a task's `n` outputs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = Field(
        description="stop, length, deadline, or null where the task ended before the output did"
    )
    logprobs: list[TokenLogprobs | None] | None = Field(None, description="one entry a token, where asked for")


class WebhookView(BaseModel):
    """A task's own webhook, without its secret."""

    url: str
    events: list[str]


class EtaView(BaseModel):
    """Seconds from now by which a half and nine tenths of such tasks end."""

    p50_s: float
    p90_s: float


class TaskView(BaseModel):
    """A task. `choices`, `usage` and `error` are set once it is final.

    So is `prompt_logprobs`, one element a token of the prompt, if they were requested.
    """

    id: str
    object: Literal["task"] = "task"
    kind: Kind = "task"
    """How it came: by `/v1/tasks` or the client (task), by OpenAI's endpoints (request), as a background response, in a
    batch, or by Celery."""
    status: Status
    model: str
    version: str | None = None
    """The version of the model that it goes to, or that made its output."""
    alias: str | None = None
    """The alias that led to that version, where the model has a routing or the task names one."""
    generation: int | None = None
    """The generation of the model's routing by which it got its version."""
    tier: str
    tenant: str | None = None
    order_key: str | None = None
    n: int
    created_at: float
    queued_at: float | None = None
    started_at: float | None = None
    first_step_at: float | None = Field(None, description="when its first worker began to compute it; null in lists")
    first_token_at: float | None = None
    last_token_at: float | None = Field(None, description="once its worker is done with it; null in lists")
    finished_at: float | None = None
    settled_at: float | None = None
    metadata: dict[str, str] = {}
    webhook: WebhookView | None = None
    retried_from: str | None = None
    """Id of the task that this one repeats."""
    shortened_to: int | None = Field(None, description="output tokens of a choice to which overload shortened it")
    trace_id: str | None = None
    """The trace of the `traceparent` that came with it."""
    waits_for: str | None = Field(
        None, description="what it waits for; null where it has begun, or the request did not wait (Prefer: wait)"
    )
    eta: EtaView | None = Field(
        None,
        description="when it ends, by what workers measured; null if it has ended or nobody can tell, and in lists",
    )
    usage: dict[str, int] | None = None
    engine_seconds: float | None = Field(
        None, description="the engine's time for it, of all its starts, as far as workers have noted it; null in lists"
    )
    joules: float | None = Field(
        None, description="what devices drew for it in that time; null where workers have no meter, and in lists"
    )
    cost: str | None = Field(
        None, description="of its tokens, by the gateway's prices of today; null without one, and in lists"
    )
    currency: str | None = None
    error: dict[str, Any] | None = None
    choices: list[ChoiceView] | None = None
    prompt_logprobs: list[PromptToken] | None = None
    rows: list[list[float] | list[dict[str, Any]] | dict[str, Any]] | None = Field(
        None,
        description="of a completed task that generates nothing, for each text: a vector, the probabilities of labels "
        "in order, a score, or a list of its labelled parts",
    )

    @classmethod
    def of(cls, record: Record) -> Self:
        """The view of a record, without outputs; `outcome` adds those to the JSON of a final one. Raises
        BrokenRecord."""
        try:
            return cls._of(record)
        except ValidationError as error:
            raise BrokenRecord(record.id, str(error.errors()[0]["loc"][0])) from error

    @classmethod
    def _of(cls, record: Record) -> Self:
        times = {f"{its}_at": record.time(name) for its, name in TIMES.items()}
        times |= {"first_step_at": record.first_step, "last_token_at": record.last_token}
        shown: dict[str, Any] = {name: None if ms is None else ms / 1000 for name, ms in times.items()}
        return cls(
            id=record.id,
            kind=record.kind,
            status=cast(Status, record.status),
            model=record.model,
            version=record.fields.get("version"),
            alias=record.fields.get("alias"),
            generation=record.count("generation") or None,
            tier=record.tier,
            tenant=record.fields.get("tenant"),
            order_key=record.fields.get("order_key"),
            n=record.n,
            created_at=record.count("created", None) / 1000,
            **shown,
            metadata=record.metadata,
            webhook=record.json("webhook"),
            retried_from=record.fields.get("retried_from"),
            shortened_to=(record.json("shortened") or {}).get("to"),
            trace_id=trace_id(record.fields.get("traceparent")),
            usage=record.json("usage"),
            engine_seconds=record.engine_seconds,
            joules=record.joules,
            error=record.json("error"),
        )


class Cancelled(TaskView):
    """The answer to a cancel: the task, with its outputs if it is final and the caller may read them. Not accepted: it
    had ended otherwise."""

    accepted: bool


class Deleted(BaseModel):
    """The answer to a delete."""

    id: str
    object: Literal["task.deleted"] = "task.deleted"
    deleted: Literal[True] = True


class TaskList(BaseModel):
    """A part of the tasks, as OpenAI's lists: `last_id` is the `after` of the next part."""

    object: Literal["list"] = "list"
    data: list[TaskView] = Field(description="without their outputs")
    first_id: str | None
    last_id: str | None = Field(description="the `after` with which the list goes on; not always the last task's id")
    has_more: bool = Field(description="whether there may be more")


class AdapterView(BaseModel):
    """A LoRA adapter."""

    version: str
    rank: int


class ModelView(BaseModel):
    """A model in OpenAI's form, with further fields from its card."""

    id: str
    object: Literal["model"] = "model"
    parent: str | None = Field(None, description="of an adapter, an alias or a version: its model")
    created: int
    owned_by: Literal["penstock"] = "penstock"
    version: str
    context_length: int
    vocab_size: int
    capabilities: list[str]
    defaults: dict[str, Any]
    """The sampling parameters that the model has of its own."""
    adapter: AdapterView | None = None

    @classmethod
    def of(cls, card: Mapping[str, Any], at: str = "") -> Self:
        """The view of a card. `at`: the alias or version by which it was found."""
        same = ("created", "version", "context_length", "vocab_size", "capabilities")
        name = str(card["name"])
        more = {"parent": card.get("parent"), "adapter": card.get("adapter")} if not at else {"parent": name}
        fields = {key: card[key] for key in same} | {"defaults": card.get("defaults", {})}
        return cls(id=f"{name}@{at}" if at else name, **fields, **more)


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelView]


class ErrorBody(BaseModel):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class ErrorView(BaseModel):
    """The form of every error."""

    error: ErrorBody


#: HTTP statuses of errors that any request may get: bad HTTP, too slow, a gateway's fault, an unreachable server.
ANYWHERE: Final = (400, 408, 500, 503)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's responses for errors with these statuses."""
    return {status: {"model": ErrorView} for status in statuses}
