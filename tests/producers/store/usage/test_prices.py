"""A price table that cannot be meant is refused, in words."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from producers.store.usage.ledger import COUNTS, Group
from producers.store.usage.prices import BadPrices, Prices

COUNTED = dict.fromkeys(COUNTS, 0) | {"prompt": 1_000_000, "cached": 0, "output": 1_000_000}


def read(folder: Path, text: str, name: str = "prices.toml") -> Prices:
    (folder / name).write_text(text)
    return Prices.read(folder / name)


def test_the_most_particular_price_counts(tmp_path: Path) -> None:
    price = {"prompt": 1, "output": 0}
    table = {
        "currency": "EUR",
        "a": {"flex": price, "*": {"prompt": 2, "output": 0}},
        "*": {"flex": {"prompt": 3.5, "output": 0}},
    }
    prices = read(tmp_path, json.dumps(table), "prices.json")
    found = {
        (model, tier): prices.of(Group("", "", model, "1", tier), tuple(COUNTED.values()))
        for model in ("a", "b")
        for tier in ("flex", "batch")
    }
    assert found == {("a", "flex"): 1, ("a", "batch"): 2, ("b", "flex"): Decimal("3.5"), ("b", "batch"): None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lack a currency"),
        ("currency = 5", "lack a currency"),
        ("currency = ", "cannot be read"),
        ('currency = "EUR"\ntiny = 5', "is no tier"),
        ('currency = "EUR"\n[tiny.gold]\nprompt = 1\noutput = 1', "is no tier"),
        ('currency = "EUR"\n[tiny.flex]\nprompt = 1', "it needs prompt and output"),
        ('currency = "EUR"\n[tiny.flex]\nprompt = 1\noutput = 1\ninput = 1', "it needs prompt and output"),
        ('currency = "EUR"\n[tiny.flex]\nprompt = -1\noutput = 1', "may cost from 0"),
        ('currency = "EUR"\n[tiny.flex]\nprompt = nan\noutput = 1', "may cost from 0"),
        ('currency = "EUR"\n[tiny.flex]\nprompt = 1e30\noutput = 1', "may cost from 0"),
        ('currency = "EUR"\n[tiny.flex]\nprompt = true\noutput = 1', "may cost from 0"),
        ('currency = "EUR"\n[tiny.flex]\nprompt = "1"\noutput = 1', "may cost from 0"),
        ('currency = "EUR"\ndevices = 5', "devices is 5"),
        ('currency = "EUR"\n[devices]\ntiny = 5', 'the device of "tiny" is 5; it needs hour'),
        ('currency = "EUR"\n[devices.tiny]\nwatts = 5', "it needs hour"),
        ('currency = "EUR"\n[devices.tiny]\nhour = 1\nwatt = 5', "may have watts"),
        ('currency = "EUR"\n[devices.tiny]\nhour = -1', 'hour of the device of "tiny" is -1; it may be from 0'),
    ],
)
def test_bad_prices_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadPrices, match=said):
        read(tmp_path, text)


def test_prices_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadPrices, match="cannot be read"):
        Prices.read(tmp_path / "none.toml")


def test_an_hour_of_a_device_and_what_it_draws(tmp_path: Path) -> None:
    text = 'currency = "EUR"\n[devices.tiny]\nhour = 3.6\nwatts = 700\n[devices."*"]\nhour = 1'
    prices = read(tmp_path, text)
    assert (prices.device_cost("tiny", 2_500_000), prices.joules("tiny", 2_500_000)) == (Decimal("0.0025"), 1750)
    assert (prices.device_cost("other", 3_600_000_000), prices.joules("other", 1)) == (1, None)
    assert Prices.parse(prices.to_json()).device_cost("tiny", 1) is None, "batches keep the prices of tokens alone"
