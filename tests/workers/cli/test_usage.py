"""`penstock usage`, against a real server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from redis import Redis

from producers.contract import keys
from producers.store.usage.ledger import COUNTS
from tests.workers.cli.conftest import Run


@pytest.fixture
def ledger(valkey: Redis) -> None:
    for tenant, output in (("acme", 5), ("acme", 7), ("\x1b[2J", 1)):
        row = dict.fromkeys(COUNTS[4:], 0) | {"prompt": 1000, "output": output, "status": "completed"}
        valkey.xadd(keys.LEDGER, row | {"key": "", "tenant": tenant, "model": "tiny", "version": "1", "tier": "flex"})


@pytest.mark.usefixtures("ledger")
def test_usage_is_shown_to_people_and_programs(operate: Run, tmp_path: Path) -> None:
    shown = operate("usage", "--by", "tenant").out
    head = [
        "tenant",
        "tasks",
        "prompt",
        "cached",
        "output",
        "recomputed",
        "seconds",
        "engine s",
        "idle s",
        "starting s",
    ]
    assert [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()[::2]] == [
        head,
        ["acme", "2", "2000", "0", "12", "0", "0.0", "0.0", "0.0", "0.0"],
    ]
    assert "\x1b" not in shown
    (whole,) = map(json.loads, operate("usage", "--json").out.splitlines())
    assert (whole["tasks"], whole["output_tokens"]) == (3, 13)
    assert operate("usage", "--csv", "--by", "model", "--by", "tier").out.splitlines()[1].startswith("tiny,flex,3,")
    (tmp_path / "p.toml").write_text('currency = "EUR"\n["*"."*"]\nprompt = 3\noutput = 0\n')
    (whole,) = map(json.loads, operate("usage", "--json", "--prices", str(tmp_path / "p.toml")).out.splitlines())
    assert (whole["cost"], whole["currency"]) == ("0.009", "EUR")


def test_what_cannot_be_meant_is_refused(operate: Run, tmp_path: Path) -> None:
    assert operate("usage").out.split()[-8:] == ["0", "0", "0", "0", "0.0", "0.0", "0.0", "0.0"]
    assert operate("usage", "--by", "day").out == "No task ended in this time.\n"
    backwards = ["--since", "2026-11-01T12:30", "--until", "2026-11-01T12:10"]
    for bad in (
        ["--by", "colour"],
        ["--since", "x"],
        backwards,
        ["--since", "2199-01-01"],
        ["--json", "--csv"],
        ["--prices", str(tmp_path / "none.toml")],
    ):
        assert operate("usage", *bad).status != 0
