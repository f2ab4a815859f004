"""Checks that a model's files are still those that were pulled.

A failing disk or a partial copy makes a model that answers wrongly. So every load reads and hashes all files, several
at a time. Results are not remembered: a file's time and inode do not change when a disk returns wrong bytes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from workers.errors import Refused
from workers.library.local_models import MANIFEST, manifest_of, own_file, sha256_of
from workers.library.reference import Found

#: Files hashed at a time. Hashing releases the GIL; more threads would only make a disk seek.
THREADS: Final = 8
#: Files that weights are read from; each must be in the manifest.
WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json")


def verify(folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
    """Compare every file with the folder's manifest.json; a folder without one passes. Pulled models have one.

    Raises Refused, which names a missing or damaged file, or a weights file that the manifest does not name.
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
    # The largest first, so that the threads end at about the same time.
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


def described(found: Found, say: Callable[[str], None] = lambda line: None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A model's card and tokenizer files, once its files are checked. Raises Refused."""
    from engine.errors import ModelError
    from engine.text import ModelCard

    verify(found.folder, say=say)
    try:
        card = ModelCard.from_folder(found.folder, found.name)
        return json.loads(card.to_json()), ModelCard.tokenizer_files(found.folder)
    except ModelError as error:
        raise Refused(f"cannot serve {found.folder}: {error}") from error
