"""Reads the query parameters of a response's URLs."""

from __future__ import annotations

from typing import Any, Final

from fastapi import Request

from producers.gateway.http.errors import invalid_value
from producers.gateway.http.request import query
from producers.gateway.http.request.query import parameter
from producers.gateway.openai.parameters import refusal, refused
from producers.gateway.openai.responses.items import Item
from producers.gateway.openai.responses.request import INCLUDABLE, included

#: Most items in one page, and how many unless asked.
MAX_PAGE, PAGE = 100, 20
ORDERS: Final = ("asc", "desc")
#: Largest sequence number that is taken.
MAX_NUMBER: Final = 999_999_999
_INCLUDE: Final = parameter(
    "include[]",
    "log probabilities are there if they were made; of the others there is nothing here",
    type="array",
    items={"enum": list(INCLUDABLE)},
)
#: OpenAPI's parameters of the two URLs.
RETRIEVE: Final[list[dict[str, Any]]] = [
    parameter("stream", "whether to send events, from the beginning", type="boolean"),
    parameter(
        "starting_after",
        "of a stream: the last `sequence_number` that was read; -1: none",
        type="integer",
        minimum=-1,
        maximum=MAX_NUMBER,
    ),
    _INCLUDE,
    parameter("include_obfuscation", "not offered", enum=["false"]),
]
ITEMS: Final[list[dict[str, Any]]] = [
    parameter("order", "the last first, unless told otherwise", enum=list(ORDERS), default="desc"),
    parameter("after", "an item's id: the page begins behind it", type="string"),
    parameter("limit", "most items", type="integer", minimum=1, maximum=MAX_PAGE, default=PAGE),
    _INCLUDE,
]


def starting_after(request: Request) -> int | None:
    """The sequence number after which the stream begins, -1 for all of it; None if no stream is asked for.

    Raises Problem.
    """
    included(_several(request, "include"))
    if _flag(request, "include_obfuscation"):
        raise refused("include_obfuscation", True, (False,))
    after = query.integer(request, "starting_after", -1, MAX_NUMBER, -1)
    if _flag(request, "stream"):
        return after
    if after != -1:
        raise invalid_value("starting_after", "starting_after is for streams; leave it out, or ask for stream=true")
    return None


def page(request: Request, items: list[Item]) -> dict[str, Any]:
    """The list of items that a query asks for. Raises Problem."""
    included(_several(request, "include"))
    most = query.integer(request, "limit", 1, MAX_PAGE, PAGE)
    left = items if query.choice(request, "order", ORDERS, "desc") == "asc" else items[::-1]
    after = request.query_params.get("after")
    if after is not None:
        place = next((at for at, item in enumerate(left) if item.id == after), None)
        if place is None:
            raise refusal("after", after, "the id of one of this response's input items")
        left = left[place + 1 :]
    data = [item.view for item in left[:most]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(left) > most}


def _several(request: Request, name: str) -> list[str]:
    """All values of a parameter; OpenAI's clients write `name[]=a&name[]=b`, others `name=a`."""
    return [*request.query_params.getlist(f"{name}[]"), *request.query_params.getlist(name)]


def _flag(request: Request, name: str) -> bool:
    return query.choice(request, name, ("true", "false"), "false") == "true"
