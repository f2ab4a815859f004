"""Reads the configuration of sources: a TOML file with one table for each.

    [orders]
    type = "messages"
    queue = "https://sqs.us-east-1.amazonaws.com/123456789012/orders"

A new type is a module with `SETTINGS`, its subclass of SourceSettings, and a line in TYPES.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from producers.errors import shown
from producers.sources.source import SourceSettings

#: Type -> its module. They are imported where a table needs them: schedules alone need croniter.
TYPES: Final[dict[str, str]] = {
    "bucket": "producers.sources.files.bucket",
    "folder": "producers.sources.files.folder",
    "messages": "producers.sources.messages.source",
    "schedule": "producers.sources.schedule",
}
#: A source's name: it is a part of task ids and of keys.
NAME: Final = re.compile("[A-Za-z0-9_.-]{1,48}")
#: The extra of the distribution with what a type imports.
EXTRA: Final = "penstock[aws,sources]"


class BadSources(ValueError):
    """The configuration is refused. The message names file, table and field."""


def read(path: Path) -> dict[str, SourceSettings]:
    """The sources of a file, by name. Raises BadSources."""
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadSources(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSources(f"{path} is not TOML: {error}") from error
    if not tables:
        raise BadSources(f'{path} has no source; a source is a table, such as [orders] with type = "messages"')
    try:
        return {name: parse(name, table) for name, table in tables.items()}
    except BadSources as error:
        raise BadSources(f"{path}: {error}") from None


def parse(name: str, table: Any) -> SourceSettings:
    """One table. Raises BadSources."""
    if not isinstance(table, Mapping):
        raise BadSources(f"{name} = {shown(table)} stands outside a table; a source is a table, such as [orders]")
    if not NAME.fullmatch(name):
        raise BadSources(f"[{name}] is no name for a source; it must have 1 to 48 of the characters A-Z a-z 0-9 _ . -")
    kind = table.get("type")
    if not isinstance(kind, str) or kind not in TYPES:
        problem = "is missing" if kind is None else f"is {shown(kind)}"
        raise BadSources(f"[{name}] type {problem}; it must be one of {', '.join(TYPES)}")
    try:
        settings: type[SourceSettings] = import_module(TYPES[kind]).SETTINGS
    except ModuleNotFoundError as error:
        raise BadSources(f"[{name}] needs {error.name}, which comes with: pip install '{EXTRA}'") from error
    try:
        return settings.model_validate(dict(table))
    except ValidationError as error:
        raise BadSources(f"[{name}] {_first_error(error, settings)}") from None


def _first_error(error: ValidationError, settings: type[SourceSettings]) -> str:
    """Pydantic's first error as a sentence that begins with the field."""
    first = error.errors(include_url=False)[0]
    path = ".".join(map(str, first["loc"]))
    cause = first.get("ctx", {}).get("error")
    if not path:
        return str(cause or first["msg"])
    if first["type"] == "extra_forbidden":
        return f"has no {path}; it has {', '.join(settings.model_fields)}"
    field = settings.model_fields.get(str(first["loc"][0]))
    expected = field.description if field is not None and field.description else first["msg"]
    if first["type"] == "missing":
        return f"{path} is missing: {expected}"
    return f"{path} is {shown(first['input'])}; it must be {expected}" if cause is None else f"{path}: {cause}"
