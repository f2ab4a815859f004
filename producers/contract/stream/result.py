"""A task's result, collected from its record and its stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from producers.contract.record import Record
from producers.contract.stream.events import Event, Logprobs, Prompt, Token
from producers.errors import TaskFailed

TIMES = ("created", "queued", "started", "first", "finished")


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a task's `n` outputs. `logprobs`: one element a token, or None if none were requested."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[Logprobs | None, ...] | None


@dataclass(frozen=True, slots=True)
class Result:
    """The final state of a task. `times`: name -> server time in ms, as far as the task got."""

    id: str
    model: str
    tier: str
    status: str
    choices: tuple[Choice, ...]
    usage: dict[str, int]
    error: dict[str, Any] | None
    times: dict[str, int]
    prompt_token_ids: tuple[int, ...] | None = None
    """The prompt's token ids, if its log probabilities were requested."""
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    """Log probabilities of the prompt's tokens; None for the first token."""

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's tokens."""
        return self.choices[0].token_ids

    def raise_for_status(self) -> None:
        """Raise TaskFailed if the task ended `failed` or `cancelled`."""
        if self.status in ("failed", "cancelled"):
            error = self.error or {}
            message = error.get("message") or f"Task {self.id} was {self.status}."
            raise TaskFailed(message, status=self.status, code=error.get("code", self.status), param=error.get("param"))


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task as lists show it: its state without its outputs. `times`: as of a Result."""

    id: str
    model: str
    tier: str
    status: str
    n: int
    tenant: str | None
    metadata: dict[str, str]
    webhook: dict[str, Any] | None
    """URL and events of its own webhook."""
    retried_from: str | None
    usage: dict[str, int] | None
    error: dict[str, Any] | None
    times: dict[str, int]

    @classmethod
    def of(cls, record: Record) -> TaskInfo:
        return cls(
            id=record.id,
            model=record.model,
            tier=record.tier,
            status=record.status,
            n=record.n,
            tenant=record.fields.get("tenant"),
            metadata=record.metadata,
            webhook=record.json("webhook"),
            retried_from=record.fields.get("retried_from"),
            usage=record.json("usage"),
            error=record.json("error"),
            times=_times(record),
        )


@dataclass(frozen=True, slots=True)
class TaskPage:
    """A part of a list of tasks. `next`: the `after` of the next part, which may have more where this one is empty;
    None at the end."""

    tasks: tuple[TaskInfo, ...]
    next: str | None

    def __iter__(self) -> Iterator[TaskInfo]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


def _times(record: Record) -> dict[str, int]:
    return {name: at for name in TIMES if (at := record.time(name)) is not None}


def collect(record: Record, events: Iterable[Event]) -> Result:
    """The result of a final record and all events of its stream."""
    tokens: list[list[Token]] = [[] for _ in range(record.n)]
    prompts: list[Prompt] = []
    for event in events:
        if isinstance(event, Token):
            tokens[event.choice].append(event)
        elif isinstance(event, Prompt):
            prompts.append(event)
    reasons = record.json("reasons") or []
    return Result(
        id=record.id,
        model=record.model,
        tier=record.tier,
        status=record.status,
        choices=tuple(
            Choice(
                index=index,
                text="".join(token.text for token in of_choice),
                token_ids=tuple(token.token_id for token in of_choice),
                finish_reason=reasons[index] if index < len(reasons) else None,
                logprobs=tuple(t.logprobs for t in of_choice) if any(t.logprobs for t in of_choice) else None,
            )
            for index, of_choice in enumerate(tokens)
        ),
        usage=record.json("usage") or {},
        error=record.json("error"),
        times=_times(record),
        prompt_token_ids=tuple(chain.from_iterable(part.token_ids for part in prompts)) if prompts else None,
        prompt_logprobs=tuple(chain.from_iterable(part.logprobs for part in prompts)) if prompts else None,
    )


def summary(result: Result) -> dict[str, Any]:
    """The value of a plain Celery task's AsyncResult."""
    return {
        "id": result.id,
        "model": result.model,
        "status": result.status,
        "text": result.text,
        "token_ids": result.token_ids,
        "choices": [
            {"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason} for c in result.choices
        ],
        "usage": result.usage,
    }


def failure(error: Mapping[str, Any] | None) -> TaskFailed:
    """The exception of a failed plain Celery task's AsyncResult. `error`: as in the record."""
    error = error or {}
    return TaskFailed(
        error.get("message", "The task failed."), "failed", error.get("code", "failed"), error.get("param")
    )


def view(result: Result) -> dict[str, Any]:
    """A result as JSON's object, in the form of GET /v1/tasks/{id}. Times are unix seconds."""
    return {
        "id": result.id,
        "object": "task",
        "status": result.status,
        "model": result.model,
        "tier": result.tier,
        "created_at": _seconds(result, "created"),
        "finished_at": _seconds(result, "finished"),
        "usage": result.usage,
        "error": result.error,
        "choices": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason,
                "logprobs": None
                if one.logprobs is None
                else [None if scores is None else logprobs_view(scores) for scores in one.logprobs],
            }
            for one in result.choices
        ],
        "prompt_logprobs": None
        if result.prompt_token_ids is None
        else prompt_view(result.prompt_token_ids, result.prompt_logprobs or ()),
    }


def _seconds(result: Result, name: str) -> float | None:
    return result.times[name] / 1000 if name in result.times else None


def logprobs_view(logprobs: Logprobs) -> dict[str, Any]:
    """A token's log probability and its alternatives, as callers see them."""
    logprob, top = logprobs
    return {"logprob": logprob, "top": [{"token_id": token, "logprob": value} for token, value in top]}


def prompt_view(token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> list[dict[str, Any]]:
    """A prompt's tokens with their log probabilities, as callers see them; null for the first."""
    return [
        {"token_id": token, **(logprobs_view(one) if one else {"logprob": None, "top": []})}
        for token, one in zip(token_ids, logprobs, strict=True)
    ]
