"""docs/run/runbook.md: has a row for each alert, and its commands run on a real system."""

from __future__ import annotations

import json
import re

import pytest
from redis import Redis

from producers.broker.redis.keys import DEAD
from tests.processes import ROOT
from tests.producers.gateway.test_fleet import announce, decide
from tests.workers.cli.conftest import Run

PAGE = (ROOT / "docs" / "run" / "runbook.md").read_text("utf-8")
#: Processes, and what changes something.
NOT_RUN = (
    "tasks retry",
    "drain",
    "autoscaler",
    "sweeper",
    "sources",
    "webhooks run",
    "webhooks replay",
    "dlq replay",
    "scale retry",
)
COMMANDS = sorted(set(re.findall(r"`penstock ([^`]*)`|^    penstock (.*)$", PAGE, re.MULTILINE)))
LOOKS = sorted({line for pair in COMMANDS if (line := "".join(pair)) and not line.startswith(NOT_RUN)})


def test_each_alert_has_a_row() -> None:
    alerts = (ROOT / "infra" / "prometheus" / "alerts.yml").read_text("utf-8")
    named = re.findall(r"- alert: (\w+)", alerts)
    rows = re.findall(r"^\| ((?:`Penstock\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    assert sorted(re.findall(r"Penstock\w+", " ".join(rows))) == sorted(named)


def test_the_page_names_commands() -> None:
    assert len(LOOKS) >= 12


@pytest.mark.parametrize("line", LOOKS)
def test_what_only_looks_can_be_run(
    line: str, penstock: Run, valkey: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_URL", valkey_url)
    announce(valkey)
    decide(valkey, "tiny", 1.0, starts={"failures": 3})
    task_id = penstock("submit", "tiny", "def f").out.strip()
    message = json.dumps({"headers": {"id": task_id}, "properties": {}})
    valkey.rpush(DEAD, json.dumps({"reason": "workers died", "list": "l", "at": 1, "message": message}))
    before = valkey.dbsize()
    ran = penstock(*line.replace("MODEL", "tiny").replace("ID", task_id).split())
    assert ran.status in (0, 1), ran.err
    assert ran.out or ran.err
    assert valkey.dbsize() == before
