"""What processes that follow many tasks are told, by real listeners (`_followers.lua`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.contract.stream import encode_rows
from producers.store import protocol
from producers.store.protocol import Append, admit, append, finish, follow, read_append
from tests.waiting import PATIENCE_S

CLAIM = "c"


@pytest.fixture(autouse=True)
def running(valkey: Redis) -> None:
    """Tasks that a worker has claimed."""
    now = int(valkey.time()[0]) * 1000
    for task_id in ("t1", "t2", "t3"):
        assert run(valkey, admit(task_id, "", now, {"model": "m", "queue": "q", "n": 1})) == b"new"
        valkey.hset(keys.task(task_id), mapping={"status": "in_progress", "claim": CLAIM})


@contextmanager
def listening(valkey: Redis, *channels: str) -> Iterator[Any]:
    with valkey.pubsub() as ears:
        ears.subscribe(*channels)
        for _ in channels:
            assert ears.get_message(timeout=PATIENCE_S)["type"] == "subscribe"
        yield ears


def heard(ears: Any) -> list[tuple[str, str]]:
    """What came since the last time: a PING's answer stands behind all of it."""
    ears.ping("all")
    said: list[tuple[str, str]] = []
    while (message := ears.get_message(timeout=PATIENCE_S))["type"] != "pong":
        said.append((message["channel"].decode().removeprefix("penstock:tokens:"), message["data"].decode()))
    return said


def step(valkey: Redis, index: int, *task_ids: str, text: str = "x") -> None:
    """One token of each of these tasks."""
    entry = json.dumps([0, index, 7, text])
    answers = run(valkey, append([Append(task_id, CLAIM, 0, index, [entry]) for task_id in task_ids]))
    assert read_append(answers) == [("ok", index + 1)] * len(task_ids)


def followers(valkey: Redis, task_id: str) -> bytes | None:
    return valkey.hget(keys.task(task_id), "followers")


def test_a_step_is_one_message_to_a_process_and_none_where_nobody_listens(valkey: Redis) -> None:
    channels = (keys.process_channel("p"), keys.channel("t2"), keys.channel("t3"))
    with listening(valkey, *channels) as ears:
        assert run(valkey, follow("p", ["t1", "t2"])) == [1, 1]
        step(valkey, 0, "t1", "t2", "t3")
        message = '[0,[0, 0, 7, "x"]]'
        assert sorted(heard(ears)) == [("@p", f"t1\n{message}\nt2\n{message}"), ("t2", message), ("t3", message)]
        assert run(valkey, follow("p", ["t1", "t2"], on=False)) == [0, 0]
        step(valkey, 1, "t1", "t2")
        assert [channel for channel, _ in heard(ears)] == ["t2"]
    assert followers(valkey, "t1") is None


def test_two_processes_hear_the_same_and_one_that_is_gone_is_forgotten(valkey: Redis) -> None:
    with listening(valkey, keys.process_channel("p")) as ears, listening(valkey, keys.process_channel("q")) as others:
        for process in ("p", "q", "dead"):
            assert run(valkey, follow(process, ["t1", "t2"])) == [1, 1]
        step(valkey, 0, "t1")
        assert followers(valkey, "t1") == b"p q"
        assert followers(valkey, "t2") == b"p q dead"
        assert [said for _, said in heard(ears)] == [said for _, said in heard(others)]
    run(valkey, finish("t2", CLAIM, "completed", reasons='["stop"]', nexts=[0]))
    step(valkey, 1, "t1")
    assert followers(valkey, "t1") is None
    assert followers(valkey, "t2") is None


def test_the_end_and_a_release_are_told_and_nobody_follows_what_has_ended(valkey: Redis) -> None:
    with listening(valkey, keys.process_channel("p")) as ears:
        assert run(valkey, follow("p", ["t1", "t2"])) == [1, 1]
        run(valkey, finish("t1", CLAIM, "completed", reasons='["stop"]', nexts=[0]))
        run(valkey, protocol.release("t2", CLAIM))
        (_, end), (_, released) = heard(ears)
        assert end.startswith('t1\n[0,{"end":"completed"')
        assert released == "t2\n"
        assert run(valkey, follow("q", ["t1", "none"])) == [0, 0]
        run(valkey, protocol.settle("t1"))
    assert followers(valkey, "t1") is None
    assert not valkey.exists(keys.task("none"))


def test_a_task_has_a_few_followers_at_most(valkey: Redis) -> None:
    answers = [run(valkey, follow(f"p{number}", ["t1"])) for number in range(9)]
    assert answers == [[1]] * 8 + [[0]]
    assert run(valkey, follow("p0", ["t1"])) == [1]


