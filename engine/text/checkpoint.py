"""Reads the size and the version of a checkpoint from its files, without loading it. No torch."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, TypeGuard

from engine.errors import ModelError
from engine.text.config import packed_bits, read_config
from engine.text.folder import file_in

#: Files up to this size are hashed as a whole for the version.
WHOLE_FILE = 16 << 20
_KINDS = (".json", ".jinja", ".safetensors")
_PAGES = 64
_PAGE = 64 << 10
#: The longest header that is read. A header takes about a hundred bytes for each tensor, and many times that as Python
#: objects. This is enough for ten times the tensors of the largest checkpoints. safetensors itself allows 100 MB.
_LONGEST_HEADER = 16 << 20
_MOST_DIMENSIONS = 16
#: The bytes of one element, for dtypes of whole bytes.
_WIDTHS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}


#: Name suffixes of a quantised matrix's tensors that do not hold its weights.
NO_PARAMETERS = frozenset(
    {
        *("scales", "qzeros", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx"),
        *("weight_shape", "input_scale", "input_zero_point"),
    }
)
#: Name suffixes of tensors that hold several numbers in one word.
PACKED = frozenset({"qweight", "weight_packed"})
#: Name suffixes of the output head, and of the embedding that it may be tied to.
HEADS = ("lm_head", "embed_tokens")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: str
    """The dtype as safetensors spells it: F32, BF16, ..."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _WIDTHS[self.dtype]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. It checks that the bytes of each are within the file.

    Raises ModelError naming the file if it is truncated, or its header is malformed, too long or wrong.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = _read_header(path, file)
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a header that is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a header that is not a JSON object")
    room = size - 8 - len(data)
    found = {name: _stored(path, name, entry, room) for name, entry in header.items() if name != "__metadata__"}
    held = sum(tensor.nbytes for tensor in found.values())
    if held != room:
        raise ModelError(
            f"{path} is truncated or not a safetensors file: it has {room} bytes of data, its header lists {held}"
        )
    return found


def count_parameters(folder: str | Path) -> int:
    """Count the parameters in a folder's *.safetensors files, from their headers alone. A quantised matrix counts with
    its original numbers, without scales."""
    root = Path(folder)
    names = sorted(path.name for path in root.glob("*.safetensors"))
    # Broken links are skipped.
    paths = [path for name in names if (path := file_in(root, name)) is not None]
    if not paths:
        raise ModelError(f"{folder} has no *.safetensors file")
    plain = 0
    packed = {True: 0, False: 0}
    for name, tensor in (one for path in paths for one in read_header(path).items()):
        matrix, _, end = name.rpartition(".")
        if end in PACKED:
            packed[matrix.endswith(HEADS)] += math.prod(tensor.shape)
        elif end not in NO_PARAMETERS:
            plain += math.prod(tensor.shape)
    config = read_config(root) if any(packed.values()) else {}
    return plain + sum(words * (32 // packed_bits(config, head=head)) for head, words in packed.items())


def model_version(folder: str | Path) -> str:
    """The model's version: 12 hex digits that change when the model does.

    If the folder has a manifest.json, they are the beginning of its SHA-256, because it lists that of every file.
    Otherwise they are the beginning of the SHA-256 of the lines "name, size, digest", tab-separated and newline-ended,
    of the folder's *.json, *.jinja and *.safetensors files in order of name. Hidden files and others, such as a README,
    do not count. The digest is the file's SHA-256 in hex. For files above 16 MiB, it covers the safetensors header (if
    there is one) and 64 pages of 64 KiB, evenly spaced from the first to the last. Reading 16 GB at each start would
    double the time of a cold start, and no training or conversion changes weights so that every page stays the same.
    """
    root = Path(folder)
    manifest = root / "manifest.json"
    if manifest.is_file():
        return sha256(manifest.read_bytes()).hexdigest()[:12]
    listing = sha256()
    for path in sorted(root.iterdir(), key=lambda path: path.name):
        if path.suffix in _KINDS and path.is_file() and not path.name.startswith("."):
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


def _read_header(path: Path, file: BinaryIO) -> bytes:
    """Read the header of a safetensors file: 8 bytes of little-endian length, then that many bytes of JSON."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if length > min(size - 8, _LONGEST_HEADER):
        raise ModelError(f"{path} is truncated or not a safetensors file: its header does not fit its {size} bytes")
    return file.read(length)


def _stored(path: Path, name: str, entry: object, room: int) -> StoredTensor:
    given = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = given.get("dtype"), given.get("shape"), given.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _WIDTHS:
        raise ModelError(f"{path} gives tensor {name!r} no known dtype")
    if not _are_sizes(shape, room) or len(shape) > _MOST_DIMENSIONS:
        raise ModelError(f"{path} gives tensor {name!r} no valid shape")
    if not _are_sizes(offsets, room) or len(offsets) != 2:
        raise ModelError(f"{path} is truncated or not a safetensors file: tensor {name!r} has no place in it")
    if offsets[1] - offsets[0] != math.prod(shape) * _WIDTHS[dtype]:
        raise ModelError(f"{path} gives tensor {name!r} a place of another size than its shape {shape} has")
    return StoredTensor(dtype, tuple(shape))


def _are_sizes(values: object, most: int) -> TypeGuard[list[int]]:
    """Whether `values` is a list of integers from 0 to `most` bytes, or to 1 if that is 0."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= max(most, 1) for value in values)
