from __future__ import annotations

import json
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient, UnknownModel
from producers.admin import dead_letters
from producers.admin.dead_letters import Letter, NotReplayed
from producers.broker.redis import keys as broker_keys
from producers.client import directory
from producers.connection.script import run, text
from producers.contract import keys
from producers.contract.message import Message
from producers.store import protocol
from tests.producers.conftest import CARD, POOL, QUEUE
from tests.producers.fake_worker import FakeWorker
from tests.waiting import PATIENCE_S

LIST = broker_keys.tier_list(QUEUE, "default")


def bury(valkey: Redis, message: str | bytes, reason: str = "not JSON", at: int = 1_790_000_000_000) -> bytes:
    """A letter, put together byte by byte as Lua does."""
    raw = message if isinstance(message, bytes) else json.dumps(message)[1:-1].encode()
    letter = b'{"reason":"%s","list":"%s","at":%d,"message":"%s"}' % (reason.encode(), LIST.encode(), at, raw)
    valkey.rpush(broker_keys.DEAD, letter)
    return letter


async def given_up(client: AsyncClient, valkey: Redis, deaths: int = 3, model: str = "tiny") -> str:
    """A client's task that lost all its workers, with its letter."""
    task_id = (await client.submit(model=model, prompt=[1, 2, 3], max_tokens=7, timeout=600)).id
    message = valkey.rpop(broker_keys.tier_list(text(valkey.hget(keys.task(task_id), "queue")), "default"))
    for k in range(deaths + 1):
        worker = FakeWorker(valkey, f"fake{k}")
        worker.claim(task_id)
        worker.die()
    assert valkey.hget(keys.task(task_id), "status") == b"failed"
    bury(valkey, message.decode(), "Given up: 3 workers died while they held this task.")
    return task_id


async def only(client: AsyncClient) -> Letter:
    (letter,) = [letter async for letter in dead_letters.letters(client)]
    return letter


async def test_all_are_found_oldest_first_over_several_pages(aclient: AsyncClient, valkey: Redis) -> None:
    count = 2 * dead_letters.PAGE + 3
    for k in range(count):
        bury(valkey, Message(f"t{k}", QUEUE, "default", 1, 9).envelope())
    found = [letter async for letter in dead_letters.letters(aclient)]
    assert [letter.task_id for letter in found] == [f"t{k}" for k in range(count)]
    assert len({letter.key for letter in found}) == count


@pytest.mark.parametrize("raw", [b"", b"\xff", b"null", b"[]", b'{"reason":1}', b'{"at":"x","reason":"","list":""}'])
async def test_an_entry_that_is_none_is_shown_kept_and_purged(aclient: AsyncClient, valkey: Redis, raw: bytes) -> None:
    valkey.rpush(broker_keys.DEAD, raw)
    letter = await only(aclient)
    assert letter.task_id is None
    with pytest.raises(NotReplayed, match="purge it"):
        await dead_letters.replay(aclient, letter)
    assert await dead_letters.purge(aclient, letter)
    assert not valkey.exists(broker_keys.DEAD)
    assert not await dead_letters.purge(aclient, letter)


@pytest.mark.parametrize("message", [b"{", b"\xff\xfe", b"caf\xc3\xa9"])
async def test_a_message_that_nobody_could_decode_goes_back_as_it_was(
    aclient: AsyncClient, valkey: Redis, message: bytes
) -> None:
    valkey.lpush(LIST, "first")
    bury(valkey, message)
    done = await dead_letters.replay(aclient, await only(aclient))
    assert (done.task_id, done.new_task) == (None, False)
    assert valkey.lrange(LIST, 0, -1) == [message, b"first"], "at the end: messages are taken from the right"
    assert not valkey.exists(broker_keys.DEAD)


