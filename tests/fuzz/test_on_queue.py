"""Fuzzed messages among good ones, and a judge that would notice."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.exhaustive import few
from tests.fuzz import on_queue
from tests.fuzz.ends import Ends, sent_id
from tests.fuzz.messages import Fuzzed
from tests.histories import SEED


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("messages", few([200, 300], 200))
def test_every_fuzzed_message_ends_and_good_tasks_come_out_right(messages: int) -> None:
    findings = on_queue.run(messages, "stub", 7 + SEED)
    assert findings.faults == []
    assert findings.sent == messages
    assert findings.valid == messages // 10
    # What else there is depends on what Hypothesis draws, and that on its version and on our constants.
    assert {"dead letter", "completed", "failed"} <= findings.ends.keys()


@pytest.fixture
def ends(valkey: Redis) -> Ends:
    return Ends(valkey, ["penstock:queue:x"])


MESSAGE = Fuzzed("plain", b'{"headers": {"id": "one"}}\xff', 0)


def judged(ends: Ends, fuzzed: Fuzzed = MESSAGE) -> tuple[str, str]:
    ((end, why),) = ends.of([("one", fuzzed)])
    return end, why


def test_a_message_that_is_nowhere_has_vanished(ends: Ends) -> None:
    assert judged(ends)[0] == "vanished"
    assert judged(ends)[1]


def test_a_dead_letter_counts_only_with_the_very_bytes(ends: Ends, valkey: Redis) -> None:
    def letter(raw: bytes) -> bytes:
        return json.dumps({"message": raw.decode("latin-1")}, ensure_ascii=False).encode("latin-1")

    valkey.rpush(broker_keys.DEAD, letter(MESSAGE.raw))
    assert judged(ends) == ("dead letter", "")
    valkey.rpush(broker_keys.DEAD, letter(MESSAGE.raw[:-1] + b"?"))
    assert judged(ends)[0] == "vanished"


@pytest.mark.parametrize(
    ("fields", "fine"),
    [
        ({"status": "failed", "settled": 1}, True),
        ({"status": "failed", "settled": 1, "claim": "x"}, False),
        ({"status": "failed"}, False),
        ({"status": "in_progress", "claim": "x"}, False),
    ],
)
def test_a_record_has_to_be_final_settled_and_nobodys(
    ends: Ends, valkey: Redis, fields: dict[str, str], fine: bool
) -> None:
    valkey.hset(keys.task("one"), mapping=fields)
    assert (judged(ends)[1] == "") == fine


def test_only_what_waits_for_years_may_wait(ends: Ends, valkey: Redis) -> None:
    far = Fuzzed("plain", b'{"headers": {"eta": "2199-01-01T00:00:00+00:00"}}', 0)
    for fuzzed, fine in ((far, True), (MESSAGE, False)):
        valkey.zadd(broker_keys.delayed("x"), {b"packed" + fuzzed.raw: 9e15})
        assert ends.quiet()
        assert (judged(ends, fuzzed)[1] == "") == fine
    valkey.zadd(broker_keys.delayed("x"), {b"soon": 1.0})
    assert not ends.quiet()


@pytest.mark.parametrize("key", ["penstock:queue:x", "penstock:inflight:w.1"])
def test_it_is_not_quiet_while_a_message_is_anywhere(ends: Ends, valkey: Redis, key: str) -> None:
    assert ends.quiet()
    valkey.lpush(key, "m")
    assert not ends.quiet()


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"{oops", None),
        (b"[]", None),
        (b'{"headers": {"id": 5}}', None),
        (MESSAGE.raw, None),
        (MESSAGE.raw[:-1], "one"),
    ],
)
def test_an_id_is_read_where_it_can_be(raw: bytes, found: str | None) -> None:
    assert sent_id(raw) == found


@pytest.fixture(autouse=True)
def _nothing_left(valkey: Redis) -> Iterator[None]:
    yield
    valkey.flushall()
