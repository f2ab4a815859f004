"""Reads the pools to scale: of a TOML file with a table for each, or of a command line with one.

    [[pool]]
    model = "tiny"            # as workers are told it
    version = "1a2b..."       # only this version; left out: all versions together
    min = 0
    max = 4
    cool_down = 300           # and any other of `workers.autoscaler.policy.rules`
    target_wait.priority = 1
    actuator = "kubernetes://default/worker-tiny"
    tries = 5                 # and start_limit: of starts that fail

Unknown keys are refused by name, and so is a value that makes no sense, before anything is started.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from producers.errors import shown
from workers.autoscaler.actuators import EXPORT, Actuator, checked, open_actuator
from workers.autoscaler.policy.rules import TARGET_WAIT_S, Rules
from workers.autoscaler.pools import PoolSettings, Scaled
from workers.library import name_of


class BadScaling(ValueError):
    """The configuration is refused. The message names file, pool and key."""


class _Pool(BaseModel):
    """A pool's keys beside its rules."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str = Field(min_length=1)
    version: str | None = Field(None, min_length=1)
    actuator: str = EXPORT
    tries: int = Field(5, ge=1)
    start_limit: float | None = Field(None, gt=0)


_HINTS: Final = get_type_hints(Rules)
_RULES: Final = {one.name: (_HINTS[one.name], {} if one.default is MISSING else one.default) for one in fields(Rules)}
#: All keys of a pool, with their kinds.
Table: Final[type[_Pool]] = create_model("Table", __base__=_Pool, **_RULES)  # type: ignore[call-overload]


def read(path: Path) -> list[PoolSettings]:
    """The pools of a file. Raises BadScaling."""
    try:
        said = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadScaling(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadScaling(f"{path} is not TOML: {error}") from error
    tables = said.pop("pool", None)
    if said:
        raise BadScaling(f"{path} has an unknown key {next(iter(said))}; pools are tables, each headed by [[pool]]")
    if not isinstance(tables, list) or not tables:
        raise BadScaling(f'{path} has no pool; a pool is a table [[pool]] with model = "..." at least')
    found = []
    for number, table in enumerate(tables, 1):
        try:
            found.append(parse(table))
        except BadScaling as error:
            raise BadScaling(f"{path}, [[pool]] {number}: {error}") from None
    try:
        return apart(found)
    except BadScaling as error:
        raise BadScaling(f"{path}: {error}") from None


def parse(said: Mapping[str, Any]) -> PoolSettings:
    """One table. Raises BadScaling."""
    if not isinstance(said, Mapping):
        raise BadScaling(f"it is {shown(said)}, and must be a table")
    try:
        table = Table.model_validate(dict(said))
        given = {name: getattr(table, name) for name in _RULES}
        given["target_wait"] = _waits(given["target_wait"])
        rules = Rules(**given)
        checked(table.actuator)
        name_of(table.model)
    except ValidationError as error:
        raise BadScaling(_said(error)) from None
    except ValueError as error:
        raise BadScaling(str(error)) from None
    return PoolSettings(
        name_of(table.model), table.version, rules, table.actuator, table.tries, table.start_limit, table.model
    )


def parse_rule(said: str) -> dict[str, Any]:
    """A table of one rule, written NAME=VALUE. Raises BadScaling."""
    name, _, value = said.partition("=")
    try:
        return tomllib.loads(f"{name.strip().replace('-', '_')} = {value}")
    except tomllib.TOMLDecodeError:
        raise BadScaling(
            f"{said!r} is no rule; write NAME=NUMBER, such as headroom=0.7 or target_wait.flex=60"
        ) from None


def one_pool(said: Mapping[str, Any], rules: Sequence[str]) -> PoolSettings:
    """A pool of a command line: keys (None: not given), and rules as NAME=VALUE. Raises BadScaling."""
    table = {name: value for name, value in said.items() if value is not None}
    for one in rules:
        for key, value in parse_rule(one).items():
            table[key] = {**table[key], **value} if isinstance(value, dict) and key in table else value
    return parse(table)


def apart(pools: Sequence[PoolSettings]) -> list[PoolSettings]:
    """The same pools. Raises BadScaling where two count the same tasks."""
    seen: dict[str, set[str | None]] = {}
    for pool in pools:
        versions = seen.setdefault(pool.model, set())
        if pool.version in versions:
            raise BadScaling(f"{pool.name} is there twice")
        if versions and None in (*versions, pool.version):
            raise BadScaling(f"{pool.model} without a version counts all its versions: give each pool of it a version")
        versions.add(pool.version)
    return list(pools)


def opened(pools: Sequence[PoolSettings], broker: str, store: str) -> list[Scaled]:
    """The pools with their actuators. Raises BadScaling, and ModuleNotFoundError where an extra is not installed."""
    here = sum(pool.rules.max for pool in pools if pool.actuator.partition(":")[0] == "local")

    def actuator(pool: PoolSettings) -> Actuator | None:
        model = pool.reference or pool.model
        return open_actuator(pool.actuator, model=model, broker=broker, store=store, here=here)

    try:
        return [Scaled(pool, actuator(pool)) for pool in pools]
    except ValueError as error:
        raise BadScaling(str(error)) from error


def _waits(said: Mapping[str, float]) -> dict[str, float]:
    for tier, seconds in said.items():
        if tier not in TARGET_WAIT_S:
            raise ValueError(f"target_wait has no tier {tier}; it has {', '.join(TARGET_WAIT_S)}")
        if seconds <= 0:
            raise ValueError(f"target_wait.{tier} is {seconds:g}; it must be above 0")
    return {**TARGET_WAIT_S, **said}


def _said(error: ValidationError) -> str:
    """Pydantic's first error as a sentence that begins with the key."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"there is no key {key}; a pool has {', '.join(Table.model_fields)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    return f"{key} is {shown(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}"
