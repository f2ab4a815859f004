"""A file of a backup is read as it was written, or refused by name."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from producers.backup import sealed
from producers.backup.sealed import FRAME, Damaged, read_keys
from producers.contract.sealing import Keyring, new_key
from producers.errors import SecretUnreadable
from producers.store.blobs import FolderBlobs

NO_KEY = Keyring()


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    file = tmp_path / "backup.key"
    file.write_text(new_key() + "\n")
    return read_keys(file)


def read(blobs: FolderBlobs, name: str, ring: Keyring, expected: sealed.Stored | None = None) -> bytes:
    return b"".join(sealed.read(blobs, name, ring, expected))


@pytest.mark.parametrize("with_key", [False, True])
@pytest.mark.parametrize("size", [0, 1, FRAME, FRAME + 1, 2 * FRAME + 17])
def test_what_was_written_is_read(tmp_path: Path, ring: Keyring, size: int, with_key: bool) -> None:
    blobs, data = FolderBlobs(tmp_path / "place"), secrets.token_bytes(size)
    keys = ring if with_key else NO_KEY
    stored = sealed.write(blobs, "a", [data[:100], data[100:]], keys)
    assert read(blobs, "a", keys, stored) == data
    assert stored.size == blobs.size("a")


@pytest.mark.parametrize("with_key", [False, True])
def test_no_byte_may_change_and_none_be_missing_or_added(tmp_path: Path, ring: Keyring, with_key: bool) -> None:
    blobs, keys = FolderBlobs(tmp_path / "place"), ring if with_key else NO_KEY
    sealed.write(blobs, "a", [b"one line\n" * 20], keys)
    whole = (tmp_path / "place" / "a").read_bytes()
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        for damaged in (bytes(changed), whole[:at]):
            (tmp_path / "place" / "a").write_bytes(damaged)
            with pytest.raises(Damaged):
                read(blobs, "a", keys)
    (tmp_path / "place" / "a").write_bytes(whole + b"\0")
    with pytest.raises(Damaged):
        read(blobs, "a", keys)


def test_a_file_of_another_name_or_backup_is_refused(tmp_path: Path, ring: Keyring) -> None:
    blobs = FolderBlobs(tmp_path / "place")
    first = sealed.write(blobs, "a", [b"1"], ring)
    sealed.write(blobs, "b", [b"2"], ring)
    (tmp_path / "place" / "a").write_bytes((tmp_path / "place" / "b").read_bytes())
    with pytest.raises(Damaged, match="from elsewhere"):
        read(blobs, "a", ring)
    sealed.write(blobs, "a", [b"3"], ring)
    with pytest.raises(Damaged, match="not the file that the manifest names"):
        read(blobs, "a", ring, first)
    with pytest.raises(Damaged, match="missing"):
        read(blobs, "c", ring)


def test_keys_and_formats_that_do_not_fit_are_told(tmp_path: Path, ring: Keyring) -> None:
    blobs = FolderBlobs(tmp_path / "place")
    sealed.write(blobs, "plain", [b"1"], NO_KEY)
    sealed.write(blobs, "sealed", [b"secret text"], ring)
    assert b"secret" not in (tmp_path / "place" / "sealed").read_bytes()
    with pytest.raises(Damaged, match="not encrypted, though there is a key file"):
        read(blobs, "plain", ring)
    with pytest.raises(Damaged, match="--backup-key"):
        read(blobs, "sealed", NO_KEY)
    other = tmp_path / "other.key"
    other.write_text(new_key())
    with pytest.raises(Damaged, match="lacks"):
        read(blobs, "sealed", read_keys(other))
    later = (tmp_path / "place" / "plain").read_bytes().replace(b"penstock-backup 1", b"penstock-backup 2")
    (tmp_path / "place" / "plain").write_bytes(later)
    with pytest.raises(Damaged, match="format 2; this release reads the format 1"):
        read(blobs, "plain", NO_KEY)
    with pytest.raises(SecretUnreadable):
        read_keys(tmp_path / "missing.key")
