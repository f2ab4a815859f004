"""Parameters in a URL's query, checked."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from fastapi import Request

from producers.errors import shown
from producers.gateway.http.errors import invalid_value, unknown_parameter


def read(request: Request, names: Collection[str], pairs: str = "") -> dict[str, str]:
    """The parameters: of these names, or `pairs[...]`, each once. Raises Problem for others."""
    values: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in names and not (pairs and re.fullmatch(rf"{pairs}\[.+\]", name, re.DOTALL)):
            expected = ", ".join(names) + (f" and {pairs}[name]" if pairs else "")
            raise unknown_parameter(name, f"there are {expected}")
        if name in values:
            raise invalid_value(name, f"{shown(name)} is given twice.")
        values[name] = value
    return values


def schema(name: str, description: str, **schema: Any) -> dict[str, Any]:
    """A query's parameter for OpenAPI (`parameters` of an operation)."""
    return {"name": name, "in": "query", "description": description, "schema": schema}
