"""`penstock doctor`: each fault is a finding with what to do, and nothing is written."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from producers.admin import checkup
from producers.admin.fleet import Fleet, read_fleet
from producers.broker.redis import keys as broker_keys
from producers.broker.sqs import keys as sqs_keys
from producers.contract import keys
from producers.store.endpoints import Endpoint, Secrets
from producers.store.servers import check_server
from tests.aws import Aws
from tests.producers.gateway.conftest import CARD, POOL, QUEUE, TINY, publish
from tests.workers.cli.conftest import Ran, Run
from workers.library.local_models import LocalModels

SYSTEM = ("store persistence", "workers", "unserved", "autoscaler", "unfinished", "dead letters", "webhook endpoints")
Findings = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One without pulled models, a data directory or systemd."""
    monkeypatch.setattr(checkup, "SETTLE_S", 0.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("PENSTOCK_SECRETS_KEY_FILE", "PENSTOCK_BACKUP_KEY_FILE", "BROKER_URL", "STORE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def healthy(valkey: Redis) -> Redis:
    """A system with a published model and its worker, and a sweeper."""
    publish(valkey)
    valkey.set(keys.SWEEPER, "s", ex=60)
    valkey.hset(broker_keys.INCARNATIONS, "w.1", POOL.queue)
    valkey.set(keys.lease("w.1"), json.dumps({"worker": "w", "version": POOL.version}), px=60_000)
    return valkey


def findings(ran: Ran) -> Findings:
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert all(row.keys() == {"check", "status", "detail", "advice"} and row["detail"] for row in rows)
    assert all(row["advice"] for row in rows if row["status"] in ("warn", "fail")), "each says what to do"
    return {row["check"]: row for row in rows}


def check(operate: Run, *options: str, status: int = 0) -> Findings:
    ran = operate("doctor", "--json", *options)
    assert (ran.status, ran.err) == (status, ""), ran
    return findings(ran)


def everything(valkey: Redis) -> dict[bytes, bytes | None]:
    return {name: valkey.dump(name) for name in valkey.keys("*")}


def test_a_system_that_is_well_has_no_failure(healthy: Redis, operate: Run) -> None:
    found = check(operate)
    assert not [row for row in found.values() if row["status"] == "fail"]
    assert {name: found[name]["status"] for name in SYSTEM if name != "store persistence"} == dict.fromkeys(
        SYSTEM[1:], "ok"
    )
    assert [found[name]["status"] for name in ("store version", "store clock", "sweeper", "model files")] == ["ok"] * 4
    for name in ("gpus", "bucket", "drain time", "private files"):
        assert found[name]["status"] in ("skip", "ok")
    text = operate("doctor")
    assert "ok    sweeper              one leads" in text.out
    assert " 0 failed, " in text.out.splitlines()[-1]


def bury(valkey: Redis) -> None:
    valkey.rpush(broker_keys.DEAD, "letter")


def disable(valkey: Redis) -> None:
    endpoint = Endpoint("whe_1", "https://x.example", "x", ("response.completed",), Secrets.new(), 1, 1)
    off = replace(endpoint, enabled=False, disabled_because="410 Gone")
    valkey.hset(keys.WEBHOOK_ENDPOINTS, "whe_1", off.to_json())


def await_nobody(valkey: Redis) -> None:
    valkey.delete(keys.lease("w.1"))
    valkey.lpush(broker_keys.tier_list(QUEUE, "default"), "{}")


def await_the_autoscaler(valkey: Redis) -> None:
    await_nobody(valkey)
    valkey.hset(keys.SCALE_POOLS, "tiny", json.dumps({"at": time.time(), "wanted": 1}))


def fail_to_start(valkey: Redis) -> None:
    valkey.hset(keys.SCALE_POOLS, "tiny", json.dumps({"at": time.time(), "wanted": 1, "trouble": "no machine"}))


def have_none_that_decides(valkey: Redis) -> None:
    valkey.hset(keys.SCALE_POOLS, "tiny", json.dumps({"at": time.time() - 3600, "wanted": 1}))


def leave_a_webhook(valkey: Redis) -> None:
    valkey.zadd(keys.WEBHOOKS_DUE, {"evt.own": (time.time() - 600) * 1000})


def give_a_webhook_up(valkey: Redis) -> None:
    valkey.zadd(keys.WEBHOOKS_DEAD, {"evt.own": 1})


def leave_a_task(valkey: Redis) -> None:
    valkey.zadd(keys.SUBMITTING, {"t": (time.time() - 600) * 1000})


def hang(valkey: Redis) -> None:
    lease = {"worker": "\x1b[2Jw", "version": POOL.version, "unready": ["a step hangs"], "began": time.time() + 600}
    valkey.set(keys.lease("w.1"), json.dumps(lease), px=60_000)


def share_its_device(valkey: Redis) -> None:
    lease = {"worker": "w", "version": POOL.version, "began": time.time(), "share": 0.3}
    valkey.set(keys.lease("w.1"), json.dumps(lease), px=60_000)


FAULTS: dict[Callable[[Redis], Any], tuple[str, str, str]] = {
    bury: ("dead letters", "warn", "1 are kept"),
    disable: ("webhook endpoints", "warn", "410 Gone"),
    await_nobody: ("unserved", "fail", f'1 tasks wait for "tiny@{POOL.version}"'),
    await_the_autoscaler: ("unserved", "warn", "no worker serves it"),
    fail_to_start: ("autoscaler", "fail", "no machine"),
    have_none_that_decides: ("autoscaler", "warn", "none decides now"),
    leave_a_webhook: ("webhook deliveries", "fail", "the oldest has been due for 6"),
    give_a_webhook_up: ("webhook deliveries", "warn", "1 were given up"),
    leave_a_task: ("unfinished", "warn", "1 tasks not confirmed by the broker"),
    hang: ("workers", "warn", "a step hangs"),
    share_its_device: ("workers", "ok", "1 with a lease, of which 1 share a device"),
    (lambda valkey: hang(valkey)): ("worker clocks", "warn", "ahead of the store's"),
    (lambda valkey: valkey.delete(keys.lease("w.1"))): ("stale leases", "warn", "w.1"),
    (lambda valkey: valkey.delete(keys.SWEEPER)): ("sweeper", "fail", "none leads"),
    (lambda valkey: valkey.delete(keys.blob(CARD.files["tokenizer.json"]))): ("model files", "fail", "is missing"),
    (lambda valkey: valkey.set(keys.blob(CARD.files["tokenizer.json"]), "x")): ("model files", "fail", "is damaged"),
}


def test_each_fault_is_a_finding_and_nothing_is_written(healthy: Redis, operate: Run) -> None:
    whole = {name: healthy.dump(name) for name in healthy.keys("*")}
    for fault, (name, status, text) in FAULTS.items():
        fault(healthy)
        before = everything(healthy)
        row = check(operate, status=int(status == "fail"))[name]
        assert (row["status"], text in row["detail"]) == (status, True), (name, row)
        assert everything(healthy) == before, name
        healthy.flushdb()
        for key, dump in whole.items():
            healthy.restore(key, 0 if b":lease:" not in key and key != keys.SWEEPER.encode() else 600_000, dump)


def test_a_sweeper_that_takes_over_meanwhile_is_no_finding(
    healthy: Redis, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy.delete(keys.SWEEPER)
    looks = 0

    async def look(*args: Any) -> Fleet:
        nonlocal looks
        looks += 1
        if looks == 2:
            healthy.set(keys.SWEEPER, "s", ex=60)
        return await read_fleet(*args)

    monkeypatch.setattr(checkup, "SETTLE_S", 60.0)
    monkeypatch.setattr(checkup, "read_fleet", look)
    assert check(operate)["sweeper"]["status"] == "ok"
    assert looks == 2


@pytest.mark.parametrize(("policy", "status"), [("allkeys-lru", "fail"), ("volatile-ttl", "warn")])
def test_a_store_that_evicts_is_told_of(healthy: Redis, operate: Run, policy: str, status: str) -> None:
    healthy.config_set("maxmemory-policy", policy)
    healthy.config_set("maxmemory", 1 << 30)
    try:
        row = check(operate, status=int(status == "fail"))["store memory"]
        strict = operate("doctor", "--strict").status
    finally:
        healthy.config_set("maxmemory", 0)
        healthy.config_set("maxmemory-policy", "noeviction")
    assert (row["status"], row["advice"]) == (status, "set maxmemory-policy noeviction")
    assert strict == 1


def test_a_store_that_cuts_listeners_early_is_told_of(
    healthy: Redis, operate: Run, valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = healthy.config_get("client-output-buffer-limit")["client-output-buffer-limit"]
    try:
        for limit, warns in (("8mb 8mb 60", 1), ("32mb 1mb 60", 1), ("0 0 0", 0), ("64mb 8mb 1", 0)):
            healthy.config_set("client-output-buffer-limit", f"pubsub {limit}")
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                check_server(valkey_url, "store")
                check_server(valkey_url, "broker")  # whose listeners hear little
            assert caplog.text.count("client-output-buffer-limit") == warns, limit
        assert check(operate)["store buffers"]["status"] == "ok"
        healthy.config_set("client-output-buffer-limit", "pubsub 1mb 1mb 60")
        assert check(operate)["store buffers"]["status"] == "warn"
    finally:
        healthy.config_set("client-output-buffer-limit", before)


def test_clocks_apart_are_told_of(healthy: Redis, operate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "time", SimpleNamespace(time=lambda: time.time() - 120, monotonic=time.monotonic))
    row = check(operate, status=1)["store clock"]
    assert (row["status"], row["detail"].startswith(("119.", "120."))) == ("fail", True)


def test_a_user_who_may_only_read_is_enough_and_one_without_rights_is_told(
    healthy: Redis, run: Run, valkey_url: str
) -> None:
    allowed = "+@read", "+@connection", "+info", "+time", "+evalsha_ro", "+script|load"
    healthy.execute_command("ACL", "SETUSER", "reader", "on", ">p", "~*", *allowed)
    healthy.execute_command("ACL", "SETUSER", "nobody", "on", ">p", "~*", "+@connection")
    try:
        found = {
            user: findings(run("doctor", "--json", "--broker", valkey_url.replace("//", f"//{user}:p@")))
            for user in ("reader", "nobody")
        }
    finally:
        healthy.execute_command("ACL", "DELUSER", "reader", "nobody")
    assert not [row for row in found["reader"].values() if row["status"] == "fail"]
    assert found["reader"]["workers"]["status"] == "ok"
    assert found["reader"]["store fsync"]["status"] == "skip", "its settings are not shown to it"
    assert (found["nobody"]["store"]["status"], found["nobody"]["workers"]["status"]) == ("skip", "skip")


def test_a_server_that_is_away_is_a_failure_and_none_is_not(run: Run) -> None:
    ran = run("doctor", "--json", "--broker", "redis://me:secret@127.0.0.1:1/0")
    found = findings(ran)
    assert (ran.status, found["store"]["status"], found["system"]["status"]) == (1, "fail", "skip")
    assert "secret" not in ran.out + ran.err
    ran = run("doctor", "--json")
    assert (ran.status, findings(ran)["system"]["status"]) == (0, "skip")
    assert run("doctor", "--broker", "amqp://x").status == 2


def test_files_that_others_may_read_are_told_of(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, key = tmp_path / ".penstock", tmp_path / "key"
    folder.mkdir(0o700)
    (folder / "password").write_text("x" * 32)
    (folder / "password").chmod(0o600)
    found = findings(run("doctor", "--json"))
    assert found["private files"]["status"] == "ok"
    (folder / "password").chmod(0o644)
    monkeypatch.setenv("PENSTOCK_SECRETS_KEY_FILE", str(key))
    found = findings(run("doctor", "--json"))
    assert (found["private files"]["status"], found["key file"]["status"]) == ("fail", "fail")
    assert "password (0644)" in found["private files"]["detail"]
    assert "missing" in found["key file"]["detail"]


@pytest.mark.parametrize(
    ("timeout", "option", "status"),
    [
        ("2min", "", "ok"),
        ("infinity", "", "ok"),
        ("1min 30s", "=45", "ok"),
        ("1min", " 45", "warn"),
        ("20s", "", "fail"),
    ],
)
def test_a_unit_that_is_killed_before_it_has_drained_is_told_of(
    run: Run, tmp_path: Path, timeout: str, option: str, status: str
) -> None:
    (tmp_path / "bin").mkdir()
    systemctl = tmp_path / "bin" / "systemctl"
    drain = f" --drain-timeout{option}" if option else ""
    unit = f"ExecStart={{ path=/usr/bin/penstock ; argv[]=penstock worker{drain} ; }}\nId=penstock-worker@0.service\n"
    systemctl.write_text(f"#!/bin/sh\n/bin/cat <<'END'\nTimeoutStopUSec={timeout}\n{unit}END\n")
    systemctl.chmod(0o755)
    row = findings(run("doctor", "--json"))["drain time"]
    assert (row["status"], "penstock-worker@0.service" in row["detail"]) == (status, True)


def test_a_pulled_model_that_is_damaged_is_told_of(run: Run, tmp_path: Path) -> None:
    pulled = LocalModels.default().copy("tiny", TINY)
    assert findings(run("doctor", "--json"))["local models"]["status"] == "ok"
    weights = pulled.folder / "model.safetensors"
    weights.chmod(0o600)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    row = findings(run("doctor", "--json"))["local models"]
    assert (row["status"], "model.safetensors" in row["detail"]) == ("fail", True)
    assert findings(run("doctor", "--json", "--no-models"))["local models"]["status"] == "skip"


def test_queues_and_a_bucket_of_aws_are_looked_at(
    healthy: Redis, run: Run, aws: Aws, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_URL", aws.broker())
    monkeypatch.setenv("STORE_URL", valkey_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    command = ("doctor", "--json", "--files-dir", "s3://files?region=us-east-1")
    found = findings(run(*command))
    assert [found[name]["status"] for name in ("broker", "sqs", "bucket")] == ["fail"] * 3
    assert not healthy.exists(sqs_keys.QUEUES)
    assert "QueueUrls" not in aws.client("sqs").list_queues(), "nothing is made"
    assert run("aws", "setup", "--model", f"tiny@{CARD.version}").status == 0
    aws.client("s3").create_bucket(Bucket="files")
    found = findings(run(*command))
    assert [found[name]["status"] for name in ("broker", "sqs", "bucket")] == ["ok"] * 3
