"""RELEASE of a task whose message becomes a dead letter: whatever its record lacks, all hear of its end, once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from producers.connection.script import run
from producers.connection.trouble import Trouble, trouble
from producers.contract import keys
from producers.contract.record import error_json
from producers.store import chunks, protocol
from tests.producers.fake_worker import FakeWorker

ACCOUNT = keys.account("k" * 16)
CHARGED = json.dumps({"accounts": [ACCOUNT], "tokens": 9, "estimate": 9})
LINE: dict[str, str | int] = {
    "task": "{}",
    "model": "tiny",
    "version": "v",
    "n": 2,
    "tokens": 9,
    "origin": "batch",
    "batch": "b",
}
BROKEN = error_json("dead_lettered", "The message cannot be used: its record is broken")


def bury(valkey: Redis, task_id: str, claim: str) -> int:
    return int(run(valkey, protocol.release(task_id, claim, error=BROKEN, letter="broken")))


def line(valkey: Redis) -> str:
    """A batch's line that waits, for which an account was charged."""
    valkey.hset(keys.batch("b"), mapping={"status": "in_progress", "completed": 0, "failed": 0})
    valkey.hset(ACCOUNT, mapping={"open": 2, "reserved": 20})
    run(valkey, protocol.admit("t", "nonce", 1 << 50, LINE | {"reserved": CHARGED}))
    run(valkey, protocol.queued("t"))
    return keys.task("t")


def check_ended(valkey: Redis, **account: bytes) -> None:
    """It failed, and was settled, with all that an end has."""
    record: Any = valkey.hgetall(keys.task("t"))
    assert (record[b"status"], record[b"end"], record[b"letter"]) == (b"failed", b"failed", b"broken")
    assert record.keys().isdisjoint({b"claim", b"owner", b"waits"})
    assert valkey.ttl(keys.task("t")) > 0
    entries: Any = valkey.xrange(keys.stream("t"))
    assert json.loads(entries[-1][1][b"e"])["error"]["code"] == "dead_lettered"
    assert valkey.hget(keys.batch("b"), "failed") == b"1"
    assert valkey.xlen(keys.LEDGER) == 1
    assert {name: valkey.hget(ACCOUNT, name) for name in account} == account
    assert not valkey.hgetall(keys.WAITING)
    assert not valkey.zcard(keys.UNSETTLED)


@pytest.mark.parametrize(
    "fields",
    [
        *({name: "no number"} for name in ("n", "next:1", "discarded", "created", "started")),
        {"prompt_tokens": "no number", "started": "1"},
        {"waits": "nothing"},
    ],
    ids=str,
)
def test_a_broken_field_keeps_nobody_from_hearing_of_the_end(
    valkey: Redis, worker: FakeWorker, fields: dict[Any, Any]
) -> None:
    record = line(valkey)
    assert worker.claim("t").answer == "go"
    valkey.hset(record, mapping=fields)
    assert bury(valkey, "t", worker.claims["t"]) == 1
    check_ended(valkey, open=b"1", reserved=b"11")
    assert bury(valkey, "t", worker.claims["t"]) == 0
    check_ended(valkey, open=b"1", reserved=b"11")


@pytest.mark.parametrize("reserved", ["[", '"9"', "{}", '{"accounts": 1, "tokens": 1, "estimate": 1}'])
def test_nor_does_a_charge_that_nobody_can_read(valkey: Redis, worker: FakeWorker, reserved: str) -> None:
    record = line(valkey)
    assert worker.claim("t").answer == "go"
    valkey.hset(record, "reserved", reserved)
    assert bury(valkey, "t", worker.claims["t"]) == 1
    check_ended(valkey)


def test_nor_does_a_stream_that_is_none(valkey: Redis, worker: FakeWorker) -> None:
    line(valkey)
    assert worker.claim("t").answer == "go"
    valkey.set(keys.stream("t"), "no stream")
    assert bury(valkey, "t", worker.claims["t"]) == 1
    check_ended(valkey, open=b"1", reserved=b"11")


def test_choices_that_have_tokens_are_kept(valkey: Redis, worker: FakeWorker) -> None:
    record = line(valkey)
    assert worker.claim("t").answer == "go"
    assert worker.append("t", 0, ["a"], choice=1) == ("ok", 1)
    valkey.hset(record, "n", "no number")
    assert bury(valkey, "t", worker.claims["t"]) == 1
    assert valkey.hget(record, "n") == b"2"
    check_ended(valkey, open=b"1")


def test_what_an_operator_forbids_for_now_ends_later(valkey: Redis, valkey_url: str, worker: FakeWorker) -> None:
    line(valkey)
    assert worker.claim("t").answer == "go"
    valkey.acl_setuser("hasty", enabled=True, nopass=True, keys="*", channels="*", commands=["+@all", "-xlen"])
    try:
        with Redis.from_url(valkey_url, username="hasty", password="any") as hasty:
            with pytest.raises(ResponseError) as denied:
                bury(hasty, "t", worker.claims["t"])
            assert trouble(denied.value) is Trouble.DENIED
    finally:
        valkey.acl_deluser("hasty")
    assert bury(valkey, "t", worker.claims["t"]) == 1
    check_ended(valkey, open=b"1", reserved=b"11")


def test_a_chunk_that_ends_so_ends_its_parent(valkey: Redis, worker: FakeWorker) -> None:
    shared: dict[str, Any] = {"model": "tiny", "version": "v", "queue": "q", "tier": "default", "n": 1}
    parent = shared | {"task": "{}", "chunks": 2, "texts": 8, "origin": "task", "result_bytes": 1}
    run(valkey, protocol.admit("p", "nonce", 1 << 50, parent))
    own: list[dict[str, str | int]] = [
        {"task": "{}", "tokens": 1, "offset": 4 * number, "texts": 4} for number in range(2)
    ]
    run(valkey, chunks.write("p", 0, shared | {"origin": "chunk"}, own))
    chunk = chunks.chunk_id("p", 1)
    run(valkey, protocol.queued(chunk))
    assert worker.claim(chunk).answer == "go"
    valkey.hset(keys.task(chunk), mapping={"n": "no number", "texts": "no number"})
    assert bury(valkey, chunk, worker.claims[chunk]) == 1
    assert valkey.hget(keys.task("p"), "status") == b"failed"
    assert "its record is broken" in json.loads(valkey.hget(keys.task("p"), "error") or "{}")["message"]


def test_a_record_that_cannot_be_claimed_ends_too(valkey: Redis, worker: FakeWorker) -> None:
    record = line(valkey)
    valkey.hset(record, "deaths", "no number")
    with pytest.raises(ResponseError):
        worker.claim("t")
    assert run(valkey, protocol.release("t", "c")) == 0
    assert bury(valkey, "t", "c") == 1
    check_ended(valkey, open=b"1", reserved=b"11")


def test_what_another_worker_holds_or_has_ended_is_left_alone(valkey: Redis, worker: FakeWorker) -> None:
    line(valkey)
    assert worker.claim("t").answer == "go"
    assert bury(valkey, "t", "another") == 0
    assert worker.finish("t", [0, 0])[0] == "won"
    worker.settle("t")
    assert bury(valkey, "t", "another") == 0
    assert valkey.hmget(keys.task("t"), "status", "letter") == [b"completed", None]
