"""Reads the JSON bodies of webhook endpoints' requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request

from producers.contract.webhook import Destination, checked_events, checked_url
from producers.errors import InvalidTask, shown
from producers.gateway.context import gateway_of
from producers.gateway.http.body import read_object


async def fields_of(request: Request, schema: Mapping[str, Any], *, optional: bool = False) -> dict[str, Any]:
    """The body's fields that are not null, checked by name and type. `optional`: there may be no body.

    Raises InvalidTask, and Problem for a body that is too large or no JSON.
    """
    gateway = gateway_of(request)
    if optional and request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return {}
    body = await read_object(request, gateway.settings.max_body)
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
    return {name: _checked(name, value, known[name]) for name, value in given.items()}


def _checked(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    if name == "url":
        return checked_url(value, name)
    if name == "event_types":
        return checked_events(value, name)
    if schema["type"] == "boolean":
        if not isinstance(value, bool):
            raise InvalidTask(f"{name} is {shown(value)}; it must be true or false", param=name, code="invalid_type")
        return value
    if not isinstance(value, str):
        raise InvalidTask(f"{name} is {shown(value)}; it must be text", param=name, code="invalid_type")
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


def host_of(url: str) -> str:
    """The URL's host, which names an endpoint that has no name."""
    return Destination.parse(url).host