def test_a_large_step_is_told_in_pieces(valkey: Redis) -> None:
    with listening(valkey, keys.process_channel("p")) as ears:
        run(valkey, follow("p", ["t1", "t2", "t3"]))
        step(valkey, 0, "t1", "t2", "t3", text="x" * 30_000)
        messages = [said.split("\n")[::2] for _, said in heard(ears)]
        assert sorted(messages, key=len) == [["t3"], ["t1", "t2"]]


def test_a_large_end_is_told_on_the_task_s_own_channel_alone(valkey: Redis) -> None:
    with listening(valkey, keys.process_channel("p"), keys.channel("t1")) as ears:
        run(valkey, follow("p", ["t1"]))
        result = encode_rows([[0.5] * 20_000])
        run(valkey, finish("t1", CLAIM, "completed", reasons='["stop"]', nexts=[0], result=result))
        (own, end), (process, line) = heard(ears)
        assert (own, len(end) > 100_000) == ("t1", True)
        assert (process, line) == ("@p", "t1\n")


def test_a_user_who_may_not_ask_who_listens_publishes_all(valkey: Redis) -> None:
    valkey.acl_setuser(
        "narrow", enabled=True, nopass=True, commands=["+@all", "-pubsub"], keys=["*"], channels=["penstock:tokens:*"]
    )
    port = valkey.connection_pool.connection_kwargs["port"]
    channels = (keys.process_channel("p"), keys.channel("t1"))
    with Redis(port=port, username="narrow", password="") as narrow, listening(valkey, *channels) as ears:
        run(valkey, follow("p", ["t1"]))
        step(narrow, 0, "t1")
        assert sorted(channel for channel, _ in heard(ears)) == ["@p", "t1"]
    valkey.acl_deluser("narrow")


def test_a_user_who_may_not_publish_is_told_from_a_broken_stream(valkey: Redis) -> None:
    valkey.acl_setuser("mute", enabled=True, nopass=True, commands=["+@all", "-publish"], keys=["*"])
    with Redis(port=valkey.connection_pool.connection_kwargs["port"], username="mute", password="") as mute:
        calls = [Append(task_id, CLAIM, 0, 0, ["[0,0,7,1]"]) for task_id in ("t1", "t2")]
        valkey.xadd(keys.stream("t2"), {"e": "[0,7,5]"}, id="1000000-0")
        assert [answer for answer, _ in read_append(run(mute, append(calls)))] == ["denied", "error"]
    valkey.acl_deluser("mute")


@pytest.mark.parametrize("rights", [("&*", "-publish"), ("resetchannels", "&penstock:tokens:probe")])
def test_what_a_user_may_not_publish_is_written_whole(valkey: Redis, valkey_url: str, rights: tuple[str, ...]) -> None:
    """An error amid FINISH would leave a final record without its row of the ledger, for ever."""
    valkey.hset(keys.batch("b"), "status", "in_progress")
    valkey.hset(keys.task("t1"), mapping={"batch": "b", "origin": "task", "webhook": '{"url":"https://a.example/"}'})
    valkey.hset(keys.task("t2"), "owner", "i")
    valkey.set(keys.lease("i"), "{}")
    run(valkey, follow("p", ["t1", "t2", "t3"]))
    valkey.execute_command("ACL", "SETUSER", "mute", "reset", "on", ">pw", "~*", "+@all", *rights)
    try:
        with Redis.from_url(valkey_url.replace("://", "://mute:pw@")) as mute:
            assert run(mute, protocol.prompt("t1", CLAIM, ["{}", "{}"])) == b"ok"
            call = finish("t1", CLAIM, "completed", reasons='["stop"]', nexts=[0], scored=True)
            assert run(mute, call) == [b"won", b"completed"]
            assert run(mute, protocol.cancel("t2")) == [1, b"in_progress"]
            assert run(mute, protocol.delete("t3", "x")) == [b"in_progress"]
    finally:
        valkey.execute_command("ACL", "DELUSER", "mute")
    assert valkey.hget(keys.batch("b"), "completed") == b"1"
    assert [row[b"id"] for _, row in valkey.xrange(keys.LEDGER)] == [b"t1", b"t3"]
    assert valkey.zcard(keys.WEBHOOKS_DUE) == 1
    assert valkey.xlen(keys.stream("t1")) == 3, "two entries of the prompt, and the end"
    assert valkey.zrange(keys.DEADLINES, 0, -1) == [b"t2"]
    assert not valkey.exists(keys.task("t3"))
