"""Reads files of a model folder, which is untrusted: no file may lead out of the folder, block a reader or be too
long."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelError

#: The files for the tokenizer and the chat template. All but the first may be absent.
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")

#: The largest such file that is read, in bytes. The largest tokenizers of well-known models have 35 MB.
LONGEST = 256 << 20


def read_files(folder: str | Path) -> dict[str, bytes]:
    """Read those of FILES that a folder has, or make them of a GGUF file. Raises ModelError if there is no tokenizer
    or a file is unreadable."""
    from engine.text import gguf

    if (file := gguf.gguf_of(folder)) is not None:
        return gguf.text_files(file)
    files = {}
    for name in FILES:
        path = file_in(Path(folder), name)
        if path is None:
            continue
        try:
            if (size := path.stat().st_size) > LONGEST:
                raise ModelError(f"{path} has {size} bytes; at most {LONGEST} are read")
            files[name] = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    if "tokenizer.json" not in files:
        raise ModelError(f"{folder} has no tokenizer.json")
    return files


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a model has a tokenizer; without one it takes and gives token ids alone. Raises ModelError."""
    from engine.text import gguf

    if (file := gguf.gguf_of(folder)) is not None:
        return gguf.read_gguf(file).length("tokenizer.ggml.tokens") > 0
    return (Path(folder) / "tokenizer.json").is_file()


def read_at_most(path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes. Raises ModelError if it is longer or cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if len(data) > limit:
        raise ModelError(f"{path} is longer than {limit} bytes")
    return data


def read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Parse a file as a JSON object; {} if the file is absent. Raises ModelError if it holds anything else."""
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} must hold a JSON object, not {type(value).__name__}")
    return value


def file_in(folder: Path, name: str) -> Path | None:
    """The path of a regular file of the folder. None if there is no file of that name.

    Raises ModelError if it is not a regular file, or is a link out of the folder. Links from `snapshots/<revision>` to
    the `blobs` folder next to it, as in the cache of huggingface_hub, are followed.
    """
    path = folder / name
    try:
        mode = path.stat().st_mode
        root, target = folder.resolve(strict=True), path.resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError: a loop of links, before Python 3.13. ValueError: a name with NUL, named by a file of the folder.
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path} is not a regular file")
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(directory) for directory in allowed):
        raise ModelError(
            f"{path} is a link to {target}, outside of the model's folder, whose files alone are served: put the files "
            f"themselves there (cp -rL {root} NEW)"
        )
    return path
