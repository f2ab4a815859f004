"""What a worker does while all loaded adapters are in use, and where one goes that a task is to begin with."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from engine.errors import AdapterRoomError, EngineClosedError
from producers.contract import keys
from producers.store.fleet import adapters
from tests.waiting import PATIENCE_S
from workers.flow.adapters import AdapterLoader
from workers.flow.claimer import Claimer

VERSION = "0123456789ab"


class OneRoom:
    """Room for one adapter. Counts the tries to load one."""

    def __init__(self) -> None:
        self.adapters: dict[str, Any] = {"used": SimpleNamespace(nbytes=1)}
        self.adapter_bytes, self.tries = 1, 0

    def load_adapter(self, name: str, path: str) -> Any:
        self.tries += 1
        if self.adapters:
            raise AdapterRoomError("no room", 1)
        self.adapters[name] = SimpleNamespace(nbytes=1, rank=1)
        return self.adapters[name]

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]


def test_files_are_not_read_again_and_again_while_there_is_no_room(
    valkey: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    valkey.hset(keys.MODELS, "m", json.dumps({"name": "m", "version": "a", "capabilities": ["generate"]}))
    for name in adapters.FILES:
        (tmp_path / name).write_bytes(b"x")
    adapters.add(valkey, "mine", "m", VERSION, 1, tmp_path)
    engine, looks, looked = OneRoom(), 0, threading.Event()
    running: dict[str, Any] = {"t": SimpleNamespace(record=SimpleNamespace(fields={"adapter": "used"}))}
    unload = AdapterLoader._unload_one

    def unload_one(self: AdapterLoader) -> bool:
        nonlocal looks
        looks += 1
        if looks == 5:
            assert engine.tries == 1
            running.clear()
            looked.set()
        return unload(self)

    monkeypatch.setattr(AdapterLoader, "_unload_one", unload_one)
    served: Any = SimpleNamespace(engine=engine, settings=SimpleNamespace(store=valkey_url))
    loader = AdapterLoader(served, SimpleNamespace(running=running))  # type: ignore[arg-type]
    loader.start()
    try:
        assert not loader.ready(VERSION, "one")
        assert looked.wait(PATIENCE_S)
        while not loader.ready(VERSION, "one"):
            looked.clear()
            looked.wait(0.01)
        assert engine.tries == 2
    finally:
        assert loader.stop(60)


def test_a_task_whose_adapter_was_unloaded_while_its_prompt_was_made_waits_for_it_again() -> None:
    """A long prompt takes longer than an adapter stays from its last use."""
    ready, given_back, submitted = iter([True, False]), list[str](), list[Any]()
    request = SimpleNamespace(prompt_ids=[1], params=SimpleNamespace(selects=False), course=None)
    claimer: Any = SimpleNamespace(
        _adapters=SimpleNamespace(ready=lambda version, name: next(ready), delay=lambda version: 0.1),
        _finisher=SimpleNamespace(let_go=lambda delivery, delay, why: given_back.append(why)),
        _request=lambda delivery: request,
        _deliveries=SimpleNamespace(run=lambda delivery: True, running={}),
        _publisher=SimpleNamespace(on_event=None),
        _served=SimpleNamespace(engine=SimpleNamespace(submit=lambda *args: submitted.append(args))),
    )
    claimer._has_adapter = partial(Claimer._has_adapter, claimer)
    record = SimpleNamespace(model="one", fields={"adapter": VERSION, "prompt_tokens": "1"})
    delivery: Any = SimpleNamespace(record=record)
    assert not Claimer._submit(claimer, delivery)
    assert (given_back, submitted) == (["adapter_loading"], [])


def test_no_adapter_is_to_blame_for_an_engine_that_is_lost(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    """Its tasks wait for it until the worker hands them back."""
    valkey.hset(keys.MODELS, "m", json.dumps({"name": "m", "version": "a", "capabilities": ["generate"]}))
    for name in adapters.FILES:
        (tmp_path / name).write_bytes(b"x")
    adapters.add(valkey, "mine", "m", VERSION, 1, tmp_path)

    def load_adapter(name: str, path: str) -> Any:
        raise EngineClosedError("the adapter is not loaded: the process has ended")

    engine = SimpleNamespace(adapters={}, adapter_bytes=1, load_adapter=load_adapter)
    served: Any = SimpleNamespace(engine=engine, settings=SimpleNamespace(store=valkey_url))
    loader = AdapterLoader(served, SimpleNamespace(running={}))  # type: ignore[arg-type]
    assert not loader.ready(VERSION, "one")
    loader.start()
    loader.join(PATIENCE_S)
    assert not loader.is_alive()
    assert not loader.ready(VERSION, "one")
    assert loader.stop(0)
