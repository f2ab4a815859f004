"""Secrets are encrypted as their key file says, and are never shown by what goes wrong."""

from __future__ import annotations

import base64
import logging
from pathlib import Path

import pytest

from producers.contract import sealing
from producers.contract.sealing import KEY_FILE, Keyring, keyring, new_key, parse, seal, unseal
from producers.contract.webhook import Webhook, new_secret
from producers.errors import SecretUnreadable

#: A key, the same in each process that collects these tests.
LINE = "psek_" + base64.urlsafe_b64encode(bytes(range(32))).decode()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key file of this process, with one key."""
    path = tmp_path / "secrets.key"
    path.write_text(f"# ours\n{new_key()}\n")
    path.chmod(0o600)
    monkeypatch.setenv(KEY_FILE, str(path))
    return path


@pytest.mark.usefixtures("file")
def test_a_secret_is_stored_encrypted_each_time_in_another_way_and_read_back() -> None:
    secret = new_secret()
    stored, again = seal(secret), seal(secret)
    assert stored != again
    for text in (secret, secret.removeprefix("whsec_")[:12], base64.b64encode(secret.encode()).decode()[:20]):
        assert text not in stored + again
    assert unseal(stored) == unseal(again) == secret
    assert seal(stored) == stored, "it is encrypted already"
    assert unseal(secret) == secret, "one from before there was a key"
    fields = Webhook("https://own.example/", secret=secret).stored()
    assert unseal(fields["webhook_secret"]) == secret != fields["webhook_secret"]


def test_without_a_key_file_secrets_are_plain_and_encrypted_ones_are_told_of(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = seal(secret := new_secret())
    monkeypatch.delenv(KEY_FILE)
    assert seal(secret) == secret
    with pytest.raises(SecretUnreadable, match=rf"the key '{stored.split('.')[1]}', .*{KEY_FILE} is not set"):
        unseal(stored)


def test_a_new_first_key_encrypts_the_others_decrypt_until_they_are_gone(file: Path) -> None:
    old = seal(secret := new_secret())
    before = file.read_text()
    file.write_text(f"{new_key()}\n{before}")
    new = seal(secret)
    assert new.split(".")[1] != old.split(".")[1]
    assert unseal(old) == unseal(new) == secret
    resealed = seal(old)
    assert resealed.split(".")[1] == new.split(".")[1]
    file.write_text(file.read_text().replace(before, ""))
    assert unseal(new) == unseal(resealed) == secret
    with pytest.raises(SecretUnreadable, match=f"which {file} lacks"):
        unseal(old)
    with pytest.raises(SecretUnreadable):
        seal(old)


@pytest.mark.usefixtures("file")
def test_what_was_changed_in_the_store_is_not_read() -> None:
    head, key, text = seal(new_secret()).split(".")
    data = bytearray(base64.urlsafe_b64decode(text))
    data[-1] ^= 1
    for damaged in (base64.urlsafe_b64encode(data).decode(), text[:8], "", "\u00e4"):
        with pytest.raises(SecretUnreadable, match="damaged"):
            unseal(f"{head}.{key}.{damaged}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no key; `penstock secrets key"),
        ("# psek_\n\n", "has no key"),
        ("psek_c2hvcnQ=", "line 1 .* is no key"),
        (f"{LINE}\n{LINE.removeprefix('psek_')}", "line 2 .* is no key"),
        (f"{LINE}!", "line 1 .* is no key"),
    ],
)
def test_a_file_that_is_none_is_refused_and_not_shown(file: Path, text: str, why: str) -> None:
    file.write_text(text)
    with pytest.raises(SecretUnreadable, match=why) as refused:
        seal("whsec_x")
    assert not any(line and line in str(refused.value) for line in text.splitlines())


def test_a_file_that_is_missing_is_told_of(file: Path) -> None:
    file.unlink()
    with pytest.raises(SecretUnreadable, match=f"cannot read the key file {file} .*No such file"):
        seal("whsec_x")


def test_a_file_that_all_may_read_is_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    seal("whsec_x")
    assert caplog.text == ""
    file.chmod(0o644)
    file.write_text(file.read_text() + "\n")
    with caplog.at_level(logging.WARNING):
        seal("whsec_x")
    assert f"chmod 600 it: {file}" in caplog.text or f"the key file {file}: chmod 600 it" in caplog.text


def test_keys_are_not_shown_by_a_traceback(file: Path) -> None:
    ring = keyring()
    assert isinstance(ring, Keyring)
    (line,) = [line for line in file.read_text().splitlines() if line.startswith(sealing.KEY)]
    assert line.removeprefix(sealing.KEY)[:12] not in repr(ring)
    assert repr(next(iter(ring.keys.values()))) not in repr(ring)
    assert list(parse(line, "x").keys) == list(ring.keys)
