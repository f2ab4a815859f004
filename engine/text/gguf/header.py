"""Reads the header of a GGUF file: its metadata and the places of its tensors. No torch.

    "GGUF", version, number of tensors, number of metadata entries
    entries     key, type, value: a number, a text, or an array of numbers or texts
    tensors     name, dimensions (innermost first), type, offset
    data        from the next multiple of `general.alignment` on

The file is untrusted. Every count, length and offset is compared with the file's size before it is used, and arrays are
passed over until they are asked for. So a header takes little memory, whatever it says: an array of texts becomes at
most 8 times its bytes in the file, anything else about as much as it has there. (The `gguf` package makes several
numpy arrays of every text, and believes counts.)

A model may be split into parts, NAME-00001-of-00003.gguf and so on. The first has the metadata.

A process that loads a model asks for its header some ten times. `read_gguf` parses it once, as long as the files stay.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from engine.declared import shown
from engine.errors import ModelError
from engine.text.tensors import BLOCKS, StoredTensor

MAGIC: Final = b"GGUF"
SUFFIX: Final = ".gguf"
_VERSIONS: Final = (2, 3)
#: The longest metadata that is read, in bytes. Large vocabularies take some 20 MB.
_LONGEST_METADATA: Final = 256 << 20
_MOST_ENTRIES: Final = 1 << 16
#: The most texts in arrays. Large vocabularies have some 800,000, merges included.
_MOST_TEXTS: Final = 1 << 22
_MOST_TENSORS: Final = 1 << 16
_MOST_DIMENSIONS: Final = 4
_LONGEST_NAME: Final = 1 << 10
_MOST_PARTS: Final = 1 << 12

#: The struct codes of numbers, by their type's number.
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT: Final = 8
_ARRAY: Final = 9
#: The names of tensor types by their number.
_KINDS: Final = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
#: The types of tensors that are served.
SERVED: Final = ("F32", "F16", "BF16", *BLOCKS)
_PART: Final = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file."""

    path: Path
    stored: StoredTensor
    """Its type, and its shape with the outermost dimension first."""
    offset: int
    """Of its first byte in the file."""


@dataclass(frozen=True, slots=True)
class _Array:
    """The place of an array in the file."""

    kind: int
    count: int
    offset: int


class GgufFile:
    """A GGUF model: the metadata of its first part, and the tensors of all parts."""

    def __init__(self, path: Path) -> None:
        """Read the headers. `path`: the file, or a part of it. Raises ModelError naming the file."""
        parts = parts_of(path)
        self.path, self.parts = parts[0], parts
        first = _Reader(parts[0])
        self.header_bytes: dict[Path, int] = {parts[0]: first.header_bytes}
        """The bytes before the weights, by part."""
        self._content, self._entries = first.content, first.entries
        self.tensors: dict[str, TensorEntry] = first.tensors
        self._check_part(first, 0)
        for i, part in enumerate(parts[1:], 1):
            reader = _Reader(part)
            self._check_part(reader, i)
            self.header_bytes[part] = reader.header_bytes
            for name, tensor in reader.tensors.items():
                if name in self.tensors:
                    raise ModelError(f"{part} has tensor {shown(name)}, which {self.tensors[name].path} has too")
                self.tensors[name] = tensor
        listed = self._entries.get("split.tensors.count")
        if len(parts) > 1 and listed is not None and listed != len(self.tensors):
            raise ModelError(
                f"{self.path} is to have {shown(listed)} tensors in {len(parts)} parts; they have {len(self.tensors)}"
            )

    def _check_part(self, reader: _Reader, i: int) -> None:
        number, count = reader.entries.get("split.no", 0), reader.entries.get("split.count", 1)
        if (number, max(count, 1) if isinstance(count, int) else count) != (i, len(self.parts)):
            raise ModelError(
                f"{reader.path} says that it is part {shown(number)} of {shown(count)}, counted from 0; its name says "
                f"{i} of {len(self.parts)}"
            )

    def get(self, key: str) -> Any:
        """A number, bool or text. None if the file has no such entry, or an array."""
        value = self._entries.get(key)
        return None if isinstance(value, _Array) else value

    def length(self, key: str) -> int:
        """The number of elements of an array; 0 if there is none."""
        value = self._entries.get(key)
        return value.count if isinstance(value, _Array) else 0

    def texts(self, key: str) -> list[str]:
        """An array of texts; [] if there is none. Bytes that are not UTF-8 become U+FFFD."""
        value = self._entries.get(key)
        if value is None:
            return []
        if not isinstance(value, _Array) or value.kind != _TEXT:
            raise ModelError(f"{self.path}: {key} is not an array of texts")
        texts, at, content = [], value.offset, self._content
        for _ in range(value.count):
            end = at + 8 + int.from_bytes(content[at : at + 8], "little")
            texts.append(content[at + 8 : end].decode("utf-8", "replace"))
            at = end
        return texts

    def numbers(self, key: str) -> list[Any] | array[Any]:
        """An array of numbers, or a single number as an array; [] if there is none."""
        value = self._entries.get(key)
        if value is None:
            return []
        if isinstance(value, (bool, int, float)):
            return [value]
        if not isinstance(value, _Array) or value.kind not in _NUMBERS:
            raise ModelError(f"{self.path}: {key} is not an array of numbers")
        code = _NUMBERS[value.kind].replace("?", "B")
        numbers = array(code)
        numbers.frombytes(self._content[value.offset : value.offset + value.count * struct.calcsize(f"<{code}")])
        return numbers

    def floats(self, name: str) -> list[float]:
        """The numbers of a small F32 tensor of one dimension. Raises ModelError for another."""
        entry = self.tensors[name]
        if entry.stored.dtype != "F32" or len(entry.stored.shape) != 1 or entry.stored.shape[0] > 1 << 16:
            raise ModelError(f"{entry.path}: {name} is {entry.stored}; a list of F32 is expected")
        with entry.path.open("rb") as file:
            file.seek(entry.offset)
            data = file.read(entry.stored.nbytes)
        return list(struct.unpack(f"<{entry.stored.shape[0]}f", data))


