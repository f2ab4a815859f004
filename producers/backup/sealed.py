"""The files of backups and journals: whole or refused, and encrypted where there is a key.

    penstock-backup 1 KEY       a line; KEY: the id of the key that encrypts, or `-`
    flag, length, payload       a frame: 1 byte (1: the last), 4 bytes, and so many bytes; up to FRAME bytes before zlib
    ...
    SHA-256                     32 bytes, of all before

With a key a payload is 12 random bytes and what AES-256-GCM makes of the compressed bytes, bound to the file's name,
the frame's number and its flag. So nobody without the key can change, move, repeat or leave out a frame. Without a key
the hash shows accidents alone.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from producers.contract.sealing import NONCE_BYTES, Keyring, parse
from producers.errors import PenstockError, SecretUnreadable
from producers.store.blobs import BlobNotFound, Blobs

VERSION: Final = 1
MAGIC: Final = b"penstock-backup "
NO_KEY: Final = "-"
#: Bytes of a frame before they are compressed.
FRAME: Final = 4 << 20
_HEAD: Final = struct.Struct(">BI")
_MAX_HEADER: Final = 64
#: More than a frame can have: zlib adds some bytes to what it cannot compress.
_MAX_PAYLOAD: Final = FRAME + (1 << 16)
_DIGEST: Final = 32


class Damaged(PenstockError):
    """A file of a backup is missing, cut short, changed, of another format, or not readable with these keys."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A file as it was written. `size`: its bytes; `sha256`: of them (hex)."""

    name: str
    size: int
    sha256: str


