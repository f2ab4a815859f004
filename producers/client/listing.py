"""Lists tasks, as steps: read the index by time, then their records a page at a time, and keep those that match.

A list with filters that few tasks match would read all of them. So one call scans MAX_SCANNED tasks at most; then it
returns its matches, and where to go on.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict, get_args

from producers.client.steps import Read, Steps, persistently
from producers.client.submission import TASK_ID
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import text
from producers.contract import keys
from producers.contract.fields import MAX_TENANT
from producers.contract.record import Record
from producers.contract.stream import TaskInfo, TaskPage
from producers.errors import InvalidQuery, TaskNotFound, shown
from producers.store import task_index

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]
Order = Literal["asc", "desc"]
#: What a list has: tasks of clients and `/v1/tasks`; requests of OpenAI's endpoints, whose callers wait; responses in
#: the background; all three.
Listing = Literal["task", "request", "response", "all"]

log = logging.getLogger(__name__)

UNREADABLE: Final = "task %s is left out of a list, since its record cannot be read: %s"
#: Largest, and default, number of tasks in one answer.
MAX_LIMIT, DEFAULT_LIMIT = 100, 20
#: Most tasks that one call scans; more only if they were created in one millisecond.
MAX_SCANNED: Final = 2000
#: Records read in one round trip, where a filter may refuse many.
PAGE: Final = 200
#: Fields of the record that a list shows: all but the task itself, which may have a megabyte.
SHOWN: Final = (
    *("status", "model", "version", "alias", "generation", "tier", "tenant", "order_key", "n", "created", "queued"),
    *("started", "first", "finished"),
    *("settled", "metadata", "webhook", "retried_from", "shortened", "traceparent", "usage", "error", "origin"),
)
#: A position between two milliseconds, for a call without matches; no task has such an id.
_TIME: Final = re.compile("~([0-9]{1,15})")
_LAST_MS: Final = 10**15


class QueryFields(TypedDict, total=False):
    """The fields of a `Query`, as keywords of `client.tasks.list`."""

    kind: Listing
    status: Status | None
    model: str | None
    tier: str | None
    tenant: str | None
    metadata: Mapping[str, str]
    created_after: float | None
    created_before: float | None
    limit: int
    order: Order
    after: str | None


@dataclass(frozen=True, slots=True)
class Query:
    """A filter of listed tasks. Times are unix seconds, both exclusive. `metadata`: pairs that a task must have.

    `kind`: of requests and responses the last 10,000 are known. `order`: `desc` is the latest first. `after`: a task's
    id, or a `Listed.next`. Raises InvalidQuery.
    """

    status: Status | None = None
    model: str | None = None
    tier: str | None = None
    tenant: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_after: float | None = None
    created_before: float | None = None
    limit: int = DEFAULT_LIMIT
    order: Order = "desc"
    after: str | None = None
    kind: Listing = "task"

    def __post_init__(self) -> None:
        choices = {"status": get_args(Status), "tier": tuple(keys.TIERS), "order": get_args(Order)}
        for name, allowed in {**choices, "kind": get_args(Listing)}.items():
            value = getattr(self, name)
            if value not in allowed and (value is not None or name in ("order", "kind")):
                raise _invalid(name, value, f"one of {', '.join(allowed)}")
        for name in ("model", "tenant"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and 1 <= len(value) <= MAX_TENANT):
                raise _invalid(name, value, f"a name of 1 to {MAX_TENANT} characters")
        for name in ("created_after", "created_before"):
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and 0 <= value <= _LAST_MS / 1000):
                raise _invalid(name, value, "a time in unix seconds")
        if type(self.limit) is not int or not 1 <= self.limit <= MAX_LIMIT:
            raise _invalid("limit", self.limit, f"an integer from 1 to {MAX_LIMIT}")
        after = self.after
        if after is not None and not (type(after) is str and (_TIME.fullmatch(after) or TASK_ID.fullmatch(after))):
            raise _invalid("after", self.after, "the id of a task, or what an earlier answer said to go on with")
        metadata: Any = self.metadata
        if not isinstance(metadata, Mapping):
            raise _invalid("metadata", metadata, "texts by name")
        if len(self.metadata) > 16:
            raise _invalid("metadata", f"{len(self.metadata)} pairs", "at most 16")

    @property
    def indexes(self) -> tuple[str, ...]:
        """The indexes with the tasks: the tenant's own, if the query names a tenant."""
        tasks, requests = task_index.tasks_of(self.tenant), task_index.requests_of(self.tenant)
        return (tasks, requests) if self.kind == "all" else (tasks,) if self.kind == "task" else (requests,)

    @property
    def filtered(self) -> bool:
        """Whether some tasks of the index may not match."""
        return bool(self.status or self.model or self.tier or self.metadata or self.kind in ("request", "response"))

    def matches(self, record: Record) -> bool:
        return (
            self.kind in ("all", record.kind)
            and self.status in (None, record.status)
            and self.model in (None, record.model)
            and self.tier in (None, record.tier)
            and self.tenant in (None, record.fields.get("tenant"))
            and (not self.metadata or self.metadata.items() <= record.metadata.items())
        )


