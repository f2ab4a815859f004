"""`penstock dlq`, against a real server."""

from __future__ import annotations

import json

import pytest
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.workers.cli.conftest import Run

LIST = "penstock:queue:tiny#0"


def bury(valkey: Redis, message: str, reason: str, at: int) -> None:
    valkey.rpush(broker_keys.DEAD, json.dumps({"reason": reason, "list": LIST, "at": at, "message": message}))


def keys_of(operate: Run, *options: str) -> list[str]:
    return [json.loads(line)["key"] for line in operate("dlq", "ls", "--json", *options).out.splitlines()]


def test_an_empty_list_says_so(operate: Run) -> None:
    assert operate("dlq", "ls").out == "There are no dead letters.\n"
    assert operate("dlq", "ls", "--json").out == ""
    assert operate("dlq", "purge", "--all", "--yes").out == "0 dead letters deleted\n"


def test_letters_are_listed_chosen_and_shown(operate: Run, valkey: Redis) -> None:
    message = json.dumps({"headers": {"id": "t1"}, "properties": {}})
    bury(valkey, message, "no body", 1_790_000_000_000)
    bury(valkey, "{", "not JSON", int(valkey.time()[0]) * 1000)
    old, new = keys_of(operate)
    assert keys_of(operate, "--reason", "JSON") == [new]
    assert keys_of(operate, "--older-than", "60") == [old]
    assert f"{old}  2026-09-21T14:13:20+00:00  t1  {LIST}  no body" in operate("dlq", "ls").out
    valkey.hset(keys.task("t1"), mapping={"status": "failed", "model": "tiny", "task": '{"prompt": "hi"}', "claims": 2})
    valkey.hset(keys.task("t1"), "deaths", 2)
    valkey.hset(keys.task("t1"), "lost", '[{"owner": "w1", "at": 1790000000000, "entries": 4}]')
    for name in (old, "t1"):
        shown = operate("dlq", "show", name).out
        assert "failed, model tiny, taken up 2 times, 2 workers lost" in shown
        assert "w1 at 2026-09-21T14:13:20+00:00, 4 entries in the stream" in shown
        assert message in shown
    told = json.loads(operate("dlq", "show", old, "--json").out)
    assert told["lost"] == [{"owner": "w1", "at": 1790000000000, "entries": 4}]
    assert told["task"]["status"] == "failed"
    assert "none, or past its time to live" in operate("dlq", "show", new).out


def test_replay_says_what_became_of_each(operate: Run, valkey: Redis) -> None:
    bury(valkey, "{", "not JSON", 1)
    valkey.rpush(broker_keys.DEAD, "no letter")
    good, bad = keys_of(operate)
    ran = operate("dlq", "replay", "--all")
    assert ran.status == 1
    assert ran.out == f"{good} is back in its list\n"
    assert f"{bad} stays: nothing says to which list it belongs; purge it" in ran.err
    assert valkey.lrange(LIST, 0, -1) == [b"{"]
    assert operate("dlq", "purge", bad, "--yes").out == "1 dead letters deleted\n"
    assert not valkey.exists(broker_keys.DEAD)


def test_what_is_not_said_is_not_done(operate: Run, valkey: Redis) -> None:
    bury(valkey, "{", "not JSON", 1)
    (key,) = keys_of(operate)
    for args, message in {
        ("replay",): "name dead letters by key",
        ("purge", "--yes"): "name dead letters by key",
        ("purge", key, "--all"): "give keys or --all, not both",
        ("purge", "--all"): "this would delete 1 dead letters; say --yes",
        ("show", "nothing"): "there is no dead letter nothing",
        ("replay", key, "other"): "there is no dead letter other",
    }.items():
        ran = operate("dlq", *args)
        assert ran.status == 2, args
        assert message in ran.err
    assert keys_of(operate) == [key]


def test_a_server_that_is_not_there_is_told_of_without_its_password(run: Run) -> None:
    ran = run("dlq", "ls", "--broker", "redis://me:secret@127.0.0.1:1/0")
    assert ran.status == 3
    assert "no answer from redis://127.0.0.1:1/0" in ran.err
    assert "secret" not in ran.err
    assert run("dlq", "ls", "--broker", "amqp://x").status == 2


def test_a_terminal_is_not_harmed(operate: Run, valkey: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    bury(valkey, "\x1b[2J", "not JSON", 1)
    (key,) = keys_of(operate)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "\x1b" not in operate("dlq", "show", key).out


def test_a_server_that_refuses_is_not_one_that_does_not_answer(operate: Run, valkey: Redis) -> None:
    bury(valkey, "{", "not JSON", 1)
    valkey.config_set("maxmemory", 1)
    try:
        ran = operate("dlq", "replay", "--all")
    finally:
        valkey.config_set("maxmemory", 0)
    assert ran.status == 3
    assert "refused: command not allowed when used memory" in ran.err


def test_a_letter_that_names_no_possible_task_keeps_none_behind_it(operate: Run, valkey: Redis) -> None:
    """Half of a pair of surrogates, say, which no key and no terminal takes."""
    message = '{"headers": {"id": "\\ud800", "task": "penstock.generate"}, "properties": {}}'
    bury(valkey, message, "a \ud800 in it", 1)
    valkey.rpush(broker_keys.DEAD, b'{"reason": "\xff", "list": "l", "at": 2, "message": "\xff"}')
    bury(valkey, "{", "not JSON", 3)
    listed = operate("dlq", "ls")
    assert listed.status == 0, listed.err
    assert [line.split()[2:4] for line in listed.out.splitlines()] == [["no", "task"]] * 3
    for key in keys_of(operate):
        assert operate("dlq", "show", key).status == 0
    ran = operate("dlq", "replay", "--all")
    assert (ran.status, ran.err) == (0, "")
    assert valkey.llen(LIST) == 2
    assert message in [raw.decode() for raw in valkey.lrange(LIST, 0, -1)]


@pytest.mark.parametrize("broken", ["of another type", "no JSON", "no text", "no status"])
def test_a_record_that_is_none_is_told_of_and_keeps_none_behind_it(operate: Run, valkey: Redis, broken: str) -> None:
    bury(valkey, json.dumps({"headers": {"id": "t1"}, "properties": {}}), "its record cannot be used", 1)
    bury(valkey, "{", "not JSON", 2)
    if broken == "of another type":
        valkey.set(keys.task("t1"), "no record")
    else:
        fields = {"no JSON": {"status": "failed", "error": "{"}, "no text": {"status": b"\xff"}, "no status": {"n": 1}}
        valkey.hset(keys.task("t1"), mapping=fields[broken])
    shown = operate("dlq", "show", "t1")
    assert shown.status == 0
    assert "the record of task t1 cannot be used" in shown.out
    ran = operate("dlq", "replay", "--all")
    assert ran.status == 1
    assert "the record of task t1 cannot be used" in ran.err
    assert valkey.lrange(LIST, 0, -1) == [b"{"]
