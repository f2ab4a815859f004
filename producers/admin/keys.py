"""API keys, for operators: checks a request, and makes each change with its audit entry.

`penstock keys` and `/v1/keys` are the same functions: both take the fields of FIELDS, and show what `view` gives.
"""

from __future__ import annotations

import itertools
import re
import time
import unicodedata
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from redis.asyncio import Redis

from producers.contract import keys
from producers.contract.fields import MAX_TENANT
from producers.errors import InvalidTask, PenstockError, shown
from producers.store.access import api_keys
from producers.store.access.api_keys import BILLION, KEPT, PREFIX, SCOPES, Key, Limits
from producers.store.access.audit import Actor

#: Scopes of a key, unless it is given others.
USUAL: Final = ("submit", "read", "cancel")
MAX_NAME: Final = 200
#: The largest limit.
MAX_LIMIT: Final = 10**12
#: The largest budget in money: with it, all sums are exact in scripts.
MAX_MONEY: Final = 10**6
#: An amount as it may be written. `Decimal` would also take digits of other scripts, and `1_000`.
MONEY: Final = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
#: Most models of a key.
MAX_MODELS: Final = 100
#: Longest life of a key that expires, and longest overlap of a rotation (s).
LONGEST_S: Final = 10 * 365 * 24 * 3600
MAX_OVERLAP_S: Final = 30 * 24 * 3600
#: Unicode's categories of characters that no name has: controls, line ends, and what turns the direction of writing.
UNSEEN: Final = frozenset({"Cc", "Cf", "Zl", "Zp"})
#: Fields that nothing shows.
_HIDDEN: Final = ("digest", "old_digest", "old_until", "limits", "unconfirmed")
LIMITS: Final = tuple(limit.name for limit in fields(Limits) if limit.name not in KEPT)
#: Fields that may be changed later.
CHANGEABLE: Final = ("name", "models", "tiers", "expires_at", *LIMITS)


class KeyEnded(PenstockError):
    """The key is revoked or has expired: nothing brings it back."""


