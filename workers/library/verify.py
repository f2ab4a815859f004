"""Whether a model's files are still what was pulled: a disk that rots, or a copy that broke off, makes a model that
answers, and answers wrong.

All files are read and hashed on every load, several at a time. What an earlier load found is not remembered: neither a
file's time nor its inode changes when a disk returns other bytes than were written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from workers.errors import Refused
from workers.library.local_models import MANIFEST, manifest_of, own_file, sha256_of

#: Hashing leaves Python's lock alone; more at a time than this only make a disk seek.
THREADS: Final = 8
#: What a model's weights are read from: where the manifest does not name one of these, nobody vouches for it.
WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json")


def verify(folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
    """Compare every file with the folder's manifest.json, where it has one (as pulled models do).

    Raises Refused, which names the file that is missing or damaged, or holds weights that the manifest does not name.
    """
    if not (folder / MANIFEST).exists():
        return
    digests = manifest_of(folder)
    if strange := sorted({path.name for pattern in WEIGHTS for path in folder.glob(pattern)} - digests.keys()):
        raise Refused(
            f"{folder} is damaged: {', '.join(strange[:3])} is not in its {MANIFEST}; "
            "remove the folder and pull the model again"
        )
    began = time.monotonic()
    # The largest first, so that none is left over at the end.
    try:
        sizes = {name: own_file(folder, name).stat().st_size for name in digests}
    except OSError as error:
        raise Refused(f"{folder} is damaged: {error.filename} is in its {MANIFEST}, and cannot be read") from error
    names = sorted(sizes, key=sizes.__getitem__, reverse=True)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="verify") as pool:
        found = pool.map(lambda name: _digest(folder / name), names)
        damaged = [name for name, digest in zip(names, found, strict=True) if digest != digests[name]]
    if damaged:
        raise Refused(
            f"{folder} is damaged: the SHA-256 of {', '.join(sorted(damaged)[:3])} is not the one in its {MANIFEST}; "
            "remove the folder and pull the model again"
        )
    total, seconds = sum(sizes.values()), time.monotonic() - began
    say(f"{len(names)} files of {folder} are as its {MANIFEST} says ({total / 1e9:.2f} GB in {seconds:.1f} s)")


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        return f"unreadable: {error}"
