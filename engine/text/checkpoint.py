"""What the files of a checkpoint tell without loading it: its size and its version. No torch."""

from __future__ import annotations

import json
import math
import os
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import ModelError

#: Files up to this size count into a version with all of their bytes.
WHOLE_FILE = 16 << 20
_PAGES = 64
_PAGE = 64 << 10
#: safetensors' own bound on a header.
_LONGEST_HEADER = 100_000_000


def count_parameters(folder: str | Path) -> int:
    """Numbers in all tensors of the *.safetensors files of a folder, from their headers alone."""
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} has no *.safetensors file")
    total = 0
    for path in paths:
        for name, entry in _header(path).items():
            if name != "__metadata__":
                total += _numbers(path, name, entry)
    return total


def model_version(folder: str | Path) -> str:
    """12 hex digits that change when the model does.

    Of manifest.json's own SHA-256 where the folder has one, as it lists that of every file. Otherwise of the SHA-256
    over the lines "name, size, digest", tab-separated and newline-ended, of the folder's files in order of name, hidden
    ones left out. The digest is the file's SHA-256 in hex; for files above 16 MiB, that of their safetensors header (if
    that is what they are) and of 64 pages of 64 KiB evenly spaced from the first to the last: reading 16 GB at each
    start would double the time of a cold start, and a change of weights that misses every page does not happen in
    training or conversion.
    """
    root = Path(folder)
    manifest = root / "manifest.json"
    if manifest.is_file():
        return sha256(manifest.read_bytes()).hexdigest()[:12]
    listing = sha256()
    for path in sorted(root.iterdir(), key=lambda path: path.name):
        if path.is_file() and not path.name.startswith("."):
            listing.update(f"{path.name}\t{path.stat().st_size}\t{_digest(path)}\n".encode())
    return listing.hexdigest()[:12]


def _digest(path: Path) -> str:
    size = path.stat().st_size
    if size <= WHOLE_FILE:
        return sha256(path.read_bytes()).hexdigest()
    digest = sha256()
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            digest.update(_read_header(path, file))
        for page in range(_PAGES):
            file.seek((size - _PAGE) * page // (_PAGES - 1))
            digest.update(file.read(_PAGE))
    return digest.hexdigest()


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = _read_header(path, file)
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a header that is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a header that is not a JSON object")
    return header


def _read_header(path: Path, file: BinaryIO) -> bytes:
    """The header of a safetensors file: 8 bytes of little-endian length, then so many of JSON."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if length > min(size - 8, _LONGEST_HEADER):
        raise ModelError(f"{path} is truncated or no safetensors file: its header does not fit its {size} bytes")
    return file.read(length)


def _numbers(path: Path, name: str, entry: object) -> int:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise ModelError(f"{path} gives tensor {name!r} no valid shape")
    return math.prod(shape)
