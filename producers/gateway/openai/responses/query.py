"""The query parameters of a response's URLs."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import Query
from pydantic import WithJsonSchema

from producers.gateway.http.errors import invalid_value
from producers.gateway.openai.parameters import refusal, refused
from producers.gateway.openai.responses.items import Item
from producers.gateway.openai.responses.request import INCLUDABLE, included

#: Most items in one page, and how many unless asked.
MAX_PAGE, PAGE = 100, 20
#: Largest sequence number that is taken.
MAX_NUMBER: Final = 999_999_999
Stream = Annotated[Literal["true", "false"] | None, WithJsonSchema({"type": "boolean"})]
#: `true` is refused with words of its own.
Obfuscation = Annotated[Literal["true", "false"], WithJsonSchema({"enum": ["false"]})]
_INCLUDE: Final = Query(
    alias="include[]",
    description="log probabilities are there if they were made; of the others there is nothing here",
    json_schema_extra={"items": {"enum": list(INCLUDABLE)}},
    default_factory=list,
)


def include(
    several: Annotated[list[str], _INCLUDE],
    single: Annotated[list[str], Query(alias="include", include_in_schema=False, default_factory=list)],
) -> None:
    """Checks what is to be included. OpenAI's clients write `include[]=a&include[]=b`, others `include=a`."""
    included([*several, *single])


def after(
    stream: Annotated[Stream, Query(description="whether to send events, from the beginning")] = None,
    starting_after: Annotated[
        int,
        Query(ge=-1, le=MAX_NUMBER, description="of a stream: the last `sequence_number` that was read; -1: none"),
    ] = -1,
    include_obfuscation: Annotated[Obfuscation, Query(description="not offered")] = "false",
) -> int | None:
    """The sequence number after which the stream begins, -1 for all of it; None if no stream is asked for."""
    if include_obfuscation == "true":
        raise refused("include_obfuscation", True, (False,))
    if stream == "true":
        return starting_after
    if starting_after != -1:
        raise invalid_value("starting_after", "starting_after is for streams; leave it out, or ask for stream=true")
    return None


def page(items: list[Item], order: str, after: str | None, most: int) -> dict[str, Any]:
    """The list of items that a query asks for. Raises Problem."""
    left = items if order == "asc" else items[::-1]
    if after is not None:
        place = next((at for at, item in enumerate(left) if item.id == after), None)
        if place is None:
            raise refusal("after", after, "the id of one of this response's input items")
        left = left[place + 1 :]
    data = [item.view for item in left[:most]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(left) > most}
