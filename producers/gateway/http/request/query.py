"""Parameters in a URL's query, checked."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from fastapi import Request

from producers.errors import shown
from producers.gateway.http.errors import Problem


def integer(request: Request, name: str, least: int, most: int, default: int) -> int:
    """An integer within its limits. Raises Problem."""
    value = request.query_params.get(name)
    if value is None:
        return default
    if not re.fullmatch("-?[0-9]{1,9}", value) or not least <= int(value) <= most:
        raise _refusal(name, value, f"an integer from {least} to {most}")
    return int(value)


def choice(request: Request, name: str, choices: Collection[str], default: str) -> str:
    """One of some words. Raises Problem."""
    value = request.query_params.get(name, default)
    if value not in choices:
        raise _refusal(name, value, f"one of {', '.join(choices)}")
    return value


def matching(request: Request, name: str, pattern: re.Pattern[str], wanted: str) -> str | None:
    """A text of some form; None where it is not given. Raises Problem."""
    value = request.query_params.get(name)
    if value is not None and not pattern.fullmatch(value):
        raise _refusal(name, value, wanted)
    return value


def parameter(name: str, description: str, **schema: Any) -> dict[str, Any]:
    """A query's parameter for OpenAPI (`parameters` of an operation)."""
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _refusal(name: str, value: str, wanted: str) -> Problem:
    return Problem(400, f"{name} is {shown(value)}; it must be {wanted}", code="invalid_value", param=name)
