"""Finds the tensors of a checkpoint in its safetensors files, from their headers alone. No torch."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeGuard

from engine.errors import ModelError
from engine.text.files import file_in

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: The largest index file that is read, in bytes. Those of the largest checkpoints have some 10 MB.
_LONGEST_INDEX = 64 << 20
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
#: The numbers of a block and its bytes, for GGUF's quantised types.
BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
}


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """The form in which weights of a GGUF type are kept in memory: their own integers."""

    bits: int
    """The bits that hold them: 4, 5, 6 or 8."""
    group: int = 32
    """The numbers that share a scale."""
    minima: bool = False
    """Whether each group has a minimum."""
    scale_bits: int = 16

    @property
    def bits_per_weight(self) -> float:
        return self.bits + self.scale_bits * (1 + self.minima) / self.group


#: How the native kernels keep GGUF's types.
KEPT: Final = {
    "Q4_0": KeptBlocks(4),
    "Q4_1": KeptBlocks(4, minima=True),
    "Q5_0": KeptBlocks(5),
    "Q5_1": KeptBlocks(5, minima=True),
    "Q8_0": KeptBlocks(8),
    "Q2_K": KeptBlocks(4, 16, minima=True),
    "Q3_K": KeptBlocks(4, 16),
    "Q4_K": KeptBlocks(4, minima=True),
    "Q5_K": KeptBlocks(5, minima=True),
    "Q6_K": KeptBlocks(6, 16),
    "Q8_K": KeptBlocks(8, 256, scale_bits=32),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: str
    """The dtype as safetensors spells it: F32, BF16, ..., or a key of BLOCKS."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        numbers, size = BLOCKS.get(self.dtype) or (1, _WIDTHS[self.dtype])
        return math.prod(self.shape) // numbers * size


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """The location of a tensor, with its entry in the file's header."""

    path: Path
    name: str
    """Its name in the file."""
    stored: StoredTensor
    part: tuple[int | slice, ...] = ()
    """The indexes of the part of the file's tensor that this is; () is all of it."""


def locate(folder: Path) -> dict[str, LocatedTensor]:
    """Every tensor of a folder's checkpoint: of the single file, or else of those that the index names, or of its GGUF
    file. Other files are not part of it. Raises ModelError."""
    from engine.text import gguf

    if (gguf_file := gguf.gguf_of(folder)) is not None:
        return gguf.located_in(gguf.read_gguf(gguf_file))
    path = file_in(folder, SINGLE)
    if path is not None:
        return {name: LocatedTensor(path, name, stored) for name, stored in _header(path).items()}
    index = file_in(folder, INDEX)
    if index is None:
        raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}")
    shards: dict[str, tuple[Path, dict[str, StoredTensor]]] = {}
    located = {}
    for name, shard in _weight_map(index).items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise ModelError(
                f"{index}: {name} is said to be in {shard!r}, which is not the name of a safetensors file beside it"
            )
        if shard not in shards:
            path = file_in(folder, shard)
            if path is None:
                raise ModelError(f"{folder}: the shard {shard}, named by {INDEX}, is missing")
            shards[shard] = path, _header(path)
        path, tensors = shards[shard]
        if name not in tensors:
            raise ModelError(f"{path} does not hold {name}, although {INDEX} says so")
        located[name] = LocatedTensor(path, name, tensors[name])
    return located


def _weight_map(index: Path) -> dict[str, object]:
    try:
        with index.open("rb") as file:
            data = file.read(_LONGEST_INDEX + 1)
        if len(data) > _LONGEST_INDEX:
            raise ModelError(f"{index} is longer than {_LONGEST_INDEX} bytes: it is no weight map")
        shard_of = json.loads(data)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{index} cannot be read as a weight map: {error!r}") from error
    if not isinstance(shard_of, dict):
        raise ModelError(f"{index}: weight_map is not an object")
    return shard_of


def _is_plain_name(shard: str) -> bool:
    # An index is untrusted data: it must not name other files of this machine.
    return Path(shard).name == shard and "\\" not in shard and "\0" not in shard and shard.endswith(".safetensors")


def _header(path: Path) -> dict[str, StoredTensor]:
    try:
        return read_header(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. It checks that the bytes of each are within the file.

    Raises ModelError naming the file if it is truncated, or its header is malformed, too long or wrong.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = raw_header(path, file)
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a header that is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a header that is not a JSON object")
    room = size - 8 - len(data)
    tensors = {name: _stored(path, name, entry, room) for name, entry in header.items() if name != "__metadata__"}
    listed = sum(tensor.nbytes for tensor in tensors.values())
    if listed != room:
        raise ModelError(
            f"{path} is truncated or not a safetensors file: it has {room} bytes of data, its header lists {listed}"
        )
    return tensors


def raw_header(path: Path, file: BinaryIO) -> bytes:
    """Read the header of a safetensors file: 8 bytes of little-endian length, then that many bytes of JSON."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if length > min(size - 8, _LONGEST_HEADER):
        raise ModelError(f"{path} is truncated or not a safetensors file: its header does not fit its {size} bytes")
    return file.read(length)


def _stored(path: Path, name: str, entry: object, room: int) -> StoredTensor:
    attributes = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = attributes.get("dtype"), attributes.get("shape"), attributes.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _WIDTHS:
        raise ModelError(f"{path} gives tensor {name!r} no known dtype")
    if not _are_sizes(shape, room) or len(shape) > _MOST_DIMENSIONS:
        raise ModelError(f"{path} gives tensor {name!r} no valid shape")
    if not _are_sizes(offsets, room) or len(offsets) != 2:
        raise ModelError(f"{path} is truncated or not a safetensors file: tensor {name!r} has no place in it")
    if offsets[1] - offsets[0] != math.prod(shape) * _WIDTHS[dtype]:
        raise ModelError(f"{path} gives tensor {name!r} a place of another size than its shape {shape} has")
    return StoredTensor(dtype, tuple(shape))


def _are_sizes(values: object, limit: int) -> TypeGuard[list[int]]:
    """Whether `values` is a list of integers from 0 to `limit` bytes, or to 1 if that is 0."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= max(limit, 1) for value in values)