async def test_a_task_that_was_given_up_is_asked_for_anew(aclient: AsyncClient, valkey: Redis) -> None:
    old = await given_up(aclient, valkey)
    before = valkey.hgetall(keys.task(old))
    done = await dead_letters.replay(aclient, await only(aclient))
    assert done.new_task
    assert done.task_id not in (None, old)
    record = valkey.hgetall(keys.task(str(done.task_id)))
    assert record[b"status"] == b"queued"
    assert json.loads(record[b"task"]) == json.loads(before[b"task"]), "the same question, with the same seed"
    assert int(record[b"deadline"]) > int(before[b"deadline"]) - 1000
    assert valkey.hgetall(keys.task(old)) == before, "what has ended stays ended"
    worker = FakeWorker(valkey)
    assert worker.take(QUEUE) == done.task_id
    worker.serve(str(done.task_id))
    assert (await aclient.get(str(done.task_id)).result(PATIENCE_S)).text == "Hello, world"
    assert not valkey.exists(broker_keys.DEAD)


async def test_what_named_its_version_is_replayed_there(aclient: AsyncClient, valkey: Redis) -> None:
    valkey.hset(keys.VERSIONS, "tiny@other", json.dumps({**CARD, "version": "other"}))
    valkey.hset(keys.POOLS, "penstock:queue:tiny@other.f", '{"model": "tiny", "version": "other"}')
    await given_up(aclient, valkey, model="tiny@other")
    done = await dead_letters.replay(aclient, await only(aclient))
    assert valkey.hget(keys.task(str(done.task_id)), "version") == b"other"


async def test_token_ids_are_not_replayed_for_another_tokenizer(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "FRESH_S", 0.0)
    await given_up(aclient, valkey)
    letter = await only(aclient)
    other = CARD | {"version": "other", "files": {"tokenizer.json": "0" * 64}}
    valkey.hset(keys.MODELS, "tiny", json.dumps(other))
    with pytest.raises(NotReplayed, match=rf"another tokenizer.*publish version {CARD['version']} again"):
        await dead_letters.replay(aclient, letter)
    assert (await only(aclient)).raw == letter.raw
    assert len(valkey.keys(keys.task("*"))) == 1
    valkey.hset(keys.MODELS, "tiny", json.dumps(CARD))
    first = await dead_letters.replay(aclient, letter)
    valkey.rpush(broker_keys.DEAD, letter.raw)
    valkey.hset(keys.MODELS, "tiny", json.dumps(other))
    assert await dead_letters.replay(aclient, letter) == first, "it was broken off before the letter was removed"


async def test_a_replay_that_was_broken_off_is_not_done_twice(aclient: AsyncClient, valkey: Redis) -> None:
    """It died after the submit: the letter is still there."""
    await given_up(aclient, valkey)
    letter = await only(aclient)
    first = await dead_letters.replay(aclient, letter)
    valkey.rpush(broker_keys.DEAD, letter.raw)
    assert await dead_letters.replay(aclient, letter) == first
    assert valkey.llen(LIST) == 1
    assert not valkey.exists(broker_keys.DEAD)


async def test_two_letters_of_one_task_are_replayed_as_one(aclient: AsyncClient, valkey: Redis) -> None:
    """Both copies of its message were kept."""
    await given_up(aclient, valkey)
    letter = await only(aclient)
    first = await dead_letters.replay(aclient, letter)
    valkey.rpush(broker_keys.DEAD, json.dumps(json.loads(letter.raw) | {"at": 1}))
    assert await dead_letters.replay(aclient, await only(aclient)) == first
    assert valkey.llen(LIST) == 1


async def test_the_record_says_whom_the_task_lost(aclient: AsyncClient, valkey: Redis) -> None:
    await given_up(aclient, valkey)
    record = await dead_letters.record_of(aclient, await only(aclient))
    assert record is not None
    lost = record.json("lost")
    assert [one["owner"] for one in lost] == ["fake0", "fake1", "fake2"]
    assert all(one["entries"] == 0 and one["at"] > 1_600_000_000_000 for one in lost)


async def test_of_a_task_with_very_many_deaths_the_first_are_kept(valkey: Redis, model: str) -> None:
    now = int(valkey.time()[0]) * 1000
    fields = {"task": "{}", "model": "tiny", "queue": QUEUE, "tier": "flex", "n": 1, "tokens": 9}
    run(valkey, protocol.admit("t", "t", now, fields))
    for k in range(40):
        worker = FakeWorker(valkey, f"fake{k}")
        run(valkey, protocol.claim("t", f"c{k}", f"fake{k}", POOL, max_deaths=100))
        worker.die()
    assert valkey.hget(keys.task("t"), "deaths") == b"39"
    lost = json.loads(valkey.hget(keys.task("t"), "lost"))
    assert [one["owner"] for one in lost] == [f"fake{k}" for k in range(32)]


