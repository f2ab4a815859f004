"""Reads the query parameters of a response's URLs."""

from __future__ import annotations

import re
from typing import Any, Final

from starlette.datastructures import QueryParams

from producers.contract.task import MAX_INT32
from producers.errors import shown
from producers.gateway.http.errors import Problem
from producers.gateway.openai.parameters import refusal, refused
from producers.gateway.openai.responses.items import Item
from producers.gateway.openai.responses.request import INCLUDABLE, included

#: Most items in one page, and how many unless asked.
MAX_PAGE, PAGE = 100, 20
_INCLUDE: Final = {
    "name": "include[]",
    "in": "query",
    "description": "log probabilities are there if they were made; of the others there is nothing here",
    "schema": {"type": "array", "items": {"enum": list(INCLUDABLE)}},
}
#: OpenAPI's parameters of the two URLs.
RETRIEVE: Final[list[dict[str, Any]]] = [
    {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
    {
        "name": "starting_after",
        "in": "query",
        "description": "the last `sequence_number` that was read; for streams",
        "schema": {"type": "integer", "minimum": 0, "maximum": MAX_INT32},
    },
    _INCLUDE,
    {"name": "include_obfuscation", "in": "query", "schema": {"enum": ["false"]}},
]
ITEMS: Final[list[dict[str, Any]]] = [
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    {"name": "after", "in": "query", "description": "an item's id", "schema": {"type": "string"}},
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": PAGE},
    },
    _INCLUDE,
]


def starting_after(query: QueryParams) -> int | None:
    """The sequence number after which the stream begins, -1 for all of it; None if no stream is asked for.

    Raises Problem.
    """
    included(_several(query, "include"))
    if _flag(query, "include_obfuscation"):
        raise refused("include_obfuscation", True, (False,))
    after = _count(query, "starting_after", 0, MAX_INT32)
    if _flag(query, "stream"):
        return -1 if after is None else after
    if after is not None:
        raise Problem(
            400,
            "starting_after is for streams; leave it out, or ask for stream=true",
            code="invalid_value",
            param="starting_after",
        )
    return None


def page(query: QueryParams, items: list[Item]) -> dict[str, Any]:
    """The list of items that a query asks for. Raises Problem."""
    included(_several(query, "include"))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise refusal("order", order, "asc or desc")
    most = _count(query, "limit", 1, MAX_PAGE) or PAGE
    ordered = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        place = next((at for at, item in enumerate(ordered) if item.id == after), None)
        if place is None:
            raise refusal("after", after, "the id of one of this response's input items")
        ordered = ordered[place + 1 :]
    data = [item.view for item in ordered[:most]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {
        "object": "list",
        "data": data,
        "first_id": first,
        "last_id": last,
        "has_more": len(ordered) > most,
    }


def _several(query: QueryParams, name: str) -> list[str]:
    """All values of a parameter; clients write `name[]=a&name[]=b`, others `name=a`."""
    return [*query.getlist(f"{name}[]"), *query.getlist(name)]


def _flag(query: QueryParams, name: str) -> bool:
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise refusal(name, value, "true or false")
    return value == "true"


def _count(query: QueryParams, name: str, least: int, most: int) -> int | None:
    value = query.get(name)
    if value is None:
        return None
    if not re.fullmatch("[0-9]{1,10}", value) or not least <= int(value) <= most:
        raise Problem(
            400,
            f"{name} is {shown(value)}; {name} must be an integer from {least} to {most}",
            code="invalid_value",
            param=name,
        )
    return int(value)
