"""Errors for the caller of a task: which field is wrong, with which value, and what it takes."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from producers.errors import InvalidTask, shown

#: Longest name (characters) in an error's `param`; longer ones are cut and get no spelling hint.
MAX_LABEL: Final = 64


def read_json(body: str | bytes) -> Any:
    """Parse JSON text. Raises InvalidTask if it is not UTF-8 or not JSON."""
    try:
        return json.loads(body if isinstance(body, str) else body.decode())
    except UnicodeDecodeError as error:
        raise InvalidTask(f"the body is not UTF-8: bad byte at {error.start}", code="invalid_utf8") from None
    except (ValueError, RecursionError) as error:
        raise InvalidTask(f"the body is not JSON: {error}", code="invalid_json") from None


def label(name: str) -> str:
    """A caller's name for an error's `param`: in ASCII, cut after MAX_LABEL characters."""
    short = name if len(name) <= MAX_LABEL else f"{name[:MAX_LABEL]}..."
    return short if short.isascii() else ascii(short)[1:-1]


def likely(name: str, names: Iterable[str]) -> str | None:
    """The name among `names` that was probably meant; None without a close one."""
    return next(iter(difflib.get_close_matches(name, names, 1)), None) if len(name) <= MAX_LABEL else None


def unknown_field(name: str, fields: Iterable[str]) -> InvalidTask:
    near = likely(name, fields)
    hint = f"; did you mean {shown(near)}?" if near else f"; a task has {', '.join(fields)}"
    return InvalidTask(f"unknown field {shown(name)}{hint}", param=label(name), code="unknown_parameter")


def refusal(error: ValidationError, fields: Mapping[str, FieldInfo]) -> InvalidTask:
    """Pydantic's first error as an InvalidTask."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidTask):
        return cause
    field = str(first["loc"][0])
    wanted = fields[field].description
    if first["type"] == "missing":
        return InvalidTask(f"{field} is missing: {wanted}", param=field, code="missing_parameter")
    place = field + "".join(f"[{shown(part)}]" for part in first["loc"][1:] if part != "[key]")
    if first["type"] == "string_unicode":
        return InvalidTask(f"{place} is not valid Unicode: {shown(first['input'])} has a lone surrogate", param=field)
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return InvalidTask(f"{place} is {shown(first['input'])}; {field} must be {wanted}", param=field, code=code)
