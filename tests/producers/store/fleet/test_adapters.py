"""What becomes of an adapter's files in the store where two add the same, or one who adds it dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from producers.connection.script import Call
from producers.contract import keys
from producers.store.fleet import adapters
from producers.store.protocol import swap

VERSION = "0123456789ab"


@pytest.fixture
def store(valkey: Redis) -> Redis:
    """A store with the model `m`."""
    valkey.hset(keys.MODELS, "m", json.dumps({"name": "m", "version": "a", "capabilities": ["generate"]}))
    return valkey


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in adapters.FILES:
        (tmp_path / name).write_bytes(b"x" * 10)
    return tmp_path


def add(store: Redis, name: str, folder: Path, version: str = VERSION, **more: int) -> adapters.StoredAdapter:
    return adapters.add(store, name, "m", version, 8, folder, **more)


@pytest.mark.parametrize("other", ["mine", "yours"])
def test_of_two_who_add_the_same_at_once_neither_takes_the_files_from_the_other(
    store: Redis, folder: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    put, seconds = adapters._put, iter(range(100))
    monkeypatch.setattr(adapters, "time", SimpleNamespace(time=lambda: next(seconds)))

    def put_behind_another(*args: object) -> None:
        monkeypatch.setattr(adapters, "_put", put)
        add(store, other, folder)
        put(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(adapters, "_put", put_behind_another)
    assert add(store, "mine", folder) == adapters.all_of(store)["mine"]
    assert store.ttl(keys.adapter(VERSION)) == -1


def test_who_dies_while_he_adds_it_under_another_name_lets_its_files_stay(
    store: Redis, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, "mine", folder)

    def died(path: Path) -> Iterator[bytes]:
        yield path.read_bytes()
        raise KeyboardInterrupt

    monkeypatch.setattr(adapters, "_pieces", died)
    with pytest.raises(KeyboardInterrupt):
        add(store, "yours", folder)
    assert store.ttl(keys.adapter(VERSION)) == -1
    store.unlink(keys.adapter(VERSION))
    with pytest.raises(KeyboardInterrupt):
        add(store, "yours", folder)
    assert store.ttl(keys.adapter(VERSION)) > 0, "pieces that no entry names expire"


def test_one_that_was_replaced_meanwhile_is_not_called_removed(
    store: Redis, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, "mine", folder)

    def swapped_behind_another(*args: Any, **more: Any) -> Call:
        store.hset(keys.ADAPTERS, "mine", "{}")
        return swap(*args, **more)

    monkeypatch.setattr(adapters, "swap", swapped_behind_another)
    with pytest.raises(adapters.AdapterRefused, match="changed meanwhile; nothing was removed"):
        adapters.remove(store, "mine")
    assert store.exists(keys.adapter(VERSION))


def test_all_together_take_no_more_than_they_may_and_the_refusal_names_who_would_have_to_go(
    store: Redis, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr(adapters, "time", SimpleNamespace(time=lambda: next(seconds)))
    for name, version in (("z", "1"), ("y", "2"), ("x", "1")):  # of 20 bytes; x has the files of z
        add(store, name, folder, version, total_bytes=40)
    for total, said in (
        (59, r"may take 59\. .*makes room: z x \(`penst"),
        (39, "z x y"),
        (19, "may take 19; allow more"),
    ):
        with pytest.raises(adapters.AdapterRefused, match=said):
            add(store, "w", folder, "3", total_bytes=total)
    assert not store.exists(keys.adapter("3"))
    add(store, "w", folder, "3", total_bytes=60)
