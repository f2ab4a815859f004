"""Vectors as a table in Parquet's format (parquet-format 2.12): `index`, int64, and `embedding`, a list of fp32.

    magic ─▶ row groups: a page of each column ─▶ footer: schema, and where the pages are ─▶ its length, magic

Headers and footer are structs of Thrift's compact protocol. Values are as they are in memory, for vectors hardly get
smaller. One group at a time is in memory.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Final

MAGIC: Final = b"PAR1"
#: Bytes of vectors from which on a row group is written.
GROUP_BYTES: Final = 8 << 20
#: Types of Thrift's compact protocol.
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12
#: Physical types, and encodings of values and levels.
_INT64, _FLOAT = 2, 4
_PLAIN, _RLE = 0, 3
#: How often a field is there.
_REQUIRED, _REPEATED = 0, 2


def table(answers: Iterable[tuple[int, Sequence[bytes]]]) -> Iterator[bytes]:
    """The file in pieces. `answers`: the number of a first text, and the vectors of it and those after it, as
    little-endian fp32, each of one number or more."""
    yield MAGIC
    size, rows, groups = len(MAGIC), 0, list[bytes]()
    for indices, vectors in _grouped(answers):
        widths = [len(vector) // 4 for vector in vectors]
        columns = []
        for name, kind, values, body in (
            ((b"index",), _INT64, len(indices), indices.tobytes()),
            ((b"embedding", b"list", b"element"), _FLOAT, sum(widths), _levels(widths) + b"".join(vectors)),
        ):
            page = _page(values, body)
            columns.append(_column(name, kind, values, len(page), size))
            size += len(page)
            yield page
        total = sum(length for _, length in columns)
        rows += len(vectors)
        group = _struct((1, _list(_STRUCT, [column for column, _ in columns])), (2, total), (3, len(vectors)))
        groups.append(group)
    footer = _struct((1, _i32(1)), (2, _list(_STRUCT, _SCHEMA)), (3, rows), (4, _list(_STRUCT, groups)))
    yield footer + struct.pack("<I", len(footer)) + MAGIC


def _grouped(answers: Iterable[tuple[int, Sequence[bytes]]]) -> Iterator[tuple[array[int], list[bytes]]]:
    """The numbers and the vectors of each row group."""
    indices, vectors, size = array("q"), list[bytes](), 0
    for first, several in answers:
        for index, vector in zip(count(first), several, strict=False):
            indices.append(index)
            vectors.append(vector)
            size += len(vector)
        if size >= GROUP_BYTES:
            yield indices, vectors
            indices, vectors, size = array("q"), [], 0
    if vectors:
        yield indices, vectors


def _levels(widths: Sequence[int]) -> bytes:
    """Of each number of lists of these lengths, whether it goes on with one (1) or begins one (0), and that it is there
    (1): in runs, each a length and the value."""
    begins = _varint(1 << 1) + b"\x00"
    runs = {width: begins + (_varint((width - 1) << 1) + b"\x01" if width > 1 else b"") for width in set(widths)}
    repetition = b"".join([runs[width] for width in widths])
    definition = _varint(sum(widths) << 1) + b"\x01"
    return b"".join(struct.pack("<I", len(levels)) + levels for levels in (repetition, definition))


def _page(values: int, body: bytes) -> bytes:
    header = _struct((1, _i32(values)), (2, _i32(_PLAIN)), (3, _i32(_RLE)), (4, _i32(_RLE)))
    return _struct((1, _i32(0)), (2, _i32(len(body))), (3, _i32(len(body))), (5, (_STRUCT, header))) + body


def _column(path: Sequence[bytes], kind: int, values: int, length: int, at: int) -> tuple[bytes, int]:
    """A column's part of a row group, uncompressed, and its bytes. `at`: where its page is in the file."""
    encodings = _list(_I32, [_zigzag(_PLAIN), _zigzag(_RLE)])
    names = _list(_BINARY, [_binary(name) for name in path])
    described = _struct(
        (1, _i32(kind)), (2, encodings), (3, names), (4, _i32(0)), (5, values), (6, length), (7, length), (9, at)
    )
    return _struct((2, at), (3, (_STRUCT, described))), length


# ---- Thrift's compact protocol -------------------------------------------------------------------------------------

#: A field's type and bytes; an integer is of 64 bits.
_Value = tuple[int, bytes] | int


def _struct(*fields: tuple[int, _Value]) -> bytes:
    """A struct of (field's number, value), in order."""
    encoded, last = bytearray(), 0
    for number, value in fields:
        kind, data = (_I64, _zigzag(value)) if isinstance(value, int) else value
        encoded += bytes([(number - last) << 4 | kind]) + data
        last = number
    return bytes(encoded) + b"\x00"


def _list(kind: int, items: Sequence[bytes]) -> tuple[int, bytes]:
    head = bytes([len(items) << 4 | kind]) if len(items) < 15 else bytes([0xF0 | kind]) + _varint(len(items))
    return _LIST, head + b"".join(items)


def _i32(value: int) -> tuple[int, bytes]:
    return _I32, _zigzag(value)


def _binary(value: bytes) -> bytes:
    return _varint(len(value)) + value


def _zigzag(value: int) -> bytes:
    return _varint(value << 1)  # none is negative


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _named(name: bytes) -> tuple[int, _Value]:
    return 4, (_BINARY, _binary(name))


#: The columns, as a tree in order: the root, the number, the list with its one repeated field.
_SCHEMA: Final = (
    _struct(_named(b"schema"), (5, _i32(2))),
    _struct((1, _i32(_INT64)), (3, _i32(_REQUIRED)), _named(b"index")),
    _struct(
        (3, _i32(_REQUIRED)),
        _named(b"embedding"),
        (5, _i32(1)),
        (6, _i32(3)),  # a list, for readers of before and of after format 2.4
        (10, (_STRUCT, _struct((3, (_STRUCT, _struct()))))),
    ),
    _struct((3, _i32(_REPEATED)), _named(b"list"), (5, _i32(1))),
    _struct((1, _i32(_FLOAT)), (3, _i32(_REQUIRED)), _named(b"element")),
)