class _Reader:
    """Parses one file's header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                if file.read(4) != MAGIC:
                    raise ModelError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
                self.content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        self._at, self._texts = 4, 0
        self._end = min(self._size, _LONGEST_METADATA)
        version = self._number("I")
        if version not in _VERSIONS:
            raise ModelError(f"{path} is GGUF of version {version}; versions 2 and 3, little-endian, are served")
        tensors, entries = self._number("Q"), self._number("Q")
        if tensors > _MOST_TENSORS or entries > _MOST_ENTRIES:
            raise ModelError(
                f"{path} is to have {tensors} tensors and {entries} entries; at most {_MOST_TENSORS} and "
                f"{_MOST_ENTRIES} are read"
            )
        self.entries: Mapping[str, Any] = dict(self._entry() for _ in range(entries))
        self.tensors = self._tensors(tensors)

    def _take(self, size: int) -> int:
        """Pass over `size` bytes. Returns the offset of the first."""
        at = self._at
        if size > self._end - at:
            cut = self._end < self._size
            why = (
                f"its header is longer than {_LONGEST_METADATA} bytes" if cut else f"it ends within its header, at {at}"
            )
            raise ModelError(f"{self.path} is truncated or not a GGUF file: {why}")
        self._at = at + size
        return at

    def _number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack_from(f"<{code}", self.content, self._take(size))[0]

    def _text(self, longest: int = _LONGEST_METADATA) -> str:
        length = self._number("Q")
        if length > longest:
            raise ModelError(f"{self.path} has a name of {length} bytes; at most {longest} are read")
        at = self._take(length)
        text: str = self.content[at : at + length].decode("utf-8", "replace")
        return text

    def _entry(self) -> tuple[str, Any]:
        key, kind = self._text(_LONGEST_NAME), self._number("I")
        if kind in _NUMBERS:
            return key, self._number(_NUMBERS[kind])
        if kind == _TEXT:
            return key, self._text()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: {shown(key)} has the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        array = _Array(kind, count, self._at)
        if kind in _NUMBERS:
            self._take(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        elif kind == _TEXT:
            self._texts += count
            if self._texts > _MOST_TEXTS:
                raise ModelError(
                    f"{self.path} is to have {self._texts} texts in arrays; at most {_MOST_TEXTS} are read"
                )
            for _ in range(count):
                self._take(self._number("Q"))
        else:
            raise ModelError(f"{self.path}: {shown(key)} is an array of type {kind}; of numbers or texts is expected")
        return key, array

    def _tensors(self, count: int) -> dict[str, TensorEntry]:
        located: dict[str, tuple[StoredTensor, int]] = {}
        for _ in range(count):
            name, dimensions = self._text(_LONGEST_NAME), self._number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise ModelError(f"{self.path}: {shown(name)} has {dimensions} dimensions; at most {_MOST_DIMENSIONS}")
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            kind, offset = self._number("I"), self._number("Q")
            if name in located:
                raise ModelError(f"{self.path} has tensor {shown(name)} twice")
            located[name] = self._stored(name, kind, shape), offset
        alignment = self.entries.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise ModelError(f"{self.path}: general.alignment={shown(alignment)} must be from 1 to {1 << 20}")
        start = -(-self._at // alignment) * alignment
        room = self._size - start
        listed = sum(stored.nbytes for stored, _ in located.values())
        for name, (stored, offset) in located.items():
            if offset % alignment or stored.nbytes > room or offset > room - stored.nbytes:
                raise ModelError(
                    f"{self.path} is truncated or not a GGUF file: tensor {shown(name)} has {stored.nbytes} bytes from "
                    f"{offset} on, and the file has {max(room, 0)} bytes of data"
                )
        if listed > max(room, 0):
            raise ModelError(f"{self.path} has tensors that lie on each other: {listed} bytes in {room}")
        self.header_bytes = start
        return {name: TensorEntry(self.path, stored, start + offset) for name, (stored, offset) in located.items()}

    def _stored(self, name: str, kind: int, shape: tuple[int, ...]) -> StoredTensor:
        kind_name = _KINDS.get(kind, f"type {kind}")
        if kind_name not in SERVED:
            raise ModelError(
                f"{self.path}: tensor {shown(name)} is stored as {kind_name}, which is not served; "
                f"{', '.join(SERVED)} are"
            )
        if not shape or not all(shape) or math.prod(shape) > 8 * self._size:
            raise ModelError(f"{self.path}: tensor {shown(name)} has shape {list(shape)}, which its file cannot hold")
        numbers = BLOCKS[kind_name][0] if kind_name in BLOCKS else 1
        if shape[-1] % numbers:
            raise ModelError(
                f"{self.path}: tensor {shown(name)} has rows of {shape[-1]}; {kind_name} packs multiples of {numbers}"
            )
        return StoredTensor(kind_name, shape)


@dataclass(frozen=True, slots=True)
class FileState:
    """The facts by which a file is known to be unchanged."""

    path: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Raises ModelError if the file cannot be read."""
        try:
            status = path.stat()
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)


