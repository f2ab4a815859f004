"""Blobs in a folder, which all gateways and sweepers share: a local disk, or a network's file system.

    <folder>/<name>                    a blob
    <folder>/.incoming/<random>        a writer's file, renamed to its name by commit
    <folder>/.parts/<name>/<number>    a part

A rename is atomic, and comes after the file's bytes are on disk. So a blob is there whole or not at all, whatever is
killed, and after a power cut as well. `clean` removes what a killed writer left in the two hidden folders.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

from producers.store.blobs.base import PIECE, BlobNotFound, Blobs, BlobWriter

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class FolderBlobs(Blobs):
    """Raises OSError if the folder cannot be made or written to."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        self._incoming = self.folder / ".incoming"
        self._parts = self.folder / ".parts"
        for path in (self.folder, self._incoming, self._parts):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(f"{path} cannot be written to by this user")

    def writer(self) -> BlobWriter:
        return _FolderWriter(self._incoming / secrets.token_hex(16), self.folder)

    def put_part(self, name: str, number: int, data: bytes) -> None:
        folder = self._parts / _checked(name)
        folder.mkdir(mode=0o700, exist_ok=True)
        with _FolderWriter(self._incoming / secrets.token_hex(16), folder) as writer:
            writer.write(data)
            writer.commit(str(number))
        _sync(self._parts)

    def join(self, name: str, count: int) -> int:
        parts = self._parts / _checked(name)
        try:
            with self.writer() as writer:
                for number in range(count):
                    _copy(parts / str(number), writer)
                writer.commit(name)
        except FileNotFoundError:
            size = self.size(name)  # another call has joined them, or it raises
        else:
            size = writer.size
        shutil.rmtree(parts, ignore_errors=True)
        return size

    def size(self, name: str) -> int:
        try:
            return (self.folder / _checked(name)).stat().st_size
        except FileNotFoundError:
            raise _missing(name) from None

    def read(self, name: str, start: int, size: int) -> bytes:
        try:
            with open(self.folder / _checked(name), "rb", buffering=0) as file:
                file.seek(start)
                return _read(file.fileno(), size)
        except FileNotFoundError:
            raise _missing(name) from None

    def delete(self, name: str) -> bool:
        parts = self._parts / _checked(name)
        had_parts = parts.is_dir()
        shutil.rmtree(parts, ignore_errors=True)
        try:
            (self.folder / name).unlink()
        except FileNotFoundError:
            return had_parts
        return True

    def names(self) -> Iterator[tuple[str, float]]:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if not _NAME.fullmatch(entry.name):
                    continue
                try:
                    yield entry.name, entry.stat().st_mtime
                except FileNotFoundError:  # deleted meanwhile
                    continue

    def clean(self, older_s: float, parts_older_s: float) -> int:
        now = time.time()
        left = [path for path in _old(self._incoming, now - older_s) if _removed(path)]
        unjoined = _old(self._parts, now - parts_older_s)
        for path in unjoined:
            shutil.rmtree(path, ignore_errors=True)
        return len(left) + len(unjoined)


class _FolderWriter(BlobWriter):
    """Writes a file at `path`, to be renamed into `folder`."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.size = 0
        self._path = path
        self._folder = folder
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by __exit__

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self.size += len(data)

    def commit(self, name: str) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self._path, self._folder / _checked(name))
        _sync(self._folder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def _checked(name: str) -> str:
    """The name. Raises ValueError for one that could lead out of the folder."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a blob")
    return name


def _missing(name: str) -> BlobNotFound:
    return BlobNotFound(f"there is no blob {name}")


def _read(fd: int, size: int) -> bytes:
    """Up to `size` bytes; fewer only at the end of the file."""
    data = os.read(fd, size)
    if not data or len(data) == size:
        return data
    pieces, left = [data], size - len(data)
    while left and (data := os.read(fd, left)):
        pieces.append(data)
        left -= len(data)
    return b"".join(pieces)


def _copy(path: Path, writer: BlobWriter) -> None:
    with open(path, "rb", buffering=0) as part:
        while data := part.read(PIECE):
            writer.write(data)


def _old(folder: Path, before: float) -> list[Path]:
    """Entries that nothing has touched since."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.stat().st_mtime < before:
                    found.append(Path(entry.path))
            except FileNotFoundError:
                continue
    return found


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Make a rename in the folder last through a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
