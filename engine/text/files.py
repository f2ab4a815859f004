"""Reads the files of a model folder that tokenizer and chat template need, as bytes by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.text.folder import file_in

#: The files for the tokenizer and the chat template. All but the first may be absent.
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")

#: The largest such file that is read, in bytes. The largest tokenizers of well-known models have 35 MB.
LONGEST = 256 << 20


def read_files(folder: str | Path) -> dict[str, bytes]:
    """Read those of FILES that a folder has. Raises ModelError if tokenizer.json is missing or a file is unreadable."""
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
