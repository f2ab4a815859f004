"""Reads the parameters of `GET /v1/tasks`, and shows what it lists."""

from __future__ import annotations

import logging
import math
from typing import Any, Final, get_args

from fastapi import Request

from producers.client.listing import DEFAULT_LIMIT, MAX_LIMIT, MAX_SCANNED, UNREADABLE, Listed, Order, Query, Status
from producers.connection.log_throttle import warn_throttled
from producers.contract import keys
from producers.contract.record import Record
from producers.contract.task import MAX_TENANT
from producers.errors import shown
from producers.gateway.http.authorization import same
from producers.gateway.http.errors import invalid_value
from producers.gateway.http.request_body import query_parameters, query_schema
from producers.gateway.tasks.views import TaskList, TaskView
from producers.store.access.principal import Principal

log = logging.getLogger(__name__)

_NAME: Final = {"type": "string", "minLength": 1, "maxLength": MAX_TENANT}
_TIME: Final = {"type": "number", "minimum": 0, "maximum": 10**12}
#: Parameter -> its JSON schema and what it says.
_ABOUT: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "status": ({"enum": list(get_args(Status))}, ""),
    "model": (_NAME, ""),
    "tier": ({"enum": list(keys.TIERS)}, ""),
    "tenant": (_NAME, ""),
    "created_after": (_TIME, "unix seconds; later tasks alone"),
    "created_before": (_TIME, "unix seconds; earlier tasks alone"),
    "limit": (
        {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
        "most tasks in the answer",
    ),
    "order": ({"enum": list(get_args(Order)), "default": "desc"}, "by time of submission; desc: the latest first"),
    "after": (
        {"type": "string", "minLength": 1, "maxLength": 128},
        "the `last_id` of an earlier answer, or a task's id",
    ),
}
_PAIRS: Final = {
    "type": "object",
    "maxProperties": 16,
    "propertyNames": {"minLength": 1, "maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
}
#: The parameters for OpenAPI.
PARAMETERS: Final[list[dict[str, Any]]] = [
    *(query_schema(name, about, **schema) for name, (schema, about) in _ABOUT.items()),
    {
        "name": "metadata",
        "in": "query",
        "style": "deepObject",
        "explode": True,
        "schema": _PAIRS,
        "description": f"metadata[name]=value: tasks with this pair. "
        f"One call looks at some {MAX_SCANNED} tasks at most.",
    },
]


def read_query(request: Request, principal: Principal) -> Query:
    """What the caller asks for, of what it may see.

    Raises Problem or InvalidQuery, also for a parameter that does not exist or is given twice.
    """
    query = query_parameters(request, _ABOUT, "metadata")
    values: dict[str, Any] = {name: value for name, value in query.items() if name in _ABOUT}
    metadata = {name[len("metadata[") : -1]: value for name, value in query.items() if name not in _ABOUT}
    for name in ("created_after", "created_before", "limit"):
        if name in values:
            values[name] = _number(name, values[name])
    if not principal.sees_all:
        same(principal, values.get("tenant"), "tenant")
        values["tenant"] = principal.tenant
    return Query(**values, metadata=metadata)


def _number(name: str, value: str) -> int | float:
    try:
        if name == "limit" and value.isascii() and value.isdecimal() and len(value) < 10:
            return int(value)
        number = float(value)
    except ValueError:
        number = math.nan
    if name == "limit" or not math.isfinite(number):
        expected = f"an integer from 1 to {MAX_LIMIT}" if name == "limit" else "a time in unix seconds"
        raise invalid_value(name, f"{name} is {shown(value)}; it must be {expected}.")
    return number


def view(listed: Listed) -> TaskList:
    ids = [record.id for record in listed.records]
    return TaskList(
        data=[task for task in map(_readable, listed.records) if task is not None],
        first_id=ids[0] if ids else None,
        last_id=listed.next or (ids[-1] if ids else None),
        has_more=listed.more,
    )


def _readable(record: Record) -> TaskView | None:
    try:
        return TaskView.of(record)
    except ValueError as error:
        warn_throttled(log, UNREADABLE, record.id, error)
        return None
