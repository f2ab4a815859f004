"""The source type `folder`: a watched folder.

    [batches]
    type = "folder"
    folder = "/srv/batches"

    <folder>/inbox/a/b.jsonl    ─▶ batch ─▶    <folder>/outbox/a/b.jsonl, <folder>/outbox/a/b.errors.jsonl
                                               <folder>/done/a/b.jsonl, if inputs are moved

A file is taken when it has not changed for some seconds: one that is renamed into the inbox is whole at once, one that
is written there has a writer who pauses no longer. The inbox is scanned again and again, so no notification is needed,
and no file is missed. A file's stamp is its size and the time at which it was written. Hidden files and folders are
ignored, as are links.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from producers.connection.log_throttle import warn_throttled
from producers.sources.files.work import (
    ERRORS,
    EVERY_S,
    SUFFIX,
    InboxSettings,
    InboxSource,
    Location,
    Replaced,
    Work,
    is_input,
)
from producers.sources.source import Context, Source
from producers.store.blobs import FolderBlobs, open_blobs
from producers.store.inbox import InboxObject

log = logging.getLogger(__name__)

#: The file with a folder's name.
MARK: Final = ".penstock"
#: Longest name of a file, or of a folder, in bytes.
LONGEST: Final = 255
#: Additions of an outbox to a file's name: a batch's id, and that it has errors.
ADDED: Final = len(".batch_") + 32 + len(ERRORS) - len(SUFFIX)
#: Time (s) after which a file that is still in the inbox is named to the store again. If files are moved, it may have
#: gone and come back meanwhile. One that is left is known to the store for weeks.
AGAIN_S: Final = {True: 10.0, False: 3600.0}
#: Time (s) after which a half-written result counts as left by a dead process; and between two looks for such.
HALVES_S: Final = 3600.0


class Folder(Location):
    """A folder. `open` it first: it then has a name, by which all processes know it, wherever it is mounted.

    A folder of the same path on another machine has another name.
    """

    changes = True

    def __init__(self, folder: Path, *, moves: bool) -> None:
        self._folder = folder.absolute()
        self.name = ""
        self.moves = moves
        self._inbox, self._outbox, self._done = (self._folder / name for name in ("inbox", "outbox", "done"))
        self._writing = FolderBlobs(self._outbox, mode=0o666)  # others may read results: the umask says

    def open(self) -> None:
        """Make inbox and outbox, if they are not there, and the folder's name."""
        for folder in (self._inbox, self._outbox):
            folder.mkdir(parents=True, exist_ok=True)
        if not (self._folder / MARK).exists():
            _mark(self._folder / MARK)
        self.name = self._marked()

    def check(self) -> None:
        """Raise OSError if the path has another folder by now, for example since a disk is not mounted any more."""
        if self._marked() != self.name:
            raise OSError(f"{self._folder} is another folder than before: was a disk mounted, or unmounted?")

    def _marked(self) -> str:
        try:
            return f"folder:{(self._folder / MARK).read_text('ascii')}"
        except FileNotFoundError:
            return ""

    def url(self, name: str) -> str:
        return str(self._inbox / name)

    def files(self) -> Iterator[InboxObject]:
        """The files of the inbox, as they are now."""
        self.check()
        yield from _files(self._inbox)

    def clean(self, older_s: float) -> int:
        """Remove half-written files of killed processes. Returns their number."""
        return self._writing.clean(older_s)

    def find(self, name: str) -> InboxObject | None:
        try:
            status = os.stat(self._inbox / name, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return InboxObject(name, _stamp(status), status.st_size)

    def refusal(self, name: str) -> str | None:
        base = os.path.basename(name)
        if len(os.fsencode(base)) + ADDED > LONGEST:
            return f"its name has more than {LONGEST - ADDED} bytes"
        return None

    def read(self, item: InboxObject, start: int, size: int) -> bytes:
        try:
            with open(self._inbox / item.name, "rb", buffering=0, opener=_unlinked) as file:
                return os.pread(file.fileno(), size, start)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise Replaced from None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise Replaced from None

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        self.check()
        target = self._outbox / name
        target.parent.mkdir(parents=True, exist_ok=True)
        writer = self._writing.writer("results")
        with writer:
            for piece in pieces:
                writer.write(piece)
            writer.rename(target)

    def leave(self, item: InboxObject) -> None:
        if self.find(item.name) != item:
            return
        target = self._done / item.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process has moved it meanwhile
            os.rename(self._inbox / item.name, target)


def _unlinked(path: str, flags: int) -> int:
    """Open a file, but no link that took its place, and without a wait for a pipe's writer."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _mark(path: Path) -> None:
    """Give a folder a name, unless another process does so meanwhile."""
    name = secrets.token_hex(16)
    draft = path.with_name(f"{MARK}.{name}")
    draft.write_text(name, "ascii")
    try:
        os.link(draft, path)  # unlike a rename, it replaces nothing
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        os.rename(draft, path)
    draft.unlink(missing_ok=True)


def _files(inbox: Path) -> Iterator[InboxObject]:
    below = [""]  # no recursion: folders may lie as deep as paths go
    while below:
        within = below.pop()
        for entry in _entries(inbox / within):
            name = f"{within}{entry.name}"
            if entry.name.startswith(".") or not _is_text(name):
                continue
            if entry.is_dir(follow_symlinks=False):
                below.append(f"{name}/")
            elif is_input(name) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # taken, or renamed, meanwhile
                    status = entry.stat(follow_symlinks=False)
                    yield InboxObject(name, _stamp(status), status.st_size)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        warn_throttled(log, "cannot look for batches in %s: %s", folder, error)
        return []


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns}"


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class FolderSettings(InboxSettings):
    """A watched folder."""

    type: Literal["folder"]
    folder: str = Field(min_length=1, description="the path of a folder, which gets inbox/, outbox/ and done/")
    settled_seconds: float = Field(
        5.0, ge=0, description="seconds, 0 or more, for which a file has to be unchanged before it is taken"
    )

    def source(self, name: str, context: Context) -> Source:
        return FolderSource(name, context, self)


SETTINGS = FolderSettings


class FolderSource(InboxSource):
    """Batches of a folder's files."""

    def __init__(self, name: str, context: Context, settings: FolderSettings) -> None:
        self._folder = Folder(Path(settings.folder), moves=settings.after == "move")
        super().__init__(name, self._folder, Work(name, context, self._folder, open_blobs(context.files_dir), settings))
        self._settled_s = settings.settled_seconds

    def _duties(self) -> list[Coroutine[Any, Any, None]]:
        return [self._watch(), self._clean()]

    async def _watch(self) -> None:
        every_s, looks = min(EVERY_S, max(self._settled_s, 0.05)), Looks(self._settled_s, AGAIN_S[self._folder.moves])
        while True:
            there = await asyncio.to_thread(lambda: list(self._folder.files()))
            for item in looks.settled(there, time.monotonic()):
                await self._work.open(item)
            await asyncio.sleep(every_s)

    async def _clean(self) -> None:
        while True:
            await asyncio.to_thread(self._folder.clean, HALVES_S)
            await asyncio.sleep(HALVES_S)


class Looks:
    """Finds the files that have settled, by successive looks at a folder."""

    def __init__(self, settled_s: float, again_s: float) -> None:
        self._settled_s = settled_s
        self._again_s = again_s
        self._snapshot: dict[str, tuple[str, float]] = {}
        """Name -> stamp, and the time (s) at which it is to be taken."""

    def settled(self, there: Sequence[InboxObject], now: float) -> list[InboxObject]:
        """Returns the files to take: unchanged for long enough by `now` (s), or taken `again_s` ago and still there."""
        before, self._snapshot, due = self._snapshot, {}, []
        for item in there:
            stamp, at = before.get(item.name, ("", 0.0))
            if stamp != item.stamp:
                at = now + self._settled_s
            if now >= at:
                due.append(item)
                at = now + self._again_s
            self._snapshot[item.name] = item.stamp, at
        return due
