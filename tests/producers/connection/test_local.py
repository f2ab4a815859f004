"""A client that is told no URL finds the system on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from redis import Redis

from producers import AsyncClient, Client
from producers.connection.local import servers, urls_in
from tests.producers.gateway.conftest import publish
from workers.cli.embedded_valkey import DataDir


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, and no variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BROKER_URL", raising=False)
    monkeypatch.delenv("STORE_URL", raising=False)
    return tmp_path


async def test_clients_find_what_runs_in_their_directory(elsewhere: Path, valkey: Redis) -> None:
    (elsewhere / ".penstock").mkdir()
    (elsewhere / ".penstock" / "port").write_text(f"{valkey.connection_pool.connection_kwargs['port']}\n")
    publish(valkey)
    with Client() as client:
        assert [card["name"] for card in client.models()] == ["tiny"]
    async with AsyncClient() as waiting:
        assert [card["name"] for card in await waiting.models()] == ["tiny"]


def test_it_is_where_a_data_directory_has_its_port() -> None:
    with DataDir(Path(".penstock")) as data:
        url = f"redis://:{data.password()}@127.0.0.1:{data.port()}/0"
    assert servers(None, None) == (url, url)
    assert urls_in(Path(".penstock")) == (url, url)


def test_what_is_given_goes_before_variables_and_these_before_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with DataDir(Path(".penstock")) as data:
        data.port()
    monkeypatch.setenv("BROKER_URL", "redis://b/0")
    assert servers(None, None) == ("redis://b/0", "redis://b/0")
    monkeypatch.setenv("STORE_URL", "redis://s/0")
    assert servers(None, None) == ("redis://b/0", "redis://s/0")
    assert servers("redis://mine/0", None) == ("redis://mine/0", "redis://mine/0")


def test_the_server_of_a_data_directory_is_the_store_alone_where_the_broker_is_on_sqs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sqs = "sqs://us-east-1?prefix=pen-"
    with DataDir(Path(".penstock")) as data:
        url = f"redis://:{data.password()}@127.0.0.1:{data.port()}/0"
        data.write_broker(sqs)
        assert urls_in(Path(".penstock")) == (sqs, url)
        assert servers(None, None) == servers(sqs, None) == (sqs, url)
        monkeypatch.setenv("BROKER_URL", sqs)
        assert servers(None, None) == (sqs, url)
        with pytest.raises(ValueError, match="the store is missing"):
            servers("sqs://us-east-1?prefix=other-", None)
        monkeypatch.delenv("BROKER_URL")
        data.write_broker(None)
    assert servers(None, None) == (url, url)


def test_that_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a trap, and its password is not for us."""
    with DataDir(Path(".penstock")) as data:
        url = data.url(data.port())
    owner = os.getuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ValueError, match=rf"\.penstock and its server belong to another user \(uid {owner}\)"):
        servers(None, None)
    with pytest.raises(ValueError, match="run this as that user"):
        urls_in(Path(".penstock"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert servers(None, None) == (url, url), "root may use all"


def test_a_file_without_a_password_is_told_of() -> None:
    with DataDir(Path(".penstock")) as data:
        data.port()
    Path(".penstock/password").write_text("two words\n")
    with pytest.raises(ValueError, match=r"\.penstock/password holds no password: the next start"):
        servers(None, None)


@pytest.mark.parametrize("written", [None, "", "x"])
def test_where_there_is_none_it_says_what_to_do(elsewhere: Path, written: str | None) -> None:
    if written is not None:
        (elsewhere / ".penstock").mkdir()
        (elsewhere / ".penstock" / "port").write_text(written)
    with pytest.raises(ValueError, match=r"penstock up.*give a server.s URL, such as in BROKER_URL"):
        Client()
