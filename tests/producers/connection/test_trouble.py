"""What a server's error means, and which servers are taken."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis
from redis import exceptions as redis

from producers import Client, SubmitFailed
from producers.connection import log_throttle as complaints
from producers.connection.connect import check_hello
from producers.connection.log_throttle import EVERY_S, Throttle, warn_throttled
from producers.connection.sentinel import split
from producers.connection.trouble import NotPrimary, Trouble, UnusableServer, error_text, trouble
from producers.contract import keys
from producers.store.servers import RIGHTS, ServerRefused, check_server

HELLO = {"server": "redis", "version": "7.2.4", "mode": "standalone", "role": "master"}


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (redis.OutOfMemoryError("command not allowed"), Trouble.FULL),
        (redis.ResponseError("MISCONF Errors writing to the AOF file"), Trouble.FULL),
        (redis.ReadOnlyError("You can't write"), Trouble.AWAY),
        (redis.ResponseError("NOREPLICAS Not enough good replicas to write."), Trouble.AWAY),
        (redis.ResponseError("BUSY Redis is busy running a script"), Trouble.AWAY),
        (redis.ResponseError("BUSYGROUP Consumer Group name already exists"), None),
        (redis.AuthenticationError("invalid"), Trouble.DENIED),
        (redis.NoPermissionError("no permissions"), Trouble.DENIED),
        (redis.ResponseError("ACL failure in script: User bob has no permissions to run 'publish'"), Trouble.DENIED),
        (redis.ResponseError("WRONGTYPE Operation against a key"), None),
        (ConnectionResetError(), Trouble.AWAY),
    ],
)
def test_an_error_means_one_thing(error: Exception, found: Trouble | None) -> None:
    assert trouble(error) is found


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"mode": "cluster"}, UnusableServer, "Cluster"),
        ({"mode": "sentinel"}, UnusableServer, "redis\\+sentinel://h:1/NAME"),
        ({"version": "6.2.14"}, UnusableServer, "needs Redis 7.0"),
        ({"role": "replica"}, NotPrimary, "is a replica"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(changes: dict[str, str], kind: type[Exception], says: str) -> None:
    check_hello(HELLO, "h:1")
    with pytest.raises(kind, match=says):
        check_hello({**HELLO, **changes}, "h:1")


def test_a_url_of_sentinels_is_read() -> None:
    plain, found = split("rediss+sentinel://ann:pw@a:1,[::1]:2,c/main/3?sentinel_password=s&ssl_ca_certs=/ca.pem")
    assert plain == "rediss://ann:pw@sentinel/3?ssl_ca_certs=%2Fca.pem"
    assert (found.name, found.addresses) == ("main", [("a", 1), ("::1", 2), ("c", 26379)])
    assert found.options == {"ssl_ca_certs": "/ca.pem", "password": "s"}


@pytest.mark.parametrize("url", ["sentinel://a:1", "sentinel://a:x/main", "sentinel://a:1;sentinel://b:1/main"])
def test_a_url_of_sentinels_that_lacks_something_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be redis\+sentinel"):
        split(url)


def test_a_full_store_takes_no_task_and_says_so(valkey: Redis, valkey_url: str, model: str) -> None:
    with Client(valkey_url) as client:
        valkey.config_set("maxmemory", "1")
        try:
            with pytest.raises(SubmitFailed, match="nothing was queued") as refused:
                client.submit(model=model, prompt=[1])
            assert refused.value.code == "storage_full"
            assert not valkey.keys("penstock:task:*")
        finally:
            valkey.config_set("maxmemory", "0")
        client.submit(model=model, prompt=[1])


@pytest.mark.parametrize(
    ("share", "taken"), [(0.7, {"priority", "default", "flex"}), (0.8, {"priority", "default"}), (0.87, {"priority"})]
)
def test_worse_tiers_are_refused_earlier_and_told_why(
    valkey: Redis, valkey_url: str, model: str, share: float, taken: set[str]
) -> None:
    valkey.setrange("ballast", 20_000_000, "x")
    refused = {}
    with Client(valkey_url) as client:
        client.submit(model=model, prompt=[1])
        valkey.config_set("maxmemory", int(valkey.info("memory")["used_memory"] / share))
        valkey.delete(keys.WAITING_MEMORY)  # the last look counts for a while
        try:
            for tier in keys.TIERS:
                try:
                    client.submit(model=model, prompt=[1], tier=tier, task_id=tier)
                except SubmitFailed as error:
                    refused[tier] = error
        finally:
            valkey.config_set("maxmemory", "0")
            valkey.delete("ballast", keys.WAITING_MEMORY)
    assert refused.keys() == keys.TIERS.keys() - taken
    assert not valkey.exists(*map(keys.task, refused))
    assert all(f"no room for a task of the tier {tier}" in str(error) for tier, error in refused.items())
    assert {error.code for error in refused.values()} == {"storage_full"}


def test_room_is_kept_for_the_results_of_what_waits(valkey: Redis, valkey_url: str, model: str) -> None:
    """A task that waits with a thousand tokens to make counts more than its record."""
    valkey.setrange("ballast", 20_000_000, "x")
    valkey.config_set("maxmemory", int(valkey.info("memory")["used_memory"] / 0.7))
    valkey.hset(keys.WAITING_TOKENS, "default q", 1_000_000)
    try:
        with Client(valkey_url) as client, pytest.raises(SubmitFailed, match="promised to tasks that wait"):
            client.submit(model=model, prompt=[1])
        valkey.delete(keys.WAITING_TOKENS, keys.WAITING_MEMORY)
        with Client(valkey_url) as client:
            client.submit(model=model, prompt=[1])
    finally:
        valkey.config_set("maxmemory", "0")
        valkey.delete("ballast", keys.WAITING_MEMORY)


def test_room_is_kept_for_vectors_of_what_waits(valkey: Redis, valkey_url: str, model: str) -> None:
    """A result's bytes count until its task is started or ends, not only at its admission."""
    card = json.loads(valkey.hget(keys.MODELS, model) or b"")
    card |= {"capabilities": ["embed"], "pooling": {"dimensions": 768}}
    valkey.hset(keys.MODELS, model, json.dumps(card))
    task: dict[str, Any] = {"kind": "embed", "model": model, "input": ["x"] * 256}
    with Client(valkey_url) as client:
        first = client.submit(**task)
        size = int(valkey.hget(keys.task(first.id), "result_bytes") or 0)
        assert size == 256 * 768 * 4 * 4 // 3
        assert int(valkey.hget(keys.WAITING_TOKENS, "results") or 0) == size // 8
        valkey.setrange("ballast", 20_000_000, "x")
        used = valkey.info("memory")["used_memory"]
        valkey.config_set("maxmemory", int((used + 1.5 * size) / 0.85))
        valkey.delete(keys.WAITING_MEMORY)
        try:
            with pytest.raises(SubmitFailed, match="promised to tasks that wait"):
                client.submit(**task)
            first.cancel()
            valkey.delete(keys.WAITING_MEMORY)
            client.submit(**task).cancel()
        finally:
            valkey.config_set("maxmemory", "0")
            valkey.delete("ballast", keys.WAITING_MEMORY)
    assert not valkey.exists(keys.WAITING_TOKENS)


