"""`penstock keys` and `penstock audit`, against a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from producers.contract.fields import MAX_TENANT
from producers.store.access.api_keys import TOKEN
from producers.store.fleet import cards
from tests.producers.gateway.conftest import Door, until
from tests.workers.cli.conftest import Run


@pytest.fixture
def penstock(run: Run, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("STORE_URL", valkey_url)
    return run


def made(penstock: Run, *options: str) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(penstock("keys", "create", "--tenant", "acme", *options, "--json").out)
    return about


def test_a_key_that_was_made_here_opens_a_gateway_until_it_is_revoked(
    penstock: Run, open_door: Callable[..., Door], model: str, valkey: Redis
) -> None:
    door = open_door(auth="keys")

    def status(token: str) -> int:
        return httpx.get(f"{door.url}/v1/models", headers={"authorization": f"Bearer {token}"}).status_code

    limits = ("--rpm", "60", "--budget-tokens", "1000", "--max-output", "100")
    first = made(penstock, "--scopes", "submit, read", "--models", model, "--tiers", "flex", "--name", "CI", *limits)
    assert [first[name] for name in ("rpm", "tpm", "budget_tokens", "max_output")] == [60, None, 1000, 100]
    assert (first["scopes"], first["models"], first["tiers"]) == (["submit", "read"], [model], ["flex"])
    assert made(penstock, "--scopes", "read", "--max-streams", "3")["max_streams"] == 3
    assert status(first["key"]) == 200
    rotated = json.loads(penstock("keys", "rotate", first["id"], "--overlap", "0", "--json").out)
    until(lambda: (status(first["key"]), status(rotated["key"])) == (401, 200))
    assert penstock("keys", "disable", first["id"]).out == f"{first['id']} is disabled\n"
    until(lambda: status(rotated["key"]) == 401)
    assert penstock("keys", "enable", first["id"]).out == f"{first['id']} is active\n"
    until(lambda: status(rotated["key"]) == 200)
    assert penstock("keys", "revoke", first["id"]).out == f"{first['id']} is revoked\n"
    until(lambda: status(rotated["key"]) == 401)
    again = penstock("keys", "rotate", first["id"])
    assert (again.status, "revoked for good" in again.err) == (2, True)
    secret = rotated["key"].split("_", 2)[2]
    told = [penstock("keys", "show", first["id"], *more).out for more in ((), ("--json",))]
    told += [penstock("audit").out, penstock("audit", "--json").out, penstock("keys", "ls", rotated["key"]).out]
    assert all(first["id"] in one and secret not in one for one in told)
    assert not any(secret.encode() in raw for raw in valkey.hvals(keys.API_KEYS))


def test_a_keys_limits_are_changed(penstock: Run) -> None:
    first = made(penstock, "--rpm", "60", "--max-output", "100", "--models", "tiny")
    options = ("--rpm", "none", "--tpm", "500", "--models", "none", "--expires", "2h", "--json")
    changed = json.loads(penstock("keys", "limit", first["id"], *options).out)
    assert [changed[name] for name in ("rpm", "tpm", "max_output", "models")] == [None, 500, 100, []]
    assert changed["expires_at"] is not None
    assert "key.change" in penstock("audit").out
    for wrong in ((), ("--rpm", "many"), ("--tpm", "50"), ("--rpm", "0")):
        assert penstock("keys", "limit", first["id"], *wrong).status == 2


def test_keys_are_listed_and_found(penstock: Run) -> None:
    assert penstock("keys", "ls").out == "There are no keys.\n"
    text = penstock("keys", "create", "--tenant", "other", "--expires", "2h")
    key_id = text.out.split("_")[1]
    assert key_id in text.err
    assert TOKEN.fullmatch(text.out.rstrip("\n"))
    first = made(penstock, "--expires", "2h")
    assert first["expires_at"] == pytest.approx(time.time() + 7200, abs=600)
    assert made(penstock, "--expires", "2030-01-01")["expires_at"] == 1893456000
    listed = [json.loads(line) for line in penstock("keys", "ls", "--json").out.splitlines()]
    assert {one["tenant"] for one in listed} == {"acme", "other"}
    assert penstock("keys", "ls", key_id[:8]).out.split()[:4] == [key_id, "active", "other", "submit,read,cancel"]
    assert penstock("keys", "ls", "--tenant", "none").out == "There are no such keys.\n"
    assert penstock("keys", "show", "none").err.count("there is no key with the id none") == 1
    assert text.out.split("_", 2)[2][:9] not in penstock("keys", "show", text.out.strip()).err, (
        "a secret is in an error"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tenant", ""), "tenant is"),
        (("--tenant", "x" * (MAX_TENANT + 1)), "tenant is"),
        (("--tenant", "a", "--scopes", "write"), "submit, read, cancel, metrics, admin"),
        (("--tenant", "a", "--scopes", ""), "scopes has"),
        (("--tenant", "a", "--tiers", "gold"), "priority"),
        (("--tenant", "a", "--models", "a,,b"), "models is"),
        (("--tenant", "a", "--scopes", "read", "--models", "tiny"), "may submit nothing"),
        (("--tenant", "a", "--rpm", "0"), "rpm is 0"),
        (("--tenant", "a", "--budget-money", "1_000"), "budget_money is"),
        (("--tenant", "a", "--budget-money", "\u0663"), "budget_money is"),
        (("--tenant", "a", "--max-output", "9", "--tpm", "8"), "no task could be so large"),
        (("--tenant", "a", "--max-output", "9", "--shorten-to", "10"), "no task could be so large"),
        (("--tenant", "a", "--expires", "2020-01-01"), "must lie ahead"),
        (("--tenant", "a", "--expires", "0d"), "must lie ahead"),
        (("--tenant", "a", "--expires", "-3d"), "--expires is '-3d'"),
        (("--tenant", "a", "--expires", "soon"), "--expires is 'soon'"),
        (("--tenant", "a", "--expires", "99999w"), "ten years at most"),
    ],
)
def test_a_bad_key_is_refused_and_nothing_is_written(
    penstock: Run, valkey: Redis, options: tuple[str, ...], said: str
) -> None:
    ran = penstock("keys", "create", *options)
    assert (ran.status, said in ran.err, ran.out) == (2, True, "")
    assert not valkey.exists(keys.API_KEYS, keys.AUDIT)


@pytest.mark.parametrize("overlap", ["-1h", "soon", "60d", "5"])
def test_a_bad_overlap_is_refused(penstock: Run, overlap: str) -> None:
    ran = penstock("keys", "rotate", made(penstock)["id"], "--overlap", overlap)
    assert (ran.status, "overlap is" in ran.err) == (2, True)


def test_who_changed_what_is_told_latest_first(penstock: Run, valkey: Redis) -> None:
    one = made(penstock)
    penstock("keys", "revoke", one["id"])
    penstock("keys", "revoke", one["id"])  # changes nothing
    card = {"v": 1, "name": "m", "version": "a", "context_length": 1, "files": {}}
    cards.announce(valkey, card, keys.Pool("m", "a", "f"), {})
    cards.publish(valkey, card | {"version": "b"}, {})
    cards.publish(valkey, card | {"version": "b"}, {})  # as a `penstock up` that starts again
    told = [json.loads(line) for line in penstock("audit", "--json").out.splitlines()]
    assert [(line["did"], line["what"]) for line in told] == [
        ("model.publish", "m@b"),
        ("key.revoke", one["id"]),
        ("key.create", one["id"]),
    ]
    assert all(line["by"].startswith("cli:") and "@" in line["by"] for line in told)
    assert len(penstock("audit", "--limit", "1").out.splitlines()) == 1


def test_the_store_is_found_by_its_data_directory(
    run: Run, valkey: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("BROKER_URL", "STORE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert run("keys", "ls").status == 2
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "port").write_text(str(valkey.connection_pool.connection_kwargs["port"]))
    assert run("keys", "ls", "--data-dir", "data").out == "There are no keys.\n"
    both = run("keys", "ls", "--data-dir", "data", "--store", "redis://127.0.0.1:1/0")
    assert (both.status, "not both" in both.err) == (2, True)
    assert run("keys", "ls", "--store", "redis://127.0.0.1:1/0").status == 3
    port = valkey.connection_pool.connection_kwargs["port"]
    denied = run("keys", "ls", "--store", f"redis://nobody:x@127.0.0.1:{port}/0")
    assert (denied.status, "refused" in denied.err) == (2, True)
