"""`penstock tenants`, against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from redis import Redis

from producers.broker.redis import calls as broker
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run as call
from producers.contract import keys
from producers.contract.message import Message
from tests.workers.cli.conftest import Run

QUEUE = keys.pool_queue("tiny", "1", "test")


def send(valkey: Redis, tenant: str, tier: str, count: int) -> None:
    for number in range(count):
        message = Message(f"{tenant}{number}", QUEUE, tier, 1, 10, tenant)
        valkey.lpush(broker_keys.list_of(message), message.envelope())


def test_who_waits_is_listed_with_what_waits(operate: Run, valkey: Redis) -> None:
    assert operate("tenants", "ls").out == "No tenant has waiting tasks.\n"
    valkey.hset(keys.POOLS, QUEUE, json.dumps({"model": "tiny", "version": "1"}))
    send(valkey, "acme", "default", 3)
    send(valkey, "", "batch", 2)
    assert "5 tasks are not sorted" in operate("tenants", "ls").out
    valkey.set(keys.lease("w"), "{}")
    none = broker.Credit((0,) * 4, (0,) * 4)
    sizes = {"capacity": (1, 1), "plain_tokens": 1, "ageing_ms": 10**9, "max_redeliveries": 5}
    call(valkey, broker.fetch("w", [QUEUE], ["u"], none, **sizes))
    send(valkey, "acme", "batch", 1)
    assert operate("tenants", "weigh", "acme", "4").status == 0
    assert operate("tenants", "weigh", "idle", "0.5").status == 0
    assert operate("tenants", "ls").out.splitlines() == [
        "(no tenant)  weight 1  waiting: 2 batch",
        "acme  weight 4  waiting: 3 default",
        "idle  weight 0.5  waiting: nothing",
        "1 tasks are not sorted by tenant yet: workers sort them",
    ]
    told = [json.loads(line) for line in operate("tenants", "ls", "--json").out.splitlines()]
    assert told[1] == {"tenant": "acme", "weight": 4, "waiting": {"priority": 0, "default": 3, "flex": 0, "batch": 0}}


def test_a_weight_of_one_is_none_and_a_senseless_one_is_refused(operate: Run, valkey: Redis) -> None:
    operate("tenants", "weigh", "acme", "4")
    assert valkey.hgetall(broker_keys.WEIGHTS) == {b"acme": b"4.0"}
    refused = operate("tenants", "weigh", "acme", "0")
    assert refused.status
    assert "must be from 0.001 to 1000" in refused.err
    operate("tenants", "weigh", "acme", "1")
    assert not valkey.exists(broker_keys.WEIGHTS)


def test_without_a_broker_it_is_that_of_up_in_this_directory(
    run: Run, valkey: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BROKER_URL", raising=False)
    nowhere = run("tenants", "ls")
    assert nowhere.status == 2
    assert "such as in BROKER_URL" in nowhere.err
    (tmp_path / ".penstock").mkdir()
    (tmp_path / ".penstock" / "port").write_text(str(valkey.connection_pool.connection_kwargs["port"]))
    assert run("tenants", "ls").out == "No tenant has waiting tasks.\n"
    assert run("dlq", "ls").out == "There are no dead letters.\n"


def test_a_tenants_limits_are_shown_and_changed(operate: Run) -> None:
    assert operate("tenants", "limit", "acme").out == "acme: no limits\n"
    assert (
        operate("tenants", "limit", "acme", "--rpm", "60", "--max-output", "100").out
        == "acme: rpm 60, max_output 100\n"
    )
    assert json.loads(operate("tenants", "limit", "acme", "--rpm", "none", "--json").out)["max_output"] == 100
    for wrong in (("--tpm", "50"), ("--rpm", "0"), ("--rpm", "x")):
        assert operate("tenants", "limit", "acme", *wrong).status == 2
    assert (
        operate("tenants", "limit", "acme", "--budget-money", "2.50").out == "acme: budget_money 2.5, max_output 100\n"
    )
    assert operate("tenants", "limit", "acme", "--max-streams", "8").out.endswith(", max_streams 8, max_output 100\n")


def test_what_is_kept_for_a_tenant_is_limited_and_for_a_key_it_is_not(operate: Run) -> None:
    assert operate("tenants", "limit", "acme", "--max-file-bytes", "5000", "--max-files", "7").status == 0
    shown = json.loads(operate("tenants", "limit", "acme", "--max-files", "none", "--json").out)
    assert (shown["max_file_bytes"], shown["max_files"], shown["max_endpoints"]) == (5000, None, None)
    assert operate("tenants", "limit", "acme", "--max-files", "0").status == 2
    assert operate("keys", "create", "--tenant", "acme", "--max-files", "7").status == 2