def states_of(path: Path) -> tuple[FileState, ...]:
    """The states of a model's parts. Raises ModelError."""
    return tuple(FileState.of(part.absolute()) for part in parts_of(path))


def read_gguf(path: Path) -> GgufFile:
    """A model's headers, which are parsed again only if a part has changed since. `path`: the file, or a part of it.

    Raises ModelError naming the file.
    """
    return _parsed(states_of(path))


@lru_cache(maxsize=2)
def _parsed(states: tuple[FileState, ...]) -> GgufFile:
    return GgufFile(states[0].path)


def part_names(path: Path) -> list[str]:
    """The names of the files of a model of which `path` is a part, in order. Raises ModelError."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path.name]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= _MOST_PARTS:
        raise ModelError(f"{path.name} says that it is part {match['number']} of {match['count']}")
    return [f"{match['name']}-{i:05d}-of-{match['count']}{SUFFIX}" for i in range(1, count + 1)]


def parts_of(path: Path) -> list[Path]:
    """The files of a model of which `path` is a part, in order: [path] unless its name says that there are more.

    Raises ModelError naming a part that is missing.
    """
    parts = [path.with_name(name) for name in part_names(path)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{path} is one of {len(parts)} parts; {missing[0]}{more} is missing beside it")
    return parts


def model_name(path: Path) -> str:
    """The name of a file's model: the file's, without its ending and without a part's number."""
    match = _PART.fullmatch(path.name)
    return path.name.removesuffix(SUFFIX) if match is None else match["name"]


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that begins as GGUF files do."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def absolute(model: str | Path) -> Path:
    """The path of a folder without links, or the path of a GGUF file, whose parts lie beside its link."""
    path = Path(model)
    return path.resolve() if path.is_dir() else path.absolute()


def gguf_of(model: str | Path) -> Path | None:
    """The GGUF file of a model: `model` itself, or the one file (or its first part) of a folder without a config.json.
    None for another folder.

    Raises ModelError for a folder with several, and for a link out of the folder.
    """
    from engine.text.files import file_in

    path = Path(model)
    if not path.is_dir():
        return path if is_gguf(path) else None
    if (path / "config.json").exists():
        return None
    files = sorted(file for file in path.glob(f"*{SUFFIX}") if not file.name.startswith(".") and is_gguf(file))
    models = {model_name(file): file for file in reversed(files)}
    if len(models) > 1:
        raise ModelError(f"{path} has several models: {', '.join(sorted(models)[:3])}; give one of their files")
    for file in files:
        file_in(path, file.name)
    return next(iter(models.values()), None)