def checked(requested: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The fields of a new key, with defaults. None counts as missing. Raises InvalidTask."""
    values = {name: value for name, value in read(requested, FIELDS).items() if value is not None}
    if "tenant" not in values:
        raise InvalidTask("tenant is missing: whose key is it?", param="tenant", code="missing_parameter")
    if values["tenant"].startswith(api_keys.RESERVED):
        text = f"tenant is {shown(values['tenant'])}; names that begin with {api_keys.RESERVED} are the system's own"
        raise InvalidTask(text, param="tenant")
    values = {"name": values["tenant"], "scopes": USUAL, **values}
    _check_expiry(values.get("expires_at"), now)
    _check_together(values)
    return values


def read(requested: Mapping[str, Any], allowed: Collection[str]) -> dict[str, Any]:
    """The requested fields, each checked by itself; None stays None. Raises InvalidTask."""
    for name in requested:
        if name not in allowed:
            text = f"unknown field {shown(name)}; there are {', '.join(allowed)}"
            raise InvalidTask(text, param=name, code="unknown_parameter")
    return {name: None if value is None else FIELDS[name](name, value) for name, value in requested.items()}


def limited(old: Limits, values: Mapping[str, Any]) -> Limits:
    """Limits with those of these fields that are limits in place of the old ones. Raises InvalidTask."""
    new = replace(old, **{name: values[name] for name in (*LIMITS, *KEPT) if name in values})
    check_limits(asdict(new))
    return new


async def create(store: Redis, requested: Mapping[str, Any], actor: Actor) -> tuple[Key, str]:
    """Make a key of the requested fields. Returns its text, too, which nothing can show again.

    Raises InvalidTask, TooManyKeys, redis.exceptions.RedisError or OSError.
    """
    values = checked(requested, time.time())
    limits = Limits(**{name: values.pop(name) for name in LIMITS if name in values})
    key, token = api_keys.new_key(**values, limits=limits)
    await api_keys.create(store, key, actor.did("key.create", key.id, key.tenant))
    return key, token


async def rotate(store: Redis, key_id: str, overlap_s: float, actor: Actor) -> tuple[Key, str] | None:
    """Give a key a new secret; the old one works for `overlap_s` seconds more. None if there is no such key.

    Raises KeyEnded, and as `create` does.
    """
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        text = f"overlap is {shown(overlap_s)}; it must be from 0 to {MAX_OVERLAP_S} seconds"
        raise InvalidTask(text, param="overlap")
    tokens: list[str] = []

    def new(key: Key) -> Key:
        _check_going(key)
        key, token = api_keys.rotated(key, overlap_s, time.time())
        tokens.append(token)
        return key

    key = await api_keys.change(store, key_id, new, actor.did("key.rotate", key_id))
    return None if key is None else (key, tokens[-1])


async def change(store: Redis, key_id: str, requested: Mapping[str, Any], actor: Actor) -> Key | None:
    """Change fields of a key (CHANGEABLE); None unsets one. What was counted stays counted. None where there is no
    such key. Raises InvalidTask, KeyEnded, redis.exceptions.RedisError or OSError."""
    values = read(requested, CHANGEABLE)
    if "name" in values and values["name"] is None:
        raise InvalidTask("name is null; a key has one", param="name")
    _check_expiry(values.get("expires_at"), time.time())
    values |= {name: () for name in ("models", "tiers") if name in values and values[name] is None}
    key_fields = {name: value for name, value in values.items() if name not in LIMITS}

    def new(key: Key) -> Key:
        _check_going(key)
        key = replace(key, **key_fields, limits=limited(key.limits, values))
        _check_together({**asdict(key), **asdict(key.limits)})
        return key

    return await api_keys.change(store, key_id, new, actor.did("key.change", key_id))


async def turn(store: Redis, key_id: str, verb: str, actor: Actor) -> Key | None:
    """`disable`, `enable`, `revoke` or `confirm` a key; done before, nothing changes. None where there is no such key.

    Raises KeyEnded, redis.exceptions.RedisError or OSError.
    """
    return await api_keys.change(store, key_id, TURNS[verb], actor.did(f"key.{verb}", key_id))


async def matching(store: Redis, prefix: str = "", tenant: str | None = None) -> list[Key]:
    """The keys of a tenant (None: of all) whose id begins with `prefix`, the newest first.

    `prefix`: of an id, or of a whole key.
    """
    begins = prefix.removeprefix(PREFIX).partition("_")[0]
    every = await api_keys.every(store)
    return [key for key in every if key.id.startswith(begins) and tenant in (None, key.tenant)]


def view(key: Key, now: float) -> dict[str, Any]:
    """A key as it is shown: without digests, with its state and, while an old secret works, until when."""
    visible = {name: value for name, value in asdict(key).items() if name not in _HIDDEN}
    until = key.old_until if key.old_digest is not None and now < key.old_until else None
    limits = {name: getattr(key.limits, name) for name in LIMITS}
    return {**visible, **limits, "state": key.state(now), "old_secret_until": until}


def _disable(key: Key) -> Key:
    _check_going(key)
    return key if key.disabled_at is not None else replace(key, disabled_at=int(time.time()))


def _enable(key: Key) -> Key:
    _check_going(key)
    return replace(key, disabled_at=None, unconfirmed=False)


def _confirm(key: Key) -> Key:
    return replace(key, disabled_at=None, unconfirmed=False) if key.unconfirmed else key


def _revoke(key: Key) -> Key:
    return key if key.revoked_at is not None else replace(key, revoked_at=int(time.time()))


TURNS: Final[Mapping[str, Callable[[Key], Key]]] = {
    "disable": _disable,
    "enable": _enable,
    "revoke": _revoke,
    "confirm": _confirm,
}


def _check_going(key: Key) -> None:
    if key.ended(time.time()):
        raise KeyEnded(f"The key {key.id} is {key.state(time.time())} for good; make another one.")


def _text(max_length: int) -> Callable[[str, Any], str]:
    def text(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise InvalidTask(f"{name} is {shown(value)}; it must be text", param=name, code="invalid_type")
        if not 1 <= len(value) <= max_length or not value.strip():
            raise InvalidTask(
                f"{name} is {shown(value)}; it must be a name of 1 to {max_length} characters", param=name
            )
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidTask(f"{name} is {shown(value)}; it must be valid Unicode", param=name) from None
        # Such a name would forge lines of lists and of the audit log.
        if any(unicodedata.category(sign) in UNSEEN for sign in value):
            raise InvalidTask(f"{name} is {shown(value)}; it must have no control characters", param=name)
        return value

    return text


def _name_list(max_entries: int, allowed: Collection[str] = ()) -> Callable[[str, Any], tuple[str, ...]]:
    """A list of names, each once; of those that are known, if any are."""

    def names(name: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise InvalidTask(f"{name} is {shown(value)}; it must be a list", param=name, code="invalid_type")
        if not 1 <= len(value) <= max_entries:
            raise InvalidTask(f"{name} has {len(value)} entries; it must have 1 to {max_entries}", param=name)
        for entry in value:
            if allowed and entry not in allowed:
                raise InvalidTask(f"{name} has {shown(entry)}; there are {', '.join(allowed)}", param=name)
            _text(MAX_NAME)(name, entry)
        return tuple(dict.fromkeys(value))

    return names


def _second(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTask(f"{name} is {shown(value)}; it must be unix seconds", param=name, code="invalid_type")
    return value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTask(f"{name} is {shown(value)}; it must be a whole number", param=name, code="invalid_type")
    if not 1 <= value <= MAX_LIMIT:
        raise InvalidTask(f"{name} is {shown(value)}; it must be from 1 to {MAX_LIMIT}", param=name)
    return value


def _money(name: str, value: Any) -> str:
    """A decimal number, as it is kept: text without an exponent."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not MONEY.fullmatch(str(value)):
        raise InvalidTask(f"{name} is {shown(value)}; it must be a decimal number", param=name, code="invalid_type")
    amount = Decimal(str(value))
    if not Decimal(1) / BILLION <= amount <= MAX_MONEY or amount * BILLION % 1:
        text = f"{name} is {shown(value)}; it must be above 0 and at most {MAX_MONEY}, with at most 9 decimals"
        raise InvalidTask(text, param=name)
    return f"{amount.normalize():f}"


def _check_together(values: Mapping[str, Any]) -> None:
    """Raises InvalidTask for fields of a key that contradict each other."""
    check_limits(values)
    for name in ("models", "tiers", *LIMITS):
        if values.get(name) and not {"submit", "admin"} & {*values["scopes"]}:
            scopes = ", ".join(values["scopes"])
            if name == "max_streams" and "read" in values["scopes"]:
                continue  # it reads streams, and files
            text = f"with the scopes {scopes} a key may submit nothing, so {name} would have no effect"
            raise InvalidTask(text, param=name)


def check_limits(values: Mapping[str, Any]) -> None:
    """Raises InvalidTask for a limit that another one makes useless."""
    pairs = itertools.product(("max_prompt", "max_output"), ("tpm", "budget_tokens"))
    for name, larger in (*pairs, ("shorten_to", "max_output")):
        if (values.get(name) or 0) > (values.get(larger) or MAX_LIMIT):
            text = f"{name} is {values[name]}, and {larger} {values[larger]}: no task could be so large"
            raise InvalidTask(text, param=name)


def _check_expiry(at: int | None, now: float) -> None:
    if at is not None and not now < at <= now + LONGEST_S:
        when = datetime.fromtimestamp(at, UTC).isoformat() if 0 <= at < 2**35 else shown(at)
        text = f"the key would expire at {when}; that must lie ahead, by ten years at most"
        raise InvalidTask(text, param="expires_at")


#: Field of a new key -> its check.
FIELDS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "tenant": _text(MAX_TENANT),
    "name": _text(MAX_NAME),
    "scopes": _name_list(len(SCOPES), tuple(SCOPES)),
    "models": _name_list(MAX_MODELS),
    "tiers": _name_list(len(keys.TIERS), tuple(keys.TIERS)),
    "expires_at": _second,
    **dict.fromkeys((*LIMITS, *KEPT), _count),
    "budget_money": _money,
}
