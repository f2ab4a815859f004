"""Downloads into a folder of the local model folder: whether there is room, how far it is, and errors of the disk."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from workers.errors import Refused
from workers.progress import Progress, bytes_bar

T = TypeVar("T")


def download(
    model: object,
    sizes: Mapping[str, int],
    folder: Path,
    fetch: Callable[[str], T],
    say: Callable[[str], None],
    *,
    quiet: bool = False,
) -> dict[str, T]:
    """Fetch a model's files one after the other. Returns what `fetch` does, by file.

    `sizes`: of each file, in bytes, by its name in `folder`, where a part of it may be already. Raises Refused if the
    disk has no room, and as `fetch`."""
    total = sum(sizes.values())
    say(f"pulling {model}: {len(sizes)} files, {total / 1e6:,.1f} MB")
    check_room(model, sizes, folder)
    with Progress(quiet=quiet) as progress:
        progress.show(lambda: bytes_bar(_fetched(sizes, folder), total))
        return {name: fetch(name) for name in sizes}


def check_room(model: object, sizes: Mapping[str, int], folder: Path) -> None:
    """Raise Refused if the disk has no room for the missing parts of files."""
    missing, free = sum(sizes.values()) - _fetched(sizes, folder), shutil.disk_usage(folder).free
    if missing > free:
        raise Refused(
            f"{model} needs {missing / 1e6:,.1f} MB more, and {folder.parent} has {free / 1e6:,.1f} MB free: make "
            "room, or set PENSTOCK_MODELS to a folder on another disk"
        )


def _fetched(sizes: Mapping[str, int], folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in sizes if (folder / name).exists())


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turns errors of the disk into Refused, with what to do about them. `doing`: the attempt, as an infinitive."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Refused(
                "the disk is full; what came so far is kept: make room and run this again, or set PENSTOCK_MODELS to a "
                "folder on another disk"
            ) from error
        raise Refused(f"cannot {doing}: {error}") from error
