"""The pools that an autoscaler scales: their settings, and how a TOML file or a command line gives them.

A pool is `MODEL`, all versions of a model together, or `MODEL@VERSION`, one version alone. `Pools` is called at each
tick with the fleet as it was just read: pools may come (a new version is being rolled out) and go (an old one is
empty). `fixed` is for those that a command line or a file names. A file has a table for each pool:

    [[pool]]
    model = "tiny"            # its reference for workers
    version = "1a2b..."       # only this version; left out: all versions together
    min = 0
    max = 4
    cool_down = 300           # and any other of `workers.autoscaler.policy.Rules`
    target_wait.priority = 1
    actuator = "kubernetes://default/worker-tiny"
    tries = 5                 # and start_limit: of starts that fail

Unknown keys and bad values are refused by name, before anything is started.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from producers.admin.fleet import Fleet
from producers.errors import shown
from workers.autoscaler.actuators import EXPORT, Actuator, checked, open_actuator
from workers.autoscaler.policy import LOCAL_CHEAP_START_S, TARGET_WAIT_S, Rules
from workers.library import name_of

_HINTS: Final = get_type_hints(Rules)
_RULES: Final = {
    entry.name: (_HINTS[entry.name], {} if entry.default is MISSING else entry.default) for entry in fields(Rules)
}


#: Time (s) for which workers of a version are kept that has just been the default: who goes back to it finds them.
KEEP_WARM_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings of one pool. Times are seconds."""

    model: str
    version: str | None = None
    """None: all versions of the model."""
    rules: Rules = field(default_factory=Rules)
    actuator: str = "export"
    """Its URL; see `workers.autoscaler.actuators`."""
    tries: int = 5
    """Starts in a row that may fail. After that no worker is started until `penstock scale retry`, or a long pause."""
    start_limit: float | None = None
    """Longest start of a worker; a longer one has failed. None: 120 s, or four measured cold starts if longer."""
    reference: str | None = None
    """The model's reference for workers; None: its name."""
    keep_warm: float = KEEP_WARM_S
    """Time for which a version that was the default keeps workers, at least one, though another one has replaced it."""

    @property
    def name(self) -> str:
        return self.model if self.version is None else f"{self.model}@{self.version}"


class Scaled(NamedTuple):
    """A pool, and what starts and ends its workers. None: another program follows the exported number.

    The actuator must be the same object at each tick. Whoever made it closes it, once the pool is gone.
    """

    settings: PoolSettings
    actuator: Actuator | None


#: Gives the pools of this moment, for the fleet as it was just read. It must not wait.
Pools = Callable[[Fleet], Sequence[Scaled]]


def fixed(pools: Sequence[Scaled]) -> Pools:
    """Always the same pools."""
    return lambda fleet: pools


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
    keep_warm: float = Field(KEEP_WARM_S, ge=0)


#: All keys of a pool, with their kinds.
Table: Final[type[_Pool]] = create_model("Table", __base__=_Pool, **_RULES)  # type: ignore[call-overload]


def read(path: Path) -> list[PoolSettings]:
    """The pools of a file. Raises BadScaling."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadScaling(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadScaling(f"{path} is not TOML: {error}") from error
    tables = document.pop("pool", None)
    if document:
        raise BadScaling(f"{path} has an unknown key {next(iter(document))}; pools are tables, each headed by [[pool]]")
    if not isinstance(tables, list) or not tables:
        raise BadScaling(f'{path} has no pool; a pool is a table [[pool]] with model = "..." at least')
    pools = []
    for number, table in enumerate(tables, 1):
        try:
            pools.append(parse(table))
        except BadScaling as error:
            raise BadScaling(f"{path}, [[pool]] {number}: {error}") from None
    try:
        return apart(pools)
    except BadScaling as error:
        raise BadScaling(f"{path}: {error}") from None


def parse(values: Mapping[str, Any]) -> PoolSettings:
    """The pool of one table. Raises BadScaling."""
    if not isinstance(values, Mapping):
        raise BadScaling(f"it is {shown(values)}, and must be a table")
    try:
        table = Table.model_validate(dict(values))
        settings = {name: getattr(table, name) for name in _RULES}
        settings |= cheap_start(values, local=table.actuator.partition(":")[0] == "local")
        settings["target_wait"] = _waits(settings["target_wait"])
        rules = Rules(**settings)
        checked(table.actuator)
        name_of(table.model)
    except ValidationError as error:
        raise BadScaling(_first_error(error)) from None
    except ValueError as error:
        raise BadScaling(str(error)) from None
    return PoolSettings(
        *(name_of(table.model), table.version, rules, table.actuator, table.tries, table.start_limit, table.model),
        keep_warm=table.keep_warm,
    )


def cheap_start(values: Mapping[str, Any], *, local: bool) -> dict[str, float]:
    """The setting `cheap_start` where it is not the usual one. `values`: the settings that were given. A patience that
    was given holds whatever a start takes."""
    if "cheap_start" in values:
        return {}
    if "patience" in values:
        return {"cheap_start": 0.0}
    return {"cheap_start": LOCAL_CHEAP_START_S} if local else {}


def parse_rule(rule: str) -> dict[str, Any]:
    """A table of one rule, written NAME=VALUE. Raises BadScaling."""
    name, _, value = rule.partition("=")
    try:
        return tomllib.loads(f"{name.strip().replace('-', '_')} = {value}")
    except tomllib.TOMLDecodeError:
        raise BadScaling(
            f"{rule!r} is no rule; write NAME=NUMBER, such as headroom=0.7 or target_wait.flex=60"
        ) from None


def one_pool(options: Mapping[str, Any], rules: Sequence[str]) -> PoolSettings:
    """A pool of a command line: keys (None: unset), and rules as NAME=VALUE. Raises BadScaling."""
    table = {name: value for name, value in options.items() if value is not None}
    for rule in rules:
        for key, value in parse_rule(rule).items():
            table[key] = {**table[key], **value} if isinstance(value, dict) and key in table else value
    return parse(table)


def apart(pools: Sequence[PoolSettings]) -> list[PoolSettings]:
    """The same pools. Raises BadScaling where two count the same tasks."""
    versions_of: dict[str, set[str | None]] = {}
    for pool in pools:
        versions = versions_of.setdefault(pool.model, set())
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


def _waits(waits: Mapping[str, float]) -> dict[str, float]:
    for tier, seconds in waits.items():
        if tier not in TARGET_WAIT_S:
            raise ValueError(f"target_wait has no tier {tier}; it has {', '.join(TARGET_WAIT_S)}")
        if seconds <= 0:
            raise ValueError(f"target_wait.{tier} is {seconds:g}; it must be above 0")
    return {**TARGET_WAIT_S, **waits}


def _first_error(error: ValidationError) -> str:
    """Pydantic's first error as a sentence that begins with the key."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"there is no key {key}; a pool has {', '.join(Table.model_fields)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    return f"{key} is {shown(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}"
