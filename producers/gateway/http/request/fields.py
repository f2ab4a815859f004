"""A JSON body's fields, checked against the schema that the OpenAPI document shows of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request

from producers.errors import InvalidTask, shown
from producers.gateway.http.request.body import read_object

#: JSON schema's types of single values -> Python's, and the words for them. Users check the bounds of numbers.
KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "boolean": (bool, "true or false"),
    "number": ((int, float), "a number"),
    "string": (str, "text"),
}


def documented(schema: Mapping[str, Any], *, required: bool = True) -> dict[str, Any]:
    """A JSON body for OpenAPI (`openapi_extra` of an endpoint)."""
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


async def fields_of(
    request: Request,
    limit: int,
    schema: Mapping[str, Any],
    checks: Mapping[str, Callable[[Any, str], Any]] | None = None,
    *,
    optional: bool = False,
) -> dict[str, Any]:
    """The body's fields that are not null, checked by name and type.

    `limit`: the most bytes. `checks`: field -> what checks its value, given its name, in place of the schema.
    `optional`: there may be no body. Raises InvalidTask, and Problem for a body that is too large or no JSON.
    """
    if optional and request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return {}
    body = await read_object(request, limit)
    known = schema["properties"]
    for name in body:
        if name not in known:
            raise InvalidTask(
                f"unknown field {shown(name)}; there are {', '.join(known)}", param=name, code="unknown_parameter"
            )
    given = {name: value for name, value in body.items() if value is not None}
    for name in schema.get("required", ()):
        if name not in given:
            raise InvalidTask(f"{name} is missing", param=name, code="missing_parameter")
    own = checks or {}
    return {
        name: own[name](value, name) if name in own else _checked(name, value, known[name])
        for name, value in given.items()
    }


def _checked(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    kind, said = KINDS[schema["type"]]
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise InvalidTask(f"{name} is {shown(value)}; it must be {said}", param=name, code="invalid_type")
    if isinstance(value, str):
        _check_text(name, value, schema)
    return value


def _check_text(name: str, value: str, schema: Mapping[str, Any]) -> None:
    if "enum" in schema and value not in schema["enum"]:
        raise InvalidTask(f"{name} is {shown(value)}; there are {', '.join(schema['enum'])}", param=name)
    least, most = schema.get("minLength", 0), schema.get("maxLength", len(value))
    if not least <= len(value) <= most:
        raise InvalidTask(f"{name} has {len(value)} characters; it must have {least} to {most}", param=name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidTask(f"{name} is not valid Unicode: {shown(value)} has a lone surrogate", param=name) from None
