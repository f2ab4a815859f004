"""No secret of a key is where others look: each surface is asked after keys were made, used, mistaken and rotated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from typer.main import get_command

from producers.contract import keys
from producers.contract.sealing import KEY_FILE, new_key
from producers.contract.webhook import new_secret
from producers.store.access import api_keys
from tests.in_process import app
from tests.producers.contract.test_record import GOOD
from tests.producers.gateway.conftest import Door, Make, Open
from tests.producers.gateway.test_keys import as_caller
from tests.waiting import PATIENCE_S

READERS: dict[str, Callable[[Redis, str], Any]] = {
    "string": lambda store, name: store.get(name),
    "hash": lambda store, name: store.hgetall(name),
    "list": lambda store, name: store.lrange(name, 0, -1),
    "set": lambda store, name: store.smembers(name),
    "zset": lambda store, name: store.zrange(name, 0, -1),
    "stream": lambda store, name: store.xrange(name),
}


def everything(store: Redis) -> str:
    """What a dump of the store holds."""
    names = [name.decode() for name in store.scan_iter()]
    return str([(name, READERS[store.type(name).decode()](store, name)) for name in names])


def options(command: Any) -> Iterator[str]:
    """The names of all options and arguments: what stands there is in the list of processes."""
    for one in getattr(command, "commands", {}).values():
        yield from options(one)
    yield from (param.name or "" for param in command.params)


def test_no_secret_is_anywhere_but_in_the_answer_that_made_it(
    door: Door, make: Make, valkey: Redis, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    owner = make("ops", ("admin",))
    admin = httpx.Client(base_url=door.url, timeout=PATIENCE_S, headers=as_caller(owner))
    made = admin.post("/v1/keys", json={"tenant": "acme"}).json()
    new = admin.post(f"/v1/keys/{made['id']}/rotate").json()["key"]
    wrong = new[:-1] + ("A" if new[-1] != "A" else "B")
    answers = []
    for token in (made["key"], new, wrong):
        for headers in (as_caller(token), {"x-api-key": token}, {**as_caller(token), "traceparent": GOOD}):
            answers += [httpx.get(f"{door.url}{path}", headers=headers) for path in ("/v1/models", "/v1/tasks/none")]
        task = {"model": model, "prompt": "x"}
        # In a header of its own, as a caller who mixes them up sends it.
        odd = {**as_caller(token), "traceparent": token, "prefer": f"wait={token}"}
        answers.append(httpx.post(f"{door.url}/v1/tasks", json=task, headers=odd))
        answers.append(httpx.post(f"{door.url}/v1/tasks", json={**task, "oops": 1}, headers=as_caller(token)))
    opened = api_keys.credentials_of(new)
    key = api_keys.Key.parse(valkey.hget(keys.API_KEYS, made["id"]))
    paths = ("/metrics", "/v1/audit", "/v1/keys", f"/v1/keys/{made['id']}", "/v1/usage?by=key", "/v1/tasks")
    surfaces = {
        "answers and errors": str([(answer.text, answer.headers) for answer in answers]),
        **{path: admin.get(path).text for path in paths},
        "logs": caplog.text,
        "a dump of the store": everything(valkey),
        "objects, as a traceback shows them": repr((opened, key, key and key.principal(), door.app.state.gateway)),
    }
    assert "key.rotate" in surfaces["logs"]
    for surface, text in surfaces.items():
        for token in (owner, made["key"], new, wrong):
            assert token[21:] not in text, surface
    named = set(options(get_command(app)))
    assert {"tenant", "expires"} <= named, "the options of all commands, and not the first one's alone"
    assert not {"api_key", "key", "token", "secret", "password"} & named


def test_with_a_key_file_no_dump_of_the_store_has_a_webhooks_secret(
    open_door: Open, model: str, valkey: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of endpoints, old ones that still sign, of tenants, of tasks, and of events that wait."""
    (tmp_path / "secrets.key").write_text(new_key())
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "secrets.key"))
    door = open_door(webhook_allow=("127.0.0.0/8",))
    http = httpx.Client(base_url=door.url, timeout=PATIENCE_S)
    hook = {"url": "http://127.0.0.1:9/", "secret": new_secret()}
    endpoint = {"url": "http://127.0.0.1:9/", "event_types": ["response.cancelled"]}
    created = http.post("/v1/webhook_endpoints", json=endpoint).json()
    rotated = http.post(f"/v1/webhook_endpoints/{created['id']}/rotate_secret", json={}).json()
    tasks = [
        http.post("/v1/tasks", json={"model": model, "prompt": "x", "webhook": hook} | more).json()["id"]
        for more in ({}, {"tenant": "acme"})
    ]
    for task_id in tasks:
        http.post(f"/v1/tasks/{task_id}/cancel").raise_for_status()
    dump = everything(valkey)
    made = [created["signing_secret"], rotated["signing_secret"], hook["secret"]]
    assert valkey.zcard(keys.WEBHOOKS_DUE) == 4, "for each task a row of its own, and one for the endpoint"
    for secret in made:
        assert secret.startswith("whsec_")
        assert secret.removeprefix("whsec_") not in dump
    assert dump.count("enc1.") == 6, "an endpoint's two, and those of the tasks' records and rows"
