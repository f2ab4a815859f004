"""Secrets as the store holds them: encrypted where this process has a key file, else plain.

    enc1.KEY.TEXT    KEY: the key's id; TEXT: base64url of 12 random bytes and what AES-256-GCM makes of the secret
    anything else    a plain secret, from a process without a key file

The environment variable PENSTOCK_SECRETS_KEY_FILE names the file. A line of it is `psek_` and base64url of 32 random
bytes; `#` begins a comment. The first key encrypts, all decrypt. A file that changes is read again at its next use, so
a key may be added while processes run.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from producers.errors import SecretUnreadable

log = logging.getLogger(__name__)

#: The environment variable with the key file's path. Children inherit it.
KEY_FILE: Final = "PENSTOCK_SECRETS_KEY_FILE"
SEALED: Final = "enc1."
KEY: Final = "psek_"
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class Keyring:
    """Keys by their ids, the one that encrypts first. `file`: where they are from, for messages; empty: no file."""

    file: str = ""
    keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def seal(self, secret: str) -> str:
        """The secret as it is stored; one that is sealed with the first key already stays as it is.

        Raises SecretUnreadable for one that is sealed with an unknown key.
        """
        if not self.keys or self.is_current(secret):
            return secret
        first = next(iter(self.keys))
        nonce = secrets.token_bytes(NONCE_BYTES)
        head = f"{SEALED}{first}."
        sealed = self._cipher(first).encrypt(nonce, self.open(secret).encode(), head.encode())
        return head + base64.urlsafe_b64encode(nonce + sealed).decode()

    def open(self, stored: str) -> str:
        """The secret. Raises SecretUnreadable."""
        if not stored.startswith(SEALED):
            return stored
        from cryptography.exceptions import InvalidTag

        name, _, text = stored.removeprefix(SEALED).partition(".")
        if name not in self.keys:
            where = f"{self.file} lacks" if self.file else f"this process does not have ({KEY_FILE} is not set)"
            raise SecretUnreadable(f"a stored secret is encrypted with the key {name!r}, which {where}")
        try:
            data = base64.urlsafe_b64decode(text)
            head = f"{SEALED}{name}.".encode()
            return str(self._cipher(name).decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], head).decode())
        except (InvalidTag, ValueError) as error:
            raise SecretUnreadable(f"a stored secret, encrypted with the key {name!r}, is damaged") from error

    def is_current(self, stored: str) -> bool:
        """Whether it is sealed with the first key, or there is none."""
        return not self.keys or stored.startswith(f"{SEALED}{next(iter(self.keys))}.")

    def _cipher(self, name: str) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self.keys[name])


def keyring() -> Keyring:
    """The keys of this process, as their file has them now. Raises SecretUnreadable for a file that cannot be used."""
    path = os.environ.get(KEY_FILE)
    if not path:
        return Keyring()
    try:
        status = os.stat(path)
    except OSError as error:
        raise SecretUnreadable(f"cannot read the key file {path} ({KEY_FILE}): {error.strerror}") from error
    return _read(path, (status.st_mtime_ns, status.st_size, status.st_ino))


def seal(secret: str) -> str:
    """The secret as this process stores it. Raises SecretUnreadable."""
    return keyring().seal(secret)


def unseal(stored: str) -> str:
    """A stored secret, in plain. Raises SecretUnreadable."""
    return keyring().open(stored) if stored.startswith(SEALED) else stored


def new_key() -> str:
    """A fresh key, as a line of a key file."""
    return KEY + base64.urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).decode()


def key_id(key: bytes) -> str:
    """A key's name in stored secrets: the beginning of its SHA-256."""
    return hashlib.sha256(key).hexdigest()[:8]


def parse(text: str, file: str) -> Keyring:
    """The keys of a file. Raises SecretUnreadable, which shows no key."""
    keys: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        try:
            key = base64.b64decode(line.removeprefix(KEY), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if not line.startswith(KEY) or len(key) != KEY_BYTES:
            raise SecretUnreadable(
                f"line {number} of the key file {file} is no key: {KEY} and base64url of {KEY_BYTES} bytes, as "
                "`penstock secrets key` writes it"
            )
        keys[key_id(key)] = key
    if not keys:
        raise SecretUnreadable(f"the key file {file} has no key; `penstock secrets key {file}` makes one")
    return Keyring(file, keys)


@lru_cache(maxsize=4)
def _read(path: str, state: tuple[int, int, int]) -> Keyring:
    """The keys of a file in this state."""
    try:
        import cryptography  # noqa: F401 - missing, it is told of before the first secret

        file = Path(path)
        if file.stat().st_mode & 0o007:
            log.warning("every user of this machine may use the key file %s: chmod 600 it", path)
        return parse(file.read_text("ascii"), path)
    except ImportError as error:
        raise SecretUnreadable(
            f"{KEY_FILE} needs the package cryptography, which comes with: pip install 'penstock[secrets]'"
        ) from error
    except OSError as error:
        raise SecretUnreadable(f"cannot read the key file {path} ({KEY_FILE}): {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SecretUnreadable(f"the key file {path} is not ASCII text") from error
