"""Signed models: who demands a signature loads nothing that the key's owner has not seen."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from workers.errors import Refused
from workers.library import verify
from workers.library.reference import BUNDLED
from workers.library.signatures import SIGNATURES, check_signature, sign
from workers.runtime.worker import _check_signatures
from workers.settings import WorkerSettings


def key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Files of a private and a public key."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(BUNDLED / "tiny", copy)
    (copy / "manifest.json").unlink(missing_ok=True)
    return copy


def test_one_of_the_demanded_keys_must_have_signed(folder: Path, tmp_path: Path) -> None:
    (mine, public), (_, other), (third, theirs) = (key_pair(tmp_path, name) for name in ("mine", "other", "third"))
    with pytest.raises(Refused, match=r"has no manifest\.json, and so no signature"):
        check_signature(folder, [public])
    text = sign(folder, mine)
    content = (folder / "manifest.json").read_bytes()
    assert check_signature(folder, [other, public]) == text
    with pytest.raises(Refused, match=rf"is not signed by .*other.*signed by {re.escape(text)}"):
        check_signature(folder, [other])
    sign(folder, third)
    check_signature(folder, [theirs])
    assert check_signature(folder, [public]) == text, "the first signature stays"
    assert (folder / "manifest.json").read_bytes() == content, "so does the version"
    verify(folder)
    settings = WorkerSettings("redis://", "redis://", str(folder), require_signature=(str(other),))
    with pytest.raises(Refused, match="is not signed by"):
        _check_signatures(settings)


def test_what_was_changed_after_it_was_signed_is_refused(folder: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "mine")
    sign(folder, private)
    (folder / "chat_template.jinja").write_text("{{ 'evil' }}")
    with pytest.raises(Refused, match=r"chat_template\.jinja is not in the folder's manifest\.json"):
        check_signature(folder, [public])
    (folder / "chat_template.jinja").unlink()
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    with pytest.raises(Refused, match=r"1_Pooling/config\.json is not in"):
        check_signature(folder, [public])
    shutil.rmtree(folder / "1_Pooling")
    (folder / "config.json").write_text("{}")
    with pytest.raises(Refused, match="is damaged"):
        sign(folder, private)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["config.json"] = {"size": 2, "sha256": "0" * 64}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Refused, match="is not signed by"):
        check_signature(folder, [public])


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"signatures": 5}', b'{"signatures": {"x": 1}}', b"\xff", b"[" * 9999]
)
def test_signatures_that_are_none_are_refused(folder: Path, tmp_path: Path, content: bytes) -> None:
    private, public = key_pair(tmp_path, "mine")
    sign(folder, private)
    (folder / SIGNATURES).write_bytes(content)
    with pytest.raises(Refused, match=r"cannot be read|is not signed by"):
        check_signature(folder, [public])


def test_a_file_that_is_no_key_is_refused_with_what_makes_one(folder: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "mine")
    for file in (public, folder / "config.json"):
        with pytest.raises(Refused, match="openssl genpkey -algorithm ed25519"):
            sign(folder, file)
    sign(folder, private)
    for file in (private, folder / "config.json"):
        with pytest.raises(Refused, match="is no public ed25519 key"):
            check_signature(folder, [file])
    with pytest.raises(Refused, match="cannot read the key file"):
        check_signature(folder, [tmp_path / "none"])