async def test_a_plain_sender_s_task_is_sent_again_under_another_id(aclient: AsyncClient, valkey: Redis) -> None:
    message = json.loads(Message("p", QUEUE, "default", 1, 9).envelope())
    del message["headers"]["penstock"]
    valkey.hset(keys.task("p"), mapping={"status": "queued", "plain": 1, "n": 1, "claim": "c", "owner": "gone"})
    valkey.hset(keys.task("p"), mapping={"stuck": 2, "deaths": 2})
    FakeWorker(valkey).claim("p")
    assert b"dead_lettered" in valkey.hget(keys.task("p"), "error")
    bury(valkey, json.dumps(message))
    done = await dead_letters.replay(aclient, await only(aclient))
    sent = json.loads(valkey.rpop(LIST))
    assert done.new_task
    assert sent["headers"]["id"] == sent["headers"]["root_id"] == sent["properties"]["correlation_id"] == done.task_id
    assert sent["body"] == message["body"]
    assert sent["properties"]["delivery_tag"] != message["properties"]["delivery_tag"]


async def test_a_message_whose_task_has_not_ended_goes_back_with_a_clean_slate(
    aclient: AsyncClient, valkey: Redis
) -> None:
    task_id = (await aclient.submit(model="tiny", prompt=[1])).id
    message = valkey.rpop(LIST)
    valkey.hset(broker_keys.REAPED, task_id, 3)
    bury(valkey, message.decode(), "no body")
    done = await dead_letters.replay(aclient, await only(aclient))
    assert (done.task_id, done.new_task) == (task_id, False)
    assert valkey.lrange(LIST, 0, -1) == [message]
    assert not valkey.exists(broker_keys.REAPED), "or it would be condemned at once"


async def test_what_cannot_be_asked_again_stays(aclient: AsyncClient, valkey: Redis) -> None:
    task_id = await given_up(aclient, valkey)
    letter = await only(aclient)
    valkey.hdel(keys.MODELS, "tiny")
    aclient.directory.forget("tiny")
    with pytest.raises(UnknownModel):
        await dead_letters.replay(aclient, letter)
    valkey.hset(keys.task(task_id), mapping={"status": "completed", "error": "null"})
    with pytest.raises(NotReplayed, match="ended completed, only what Celery was to do afterwards failed"):
        await dead_letters.replay(aclient, letter)
    valkey.hset(keys.task(task_id), "status", "cancelled")
    with pytest.raises(NotReplayed, match="was cancelled; submit it anew"):
        await dead_letters.replay(aclient, letter)
    valkey.delete(keys.task(task_id))
    with pytest.raises(NotReplayed, match="past its time to live"):
        await dead_letters.replay(aclient, letter)
    assert (await only(aclient)).raw == letter.raw


async def test_two_replays_at_once_send_one(aclient: AsyncClient, valkey: Redis, valkey_url: str) -> None:
    bury(valkey, "{")
    letter = await only(aclient)
    await dead_letters.replay(aclient, letter)
    with pytest.raises(NotReplayed, match="somebody else"):
        await dead_letters.replay(aclient, letter)
    assert valkey.llen(LIST) == 1


def keyed(**fields: Any) -> str:
    return Letter.parse(json.dumps({"reason": "r", "list": "l", "at": 1, "message": "m"} | fields)).key


def test_a_key_depends_on_all_of_the_letter() -> None:
    assert len({keyed(), keyed(at=2), keyed(message="n"), keyed(reason="s"), keyed(list="k")}) == 5


async def test_one_whose_list_is_none_stays(aclient: AsyncClient, valkey: Redis) -> None:
    raw = json.dumps({"reason": "not JSON", "list": keys.POOLS, "at": 1, "message": "{"})
    valkey.rpush(broker_keys.DEAD, raw)
    valkey.hset(keys.POOLS, "a", "b")
    with pytest.raises(NotReplayed, match=f"{keys.POOLS} is no list"):
        await dead_letters.replay(aclient, await only(aclient))
    assert valkey.lrange(broker_keys.DEAD, 0, -1) == [raw.encode()]
