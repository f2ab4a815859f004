"""Reads the URLs of actuators on platforms: `SCHEME://HOST[/NAME][?option=value]`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, unquote


@dataclass(frozen=True, slots=True)
class Address:
    """`host` and `name` as the platform spells them; `name` is empty where the URL has none."""

    host: str
    name: str
    options: dict[str, str]


def read(parts: SplitResult, form: str, options: Collection[str], *, named: bool = True) -> Address:
    """A URL's parts. `form`: how it must look, for the error. Raises ValueError."""
    host, name = unquote(parts.netloc), unquote(parts.path.strip("/"))
    if not host or bool(name) != named or parts.fragment:
        raise ValueError(f"actuator is {parts.geturl()!r}; it must look like {form}")
    found = dict(parse_qsl(parts.query, keep_blank_values=True))
    for option, value in found.items():
        if option not in options or not value:
            raise ValueError(
                f"actuator is {parts.geturl()!r}; {option}={value} makes no sense, it must look like {form}"
            )
    return Address(host, name, found)
