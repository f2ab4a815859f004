"""Opens files of a model folder, which is untrusted: no file may lead out of the folder or block a reader."""

from __future__ import annotations

import stat
from pathlib import Path

from engine.errors import ModelError


def file_in(folder: Path, name: str) -> Path | None:
    """The path of a regular file of the folder. None if there is no file of that name.

    Raises ModelError if it is not a regular file, or is a link out of the folder. Links from `snapshots/<revision>` to
    the `blobs` folder next to it, as in the cache of huggingface_hub, are followed.
    """
    path = folder / name
    try:
        mode = path.stat().st_mode
        root, target = folder.resolve(strict=True), path.resolve(strict=True)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        # RuntimeError: a loop of links, before Python 3.13.
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path} is not a regular file")
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(directory) for directory in allowed):
        raise ModelError(f"{path} is a link to {target}, outside of the model's folder")
    return path
