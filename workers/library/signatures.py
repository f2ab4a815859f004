"""Signed models: ed25519 signatures (RFC 8032) of a folder's manifest.json, which has the SHA-256 of every file.

`manifest.sig` beside it is JSON: `{"v": 1, "signatures": {KEY: SIGNATURE}}`. KEY is the public key, SIGNATURE that of
PREFIX and the manifest's bytes; both in base64. It changes neither manifest nor version. Keys are PEM files as
`openssl genpkey -algorithm ed25519` writes them: the private one, and `openssl pkey -pubout` of it.

Who demands a signature loads nothing that the manifest does not name: every file of the folder must be in it.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from workers.errors import Refused
from workers.library.local_models import MANIFEST, manifest_of, sha256_of, write_manifest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURES: Final = "manifest.sig"
PREFIX: Final = b"penstock manifest v1\n"
#: Bytes of a key file, and of a file of signatures, that are read.
_MAX_KEY, _MAX_SIGNATURES = 1 << 14, 1 << 20


def sign(folder: Path, key_file: Path) -> str:
    """Sign a folder's manifest, beside other keys' signatures; a folder without one gets one of all its files. Returns
    the public key in base64. Raises Refused, also for files that are not as the manifest says."""
    from workers.library.local_models import verify

    key = _private_key(key_file)
    if not folder.is_dir():
        raise Refused(f"{folder} is no folder: put the file into a folder of its own, and sign that")
    try:
        if not (folder / MANIFEST).exists():
            write_manifest(folder, {name: sha256_of(folder / name) for name in _files(folder)})
        verify(folder)
        _check_all_named(folder)
        text = _text(key.public_key())
        signature = base64.b64encode(key.sign(PREFIX + (folder / MANIFEST).read_bytes())).decode()
        signatures = {**signatures_in(folder), text: signature}
        partial = folder / f".{SIGNATURES}.partial"
        partial.write_text(json.dumps({"v": 1, "signatures": signatures}, indent=1) + "\n", encoding="ascii")
        os.replace(partial, folder / SIGNATURES)
    except OSError as error:
        raise Refused(f"cannot sign {folder}: {error.strerror or error}") from error
    return text


def check_signature(folder: Path, key_files: Sequence[Path]) -> str:
    """Returns the key, in base64, among those of these files that has signed the folder's manifest. Files are compared
    with the manifest by `verify`. Raises Refused where none has, or a file is not in the manifest."""
    from cryptography.exceptions import InvalidSignature

    keys = [_public_key(file) for file in key_files]
    try:
        manifest = (folder / MANIFEST).read_bytes() if folder.is_dir() else None
    except FileNotFoundError:
        manifest = None
    except OSError as error:
        raise Refused(f"cannot read {folder / MANIFEST}: {error.strerror}") from error
    if manifest is None:
        raise Refused(f"{folder} has no {MANIFEST}, and so no signature, which is demanded: `penstock models sign`")
    signatures = signatures_in(folder)
    for key in keys:
        text = _text(key)
        try:
            key.verify(base64.b64decode(signatures.get(text, ""), validate=True), PREFIX + manifest)
        except (InvalidSignature, ValueError):
            continue
        _check_all_named(folder)
        return text
    signers = ", ".join(sorted(signatures)) or "nobody"
    demanded = ", ".join(f"{file} ({_text(key)})" for file, key in zip(key_files, keys, strict=True))
    raise Refused(f"{folder} is not signed by {demanded}, which is demanded; it is signed by {signers}")


def _check_all_named(folder: Path) -> None:
    """Raise Refused for a file that the manifest does not name: it would be loaded though nobody has signed it."""
    strange = sorted(set(_files(folder)) - manifest_of(folder).keys())
    if strange:
        raise Refused(f"{folder / strange[0]} is not in the folder's {MANIFEST}, so that no signature covers it")


def _files(folder: Path) -> list[str]:
    """All files but manifest, signatures and hidden ones at the top, by their paths in the folder."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    shown = (path for path in paths if not path.parts[0].startswith("."))
    return sorted(path.as_posix() for path in shown if path.as_posix() not in (MANIFEST, SIGNATURES))


def signatures_in(folder: Path) -> dict[str, str]:
    """Key -> signature, in base64; empty without a file of them. Raises Refused."""
    path = folder / SIGNATURES
    try:
        with path.open("rb") as file:
            return signatures_of(file.read(_MAX_SIGNATURES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read: {error!r}") from error


def signatures_of(content: bytes) -> dict[str, str]:
    """Key -> signature, in base64, of a manifest.sig. Raises ValueError."""
    try:
        return {str(key): str(signature) for key, signature in json.loads(content)["signatures"].items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(repr(error)) from error


def _text(key: Ed25519PublicKey) -> str:
    return base64.b64encode(key.public_bytes_raw()).decode()


def _private_key(file: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = _key(file, private=True)
    if not isinstance(key, Ed25519PrivateKey):
        raise Refused(f"{file} is no private ed25519 key: `openssl genpkey -algorithm ed25519 -out {file}` makes one")
    return key


def _public_key(file: Path) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key = _key(file, private=False)
    if not isinstance(key, Ed25519PublicKey):
        raise Refused(f"{file} is no public ed25519 key: `openssl pkey -in KEY -pubout -out {file}` writes one")
    return key


def _key(file: Path, *, private: bool) -> Any:
    """The key in a PEM file; None for another kind of file. Raises Refused."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_KEY)
    except OSError as error:
        raise Refused(f"cannot read the key file {file}: {error.strerror}") from error
    try:
        return load_pem_private_key(data, None) if private else load_pem_public_key(data)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
