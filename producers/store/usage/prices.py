"""Prices of tokens and of devices, from a file in TOML or JSON.

    currency = "EUR"

    ["tiny"."default"]          # model, tier; "*" stands for every other one
    prompt = 0.20               # per million tokens of prompts that were not cached
    cached = 0.02               # per million that were; absent: the price of `prompt`
    output = 0.60

    [devices."tiny"]            # model; "*" stands for every other one
    hour = 2.50                 # an hour of one worker's device
    watts = 700                 # what it draws while it computes; absent: its energy is not known

What has no price costs nothing, and is counted as `unpriced`. Prices are decimal numbers, so that sums are exact.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from producers.contract import keys
from producers.contract.profile import sane
from producers.contract.record import Record
from producers.errors import shown
from producers.store.usage.ledger import COUNTS, Group

ANY: Final = "*"
_MILLION: Final = Decimal(1_000_000)
DEVICES: Final = "devices"
_HOUR_US: Final = Decimal(3_600_000_000)
_FIELDS: Final = ("prompt", "cached", "output")
_PROMPT, _CACHED, _OUTPUT = (COUNTS.index(name) for name in _FIELDS)


class BadPrices(ValueError):
    """A price table that cannot be read, in words."""


@dataclass(frozen=True, slots=True)
class Device:
    """The price of an hour of a worker's device, and its power while it computes (W), where that is known."""

    hour: Decimal
    watts: Decimal | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    """A price table: (model, tier) -> price of a million tokens: prompt, cached, output; and model -> its device."""

    currency: str
    table: Mapping[tuple[str, str], tuple[Decimal, Decimal, Decimal]] = field(default_factory=dict)
    devices: Mapping[str, Device] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Prices:
        """Raises BadPrices, for a file that cannot be read as well."""
        try:
            raw = path.read_text("utf-8")
            content = (
                json.loads(raw, parse_float=Decimal)
                if path.suffix == ".json"
                else tomllib.loads(raw, parse_float=Decimal)
            )
        except OSError as error:
            raise BadPrices(f"the prices in {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise BadPrices(f"the prices in {path} cannot be read: {error}") from error
        if (
            not isinstance(content, dict)
            or not isinstance(currency := content.pop("currency", None), str)
            or not currency
        ):
            raise BadPrices(f'the prices in {path} lack a currency: `currency = "EUR"`')
        devices = content.pop(DEVICES, {})
        if not isinstance(devices, dict):
            raise BadPrices(f"{DEVICES} is {shown(devices)}; it needs a table for each model: [{DEVICES}.tiny]")
        return cls(
            currency,
            {(m, t): _price(m, t, price) for m, tiers in content.items() for t, price in _tiers(m, tiers)},
            {model: _device(model, entry) for model, entry in devices.items()},
        )

    @classmethod
    def parse(cls, kept: str) -> Prices:
        """The inverse of `to_json`."""
        values = json.loads(kept)
        table = {(model, tier): tuple(map(Decimal, price)) for model, tier, *price in values["table"]}
        return cls(values["currency"], table)  # type: ignore[arg-type]

    def to_json(self) -> str:
        """The prices of tokens as they are kept beside a batch."""
        table = [[*where, *map(str, price)] for where, price in self.table.items()]
        return json.dumps({"currency": self.currency, "table": table})

    def of(self, group: Group, counts: tuple[int, ...]) -> Decimal | None:
        """The cost of a group's tokens; None where the table has no price for them."""
        if (price := self._price(group.model, group.tier)) is None:
            return None
        prompt, cached, output = price
        fresh = counts[_PROMPT] - counts[_CACHED]
        return (fresh * prompt + counts[_CACHED] * cached + counts[_OUTPUT] * output) / _MILLION

    def of_record(self, record: Record) -> Decimal | None:
        """The cost of a task's tokens; None before its end, or where the table has no price for them. Raises
        BrokenRecord."""
        usage: Any = record.json("usage")
        if not record.final or not isinstance(usage, dict):
            return None
        used = {"prompt": "prompt_tokens", "cached": "cached_tokens", "output": "output_tokens"}
        tokens = [sane(usage.get(used[name])) if name in used else 0 for name in COUNTS]
        counts = tuple(int(number or 0) for number in tokens)
        return self.of(Group("", "", record.model, "", record.tier), counts)

    def device_cost(self, model: str, engine_us: int | Decimal) -> Decimal | None:
        """The cost of a device for so much of the engine's time; None where the table has no price for it."""
        device = self._device(model)
        return None if device is None else device.hour * engine_us / _HOUR_US

    def joules(self, model: str, engine_us: int) -> Decimal | None:
        """The energy that a device draws in so much of the engine's time; None where the table does not say."""
        device = self._device(model)
        return None if device is None or device.watts is None else device.watts * engine_us / _MILLION

    def _device(self, model: str) -> Device | None:
        return self.devices.get(model, self.devices.get(ANY))

    def rates(self, model: str, tier: str) -> tuple[int, ...] | None:
        """The price of one token of prompt, cached prompt and output, in 10^-12 of the currency, rounded up; None where
        the table has no price for them."""
        price = self._price(model, tier)
        return None if price is None else tuple(math.ceil(part * _MILLION) for part in price)

    def _price(self, model: str, tier: str) -> tuple[Decimal, Decimal, Decimal] | None:
        places = ((model, tier), (model, ANY), (ANY, tier), (ANY, ANY))
        return next((self.table[where] for where in places if where in self.table), None)


def _tiers(model: str, tiers: Any) -> list[tuple[str, Any]]:
    if not isinstance(tiers, dict) or (bad := [tier for tier in tiers if tier not in (*keys.TIERS, ANY)]):
        wrong = tiers if not isinstance(tiers, dict) else bad[0]
        raise BadPrices(f"prices of {shown(model)}: {shown(wrong)} is no tier: {', '.join(keys.TIERS)} or {ANY}")
    return list(tiers.items())


def _price(model: str, tier: str, entry: Any) -> tuple[Decimal, Decimal, Decimal]:
    where = f"the price of {shown(model)}, {tier}"
    if not isinstance(entry, dict) or not {"prompt", "output"} <= entry.keys() <= {*_FIELDS}:
        raise BadPrices(f"{where} is {shown(entry)}; it needs prompt and output, and may have cached")
    prompt, cached, output = (entry.get(name, entry["prompt"]) for name in _FIELDS)
    return _amount(where, prompt), _amount(where, cached), _amount(where, output)


def _device(model: str, entry: Any) -> Device:
    where = f"the device of {shown(model)}"
    if not isinstance(entry, dict) or not {"hour"} <= entry.keys() <= {"hour", "watts"}:
        raise BadPrices(f"{where} is {shown(entry)}; it needs hour, and may have watts")
    return Device(*(_amount(f"{name} of {where}", entry[name], "it") for name in ("hour", "watts") if name in entry))


def _amount(where: str, value: Any, what: str = "a million tokens") -> Decimal:
    price = Decimal(value) if isinstance(value, int | Decimal) and not isinstance(value, bool) else Decimal("nan")
    if price.is_nan() or not 0 <= price <= _MILLION:
        raise BadPrices(
            f"{where} is {shown(value)}; {what} may {'be' if what == 'it' else 'cost'} from 0 to {_MILLION}"
        )
    return price