@dataclass(frozen=True, slots=True)
class Listed:
    """Records with the fields SHOWN. `next`: the `after` of the next call; None without `more`."""

    records: list[Record]
    next: str | None
    more: bool


def page_of(listed: Listed) -> TaskPage:
    """The page that `client.tasks.list` returns."""
    return TaskPage(tuple(map(TaskInfo.of, listed.records)), listed.next)


@dataclass(frozen=True, slots=True)
class _Position:
    """A position in the list: behind a task of a millisecond, or, without an id, behind all tasks of it."""

    at: int
    id: str | None = None


def list_tasks(query: Query, patience_s: float) -> Steps[Listed]:
    """Returns the tasks that match, in order. Raises TaskNotFound if the task of `after` is not listed (any more)."""
    position = yield from _start(query, patience_s)
    matches: list[Record] = []
    scanned, size = 0, PAGE if query.filtered else query.limit + 1
    while True:
        entries, whole = yield from _page(query, position, size, patience_s)
        if not entries and not whole:  # more tasks of one millisecond than a page has
            size *= 2
            continue
        commands = tuple(("HMGET", keys.task(name), *SHOWN) for _, name in entries)
        records = (yield from persistently(Read(commands), patience_s)) if entries else ()
        for (at, name), values in zip(entries, records, strict=True):
            if len(matches) == query.limit:
                return Listed(matches, matches[-1].id, True)
            if scanned >= MAX_SCANNED and position is not None and at != position.at:
                return Listed(matches, f"~{position.at}", True)
            scanned, position = scanned + 1, _Position(at, name)
            record = _matching(query, name, values)
            if record is not None:
                matches.append(record)
        if whole:
            return Listed(matches, None, False)


def _start(query: Query, patience_s: float) -> Steps[_Position | None]:
    if query.after is None:
        return None
    time = _TIME.fullmatch(query.after)
    if time is not None:
        return _Position(int(time[1]))
    scores = yield from persistently(Read(tuple(("ZSCORE", index, query.after) for index in query.indexes)), patience_s)
    at = next((score for score in scores if score is not None), None)
    if at is None:
        raise TaskNotFound(
            f"There is no task {query.after} to go on after: never submitted here, or past its time to live"
        )
    return _Position(int(float(at)), query.after)


def _page(
    query: Query, position: _Position | None, size: int, patience_s: float
) -> Steps[tuple[list[tuple[int, str]], bool]]:
    """The next entries of the indexes, in order, and whether they are the last ones."""
    newest_first = query.order == "desc"
    low = 0 if query.created_after is None else round(query.created_after * 1000) + 1
    high = _LAST_MS if query.created_before is None else round(query.created_before * 1000) - 1
    if position is not None and newest_first:
        high = min(high, position.at if position.id else position.at - 1)
    elif position is not None:
        low = max(low, position.at if position.id else position.at + 1)
    answers = yield from persistently(
        Read(
            tuple(
                task_index.entries(index, str(low), str(high), size, newest_first=newest_first)
                for index in query.indexes
            )
        ),
        patience_s,
    )
    entries = sorted((entry for answer in answers for entry in task_index.read_entries(answer)), reverse=newest_first)[
        :size
    ]
    whole = len(entries) < size  # then no index had more
    if position is not None and position.id:
        here = (position.at, position.id)
        entries = [entry for entry in entries if (entry < here if newest_first else entry > here)]
    return entries, whole


def _matching(query: Query, name: str, values: list[Any]) -> Record | None:
    """Returns the record if it exists and matches. A record that cannot be read is left out: others can be read."""
    try:
        record = _record(name, values)
        return record if record is not None and query.matches(record) else None
    except ValueError as error:
        warn_throttled(log, UNREADABLE, name, error)
        return None


def _record(name: str, values: list[Any]) -> Record | None:
    """The record's fields SHOWN; None if it is gone."""
    if values[0] is None:
        return None
    pairs = zip(SHOWN, values, strict=True)
    return Record(name, {field: text(value) for field, value in pairs if value is not None})


def _invalid(name: str, value: Any, expected: str) -> InvalidQuery:
    value = None if isinstance(value, float) and math.isnan(value) else value
    return InvalidQuery(f"{name} is {shown(value)}; it must be {expected}", param=name)
