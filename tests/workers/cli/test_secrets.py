"""`penstock secrets`, and the commands that show a secret, with a key file and without."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from redis import Redis

from producers.contract import keys
from producers.contract.sealing import KEY, KEY_FILE, parse
from tests.workers.cli.conftest import Run


@pytest.fixture
def penstock(run: Run, valkey_url: str, valkey: Redis, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("BROKER_URL", valkey_url)
    monkeypatch.setenv(KEY_FILE, "")  # what a command sets there is undone
    return run


def test_a_key_file_is_made_for_this_user_alone_and_gets_new_keys_in_front(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "secrets.key"
    first = run("secrets", "key", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    old = file.read_text()
    assert first.out == f"{next(iter(parse(old, 'x').keys))} encrypts; no other decrypts\n"
    file.chmod(0o640)
    second = run("secrets", "key", str(file))
    assert file.read_text().partition("\n")[2] == old
    assert second.out == "{} encrypts; {} decrypts\n".format(*parse(file.read_text(), "x").keys)
    assert KEY not in first.out + second.out
    assert stat.S_IMODE(file.stat().st_mode) == 0o640, "a group that reads it may go on"
    assert [path.name for path in tmp_path.iterdir()] == ["secrets.key"]

    file.write_text("mine\n")
    refused = run("secrets", "key", str(file))
    assert (refused.status, file.read_text()) == (2, "mine\n")
    assert f"line 2 of the key file {file} is no key" in refused.err
    assert run("secrets", "key", str(tmp_path)).status == 2


def test_stored_secrets_are_encrypted_and_shown_with_the_key_alone(
    penstock: Run, valkey: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = penstock("webhooks", "secret", "--tenant", "acme").out
    assert secret.strip() in str(valkey.hget(keys.WEBHOOK_SECRETS, "acme"))
    file = str(tmp_path / "secrets.key")
    penstock("secrets", "key", file)
    none = penstock("secrets", "encrypt")
    assert (none.status, "--secrets-key" in none.err) == (2, True)
    done = penstock("secrets", "encrypt", "--secrets-key", file)
    assert done.out.endswith(": the secrets of 0 endpoints, 1 tenants, 0 tasks, 0 deliveries\n")
    assert secret.strip() not in str(valkey.hget(keys.WEBHOOK_SECRETS, "acme"))
    assert penstock("webhooks", "secret", "--tenant", "acme").out == secret

    monkeypatch.setenv(KEY_FILE, "")
    for command in (("secret", "--tenant", "acme"), ("secret", "--tenant", "acme", "--rotate")):
        refused = penstock("webhooks", *command)
        assert (refused.status, refused.out) == (2, "")
        assert f"which this process does not have ({KEY_FILE} is not set)" in refused.err
    other = str(tmp_path / "other.key")
    penstock("secrets", "key", other)
    left = penstock("secrets", "encrypt", "--secrets-key", other, "--json")
    assert (left.status, json.loads(left.out)["unreadable"]) == (1, 1)


@pytest.mark.parametrize(
    "command",
    [
        ("gateway", "--port", "0"),
        ("webhooks", "run"),
        ("worker", "--model", "tiny"),
        ("sources", "--watch-folder", "in"),
        ("up", "--port", "0"),
    ],
    ids=lambda command: command[0],
)
def test_a_process_whose_key_file_is_missing_does_not_start(
    penstock: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "none"))
    refused = penstock(*command)
    assert refused.status == 2
    assert f"cannot read the key file {tmp_path / 'none'} ({KEY_FILE}): No such file or directory" in refused.err