def test_room_for_results_that_another_release_left_counted_is_free_once_nothing_waits(
    valkey: Redis, valkey_url: str, model: str
) -> None:
    valkey.hset(keys.WAITING_TOKENS, "results", 1_000_000)
    with Client(valkey_url) as client:
        first, last = (client.submit(model=model, prompt=[1]) for _ in range(2))
        first.cancel()
        assert valkey.hexists(keys.WAITING_TOKENS, "results")
        last.cancel()
    assert not valkey.exists(keys.WAITING_TOKENS)


def test_a_server_that_evicts_is_refused(valkey: Redis, valkey_url: str, caplog: pytest.LogCaptureFixture) -> None:
    valkey.config_set("maxmemory", "1gb")
    try:
        valkey.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ServerRefused, match="Set maxmemory-policy to noeviction"):
            check_server(valkey_url, "broker")
        valkey.config_set("maxmemory-policy", "volatile-ttl")
        with caplog.at_level(logging.WARNING):  # whatever an earlier test has made of the root logger
            check_server(valkey_url, "broker")
        assert "leases and results would go before their time" in caplog.text
    finally:
        valkey.config_set("maxmemory-policy", "noeviction")
        valkey.config_set("maxmemory", "0")


def test_a_server_that_is_no_redis_is_called_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as web:
        answering = threading.Thread(target=_answer_as_http, args=(web,))
        answering.start()
        try:
            with pytest.raises(ServerRefused, match="no Redis or Valkey server"):
                check_server(f"redis://127.0.0.1:{web.getsockname()[1]}", "broker")
        finally:
            web.shutdown(socket.SHUT_RDWR)  # ends `accept`
            answering.join()


def _answer_as_http(web: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection, _ = web.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_what_a_user_may_not_do_is_named(valkey: Redis, valkey_url: str) -> None:
    ann = "ACL", "SETUSER", "ann", "on", ">pw"
    valkey.execute_command(*ann, *RIGHTS.split())
    try:
        url = valkey_url.replace("//", "//ann:pw@")
        check_server(url, "broker")
        valkey.execute_command(*ann, "-publish")
        with pytest.raises(ServerRefused, match=r"user 'ann'.*publish"):
            check_server(url, "broker")
    finally:
        valkey.execute_command("ACL", "DELUSER", "ann")


def test_the_same_complaint_is_made_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("tests.complaints")
    caplog.set_level(logging.WARNING)
    now = time.monotonic()
    monkeypatch.setattr(complaints, "time", SimpleNamespace(monotonic=lambda: now))
    for attempt in range(3):
        warn_throttled(log, "try %d: %s", attempt, OSError("away"))
    warn_throttled(log, "try %d: %s", 3, ValueError("another cause"))
    assert [record.getMessage() for record in caplog.records] == ["try 0: away", "try 3: another cause"]
    now += EVERY_S
    warn_throttled(log, "try %d: %s", 4, OSError("away"))
    assert caplog.records[-1].getMessage() == "try 4: away (and 2 times more since that was last said)"
    warn_throttled(log, "try %d: %s", 5, TimeoutError())
    assert caplog.records[-1].getMessage() == "try 5: TimeoutError"


def test_a_library_that_logs_each_try_is_throttled_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = logging.getLogger("a.library")
    library.addFilter(Throttle())
    now = time.monotonic()
    monkeypatch.setattr(complaints, "time", SimpleNamespace(monotonic=lambda: now))
    with caplog.at_level(logging.INFO):
        for attempt in range(3):
            library.warning("try %d fails", attempt)
            library.info("not a warning")
        now += EVERY_S
        library.error("try %d fails", 3)
    told = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert told == ["try 0 fails", "try 3 fails (and 2 times more since that was last said)"]
    assert len(caplog.records) == 5


def test_what_an_error_says_is_told_and_else_its_name() -> None:
    assert error_text(redis.ConnectionError("Connection closed by server.")) == "Connection closed by server."
    assert error_text(TimeoutError()) == "TimeoutError"