def read_keys(file: Path | None) -> Keyring:
    """The keys of a file, as `penstock secrets key` writes it; None: no key. Raises SecretUnreadable."""
    if file is None:
        return Keyring()
    try:
        import cryptography  # noqa: F401 - missing, it is told of before anything is read

        return parse(file.read_text("ascii"), str(file))
    except ImportError as error:
        raise SecretUnreadable(
            "a key for backups needs the package cryptography, which comes with: pip install 'penstock[secrets]'"
        ) from error
    except OSError as error:
        raise SecretUnreadable(f"cannot read the key file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SecretUnreadable(f"the key file {file} is not ASCII text") from error


def write(blobs: Blobs, name: str, chunks: Iterable[bytes], ring: Keyring) -> Stored:
    """Write a file, which is there whole or not at all. Blocks. Raises OSError."""
    whole, key_id = hashlib.sha256(), next(iter(ring.keys), NO_KEY)
    cipher = _cipher(ring, key_id)
    with blobs.writer(name) as writer:

        def put(data: bytes) -> None:
            whole.update(data)
            writer.write(data)

        put(MAGIC + f"{VERSION} {key_id}\n".encode())
        for number, (data, last) in enumerate(_frames(chunks)):
            payload = zlib.compress(data, 1)
            if cipher is not None:
                nonce = secrets.token_bytes(NONCE_BYTES)
                payload = nonce + cipher.encrypt(nonce, payload, _bound(name, number, last))
            put(_HEAD.pack(last, len(payload)))
            put(payload)
        put(whole.digest())
        writer.commit()
        return Stored(name, writer.size, whole.hexdigest())


def read(blobs: Blobs, name: str, ring: Keyring, expected: Stored | None = None) -> Iterator[bytes]:
    """The bytes of a file, a frame at a time. Blocks. Raises Damaged, and OSError.

    `expected`: as its writer knew it. What comes before an error was whole, but the file is not: use nothing of it.
    """
    source = _Source(blobs, name)
    if expected is not None and source.remaining != expected.size:
        raise Damaged(f"{name} has {source.remaining} bytes, and had {expected.size}")
    cipher = _cipher(ring, _key_of(source.line(), name, ring))
    number, last = 0, 0
    while not last:
        last, size = _HEAD.unpack(source.take(_HEAD.size))
        if last > 1 or size > _MAX_PAYLOAD:
            raise Damaged(f"{name} is damaged: frame {number} has no length that a frame may have")
        payload = source.take(size)
        try:
            if cipher is not None:
                payload = cipher.decrypt(payload[:NONCE_BYTES], payload[NONCE_BYTES:], _bound(name, number, last))
            data = zlib.decompressobj()
            yield data.decompress(payload, FRAME)
            if not data.eof or data.unconsumed_tail:
                raise zlib.error
        except (zlib.error, ValueError) as error:
            raise Damaged(f"{name} is damaged in frame {number}") from error
        except Exception as error:
            if type(error).__name__ != "InvalidTag":  # cryptography's own, which is imported with a key alone
                raise
            raise Damaged(f"{name} is damaged in frame {number}, or from elsewhere") from error
        number += 1
    digest = source.digest()
    if source.take(_DIGEST) != digest or source.remaining:
        raise Damaged(f"{name} is damaged: its hash is another one")
    if expected is not None and source.digest().hex() != expected.sha256:
        raise Damaged(f"{name} is not the file that the manifest names")


class _Source:
    """The bytes of a file in order, and the hash of those that were taken."""

    def __init__(self, blobs: Blobs, name: str) -> None:
        self._blobs, self._name = blobs, name
        self._hash, self._piece, self._read = hashlib.sha256(), memoryview(b""), 0
        try:
            self.remaining = self._size = blobs.size(name)
        except BlobNotFound:
            raise Damaged(f"{name} is missing") from None

    def digest(self) -> bytes:
        return self._hash.digest()

    def line(self) -> bytes:
        """The first line, without its end."""
        header = b""
        while not header.endswith(b"\n"):
            if len(header) == _MAX_HEADER:
                raise Damaged(f"{self._name} is no file of a backup")
            header += self.take(1)
        return header[:-1]

    def take(self, size: int) -> bytes:
        """The next `size` bytes. Raises Damaged if there are fewer."""
        if size > self.remaining:
            raise Damaged(f"{self._name} is cut short")
        parts = []
        missing = size
        while missing:
            if not self._piece:
                self._piece = memoryview(self._blobs.read(self._name, self._read, FRAME))
                self._read += len(self._piece)
                if not self._piece:
                    raise Damaged(f"{self._name} is cut short")
            parts.append(bytes(self._piece[:missing]))
            self._piece = self._piece[missing:]
            missing -= len(parts[-1])
        self.remaining -= size
        data = b"".join(parts)
        self._hash.update(data)
        return data


def _key_of(header: bytes, name: str, ring: Keyring) -> str:
    """The id of the key that a file needs. Raises Damaged."""
    version, _, key_id = header.removeprefix(MAGIC).decode("ascii", "replace").partition(" ")
    if not header.startswith(MAGIC) or not version.isdigit():
        raise Damaged(f"{name} is no file of a backup")
    if int(version) != VERSION:
        raise Damaged(f"{name} has the format {version}; this release reads the format {VERSION}")
    if key_id == NO_KEY and ring.keys:
        raise Damaged(
            f"{name} is not encrypted, though there is a key file: whoever could write it may have changed it"
        )
    if key_id != NO_KEY and key_id not in ring.keys:
        where = f"{ring.file} lacks" if ring.file else "is in the file that --backup-key names"
        raise Damaged(f"{name} is encrypted with the key {key_id}, which {where}")
    return key_id


def _cipher(ring: Keyring, key_id: str) -> Any:
    """The cipher of a key; None without one."""
    if key_id == NO_KEY:
        return None
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(ring.keys[key_id])


def _bound(name: str, number: int, last: int) -> bytes:
    return f"{name}\n{number}\n{int(last)}".encode()


def _frames(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """The bytes as frames, and whether each is the last; one that is empty, of no bytes."""
    waiting = bytearray()
    for chunk in chunks:
        waiting += chunk
        while len(waiting) > FRAME:
            yield bytes(waiting[:FRAME]), False
            del waiting[:FRAME]
    yield bytes(waiting), True
