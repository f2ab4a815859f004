"""Texts in, vectors out: each line of an input is a text, and its results are vectors, in the order of the lines.

    texts ─▶ lines of a batch for /v1/embeddings, each with as many texts as a worker takes at once ─▶ (the batch)
    the batch's answers ─▶ JSONL, a table in Parquet's format, or a matrix in NumPy's (numpy.lib.format, version 1.0)

A line's `custom_id` says which texts it has, numbered from 0 without blank lines: `256-511`.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from io import RawIOBase
from itertools import accumulate, chain
from typing import Any, Final

from producers.contract import model_fit
from producers.contract.task import Task
from producers.errors import InvalidTask, shown
from producers.store.blobs import BlobNotFound, Blobs, Line, lines
from producers.sweeper.batches.input import is_blank

URL: Final = "/v1/embeddings"
#: The format of results -> what their names end with.
SUFFIXES: Final = {"jsonl": ".jsonl", "parquet": ".parquet", "npy": ".npy"}
#: Most bytes of texts in a line of a batch, unless it has one alone: as JSON they take up to six times as much.
LINE_BYTES: Final = 512 << 10
#: Most bytes of rows without an answer that are made at once.
GAP_BYTES: Final = 1 << 20
#: Bytes of vectors from which on a row group of a table is written: one is in memory.
GROUP_BYTES: Final = 8 << 20
#: Bytes of an input's end in which its last line is.
TAIL: Final = 8 << 20
_RANGE: Final = re.compile(rb'"custom_id": "([0-9]{1,12})-([0-9]{1,12})"')
_OPTIONS: Final = ("dimensions", "prompt_name", "truncate")
FORM: Final = (
    f"a table with `model`, and optionally {', '.join(_OPTIONS)} as of {URL}, and `format`: {' or '.join(SUFFIXES)}"
)


class BadText(Exception):
    """A line has no text that could be embedded. `line`: its number from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def is_embedding(value: Any) -> bool:
    """Whether this is a table of FORM."""
    if not isinstance(value, Mapping) or value.get("format", "jsonl") not in tuple(SUFFIXES):
        return False
    try:
        task_of(value, ["x"])
    except InvalidTask:
        return False
    return value.keys() <= {"model", "format", *_OPTIONS}


def check_installed(form: str) -> None:
    """Raise ValueError for a format whose package is not installed. It imports nothing: pyarrow takes its time."""
    if form == "parquet" and find_spec("pyarrow") is None:
        raise ValueError("the format parquet needs pyarrow, which comes with: pip install 'penstock[parquet]'")


def task_of(settings: Mapping[str, Any], texts: list[str]) -> Task:
    """The task of some texts. Raises InvalidTask."""
    fields = {name: value for name, value in settings.items() if name != "format"}
    return Task(**{**fields, "kind": "embed", "input": texts})


def requests(texts: Iterable[Line], settings: Mapping[str, Any], card: Mapping[str, Any]) -> Iterator[bytes]:
    """The lines of a batch for these texts. Raises BadText and InvalidTask."""
    model_fit.check(task_of(settings, ["x"]), card)
    texts_per_line = len(model_fit.chunks(task_of(settings, ["x"] * 256), card)[0])
    first, size, some = 0, 0, list[str]()
    for line in texts:
        if is_blank(line):
            continue
        text = _text(line, settings)
        if some and (len(some) == texts_per_line or size + len(text.encode()) > LINE_BYTES):
            yield _request(settings, some, first)
            first, size, some = first + len(some), 0, []
        some.append(text)
        size += len(text.encode())
    if some:
        yield _request(settings, some, first)


def _text(line: Line, settings: Mapping[str, Any]) -> str:
    if line.data is None:
        raise BadText(line.number, "the line has more than 4 MiB")
    try:
        value = json.loads(line.data.removeprefix(b"\xef\xbb\xbf") if line.number == 1 else line.data)
    except (ValueError, RecursionError) as error:
        raise BadText(line.number, f"the line is not JSON: {error}") from None
    text = value.get("text") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise BadText(line.number, f"the line is {shown(value)}; it must be a text, or an object with a `text`")
    try:
        task_of(settings, [text])
    except InvalidTask as error:
        raise BadText(line.number, str(error).replace("input[0]", "the text", 1)) from None
    return text


def _request(settings: Mapping[str, Any], texts: list[str], first: int) -> bytes:
    body = {name: value for name, value in settings.items() if name != "format"}
    body |= {"encoding_format": "base64", "input": texts}
    custom_id = f"{first}-{first + len(texts) - 1}"
    request = {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}
    return json.dumps(request, ensure_ascii=False).encode() + b"\n"


# ---- results -------------------------------------------------------------------------------------------------------


def results(form: str, blobs: Blobs, requests_blob: str, answers_blob: str | None) -> Iterator[bytes]:
    """The object of the outbox, in pieces. `requests_blob`: the batch's input; `answers_blob`: its output, None if it
    has none.

    Blocks. Raises BlobNotFound, OSError, and ValueError as `check_installed`.
    """
    check_installed(form)
    answers = iter(()) if answers_blob is None else _answers(blobs, answers_blob)
    if form == "npy":
        return _matrix(answers, _total(blobs, requests_blob))
    return _table(answers) if form == "parquet" else _objects(answers)


def _answers(blobs: Blobs, blob: str) -> Iterator[tuple[int, list[bytes]]]:
    """The number of each answer's first text, and the vectors of all of its texts: little-endian fp32."""
    for line in lines(blobs, blob):
        if line.data:
            answer = json.loads(line.data)
            data = answer["response"]["body"]["data"]
            yield int(answer["custom_id"].partition("-")[0]), [base64.b64decode(entry["embedding"]) for entry in data]


def _objects(answers: Iterable[tuple[int, list[bytes]]]) -> Iterator[bytes]:
    for first, vectors in answers:
        encoded = [
            b'{"index": %d, "embedding": %s}\n' % (index, json.dumps(array("f", vector).tolist()).encode())
            for index, vector in enumerate(vectors, first)
        ]
        yield b"".join(encoded)


class _Pieces(RawIOBase):
    """A file to write that keeps what was written since the last look."""

    def __init__(self) -> None:
        super().__init__()
        self._written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._written.append(bytes(data))
        return len(self._written[-1])

    def taken(self) -> bytes:
        data, self._written = b"".join(self._written), []
        return data


def _table(answers: Iterable[tuple[int, list[bytes]]]) -> Iterator[bytes]:
    """A table in Parquet's format: `index`, int64, and `embedding`, a list of fp32."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    element = pyarrow.field("element", pyarrow.float32(), nullable=False)
    columns = ("index", pyarrow.int64()), ("embedding", pyarrow.list_(element))
    schema = pyarrow.schema([pyarrow.field(name, kind, nullable=False) for name, kind in columns])
    pieces = _Pieces()
    # Vectors hardly get smaller: their values are as they are in memory.
    with ParquetWriter(pyarrow.PythonFile(pieces, "w"), schema, compression="NONE", use_dictionary=False) as writer:
        for indices, vectors in _grouped(answers):
            ends = array("i", accumulate((len(vector) // 4 for vector in vectors), initial=0))
            values = _array(pyarrow, pyarrow.float32(), b"".join(vectors), ends[-1])
            embeddings = pyarrow.ListArray.from_arrays(
                _array(pyarrow, pyarrow.int32(), ends, len(ends)), values, type=columns[1][1]
            )
            index = _array(pyarrow, pyarrow.int64(), indices, len(indices))
            writer.write_batch(pyarrow.record_batch([index, embeddings], schema=schema))
            yield pieces.taken()
    yield pieces.taken()


def _array(pyarrow: Any, kind: Any, values: bytes | array[int], length: int) -> Any:
    """A column of numbers as they are in memory."""
    return pyarrow.Array.from_buffers(kind, length, [None, pyarrow.py_buffer(values)])


def _grouped(answers: Iterable[tuple[int, list[bytes]]]) -> Iterator[tuple[array[int], list[bytes]]]:
    """The numbers and the vectors of each row group."""
    indices, vectors, size = array("q"), list[bytes](), 0
    for first, answered in answers:
        indices.extend(range(first, first + len(answered)))
        vectors += answered
        size += sum(map(len, answered))
        if size >= GROUP_BYTES:
            yield indices, vectors
            indices, vectors, size = array("q"), [], 0
    if vectors:
        yield indices, vectors


def _matrix(answers: Iterator[tuple[int, list[bytes]]], total: int) -> Iterator[bytes]:
    """A matrix with a row for each text: NaN for those without an answer, or with one of another length than the first:
    the model got another version meanwhile."""
    begin = next(answers, None)
    row = 0 if begin is None else len(begin[1][0])
    missing = struct.pack("<f", float("nan")) * (row // 4)
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({total}, {row // 4}), }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    yield b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode("ascii")
    at = 0
    for first, vectors in chain([] if begin is None else [begin], answers):
        yield from _gap(missing, first - at)
        yield b"".join([vector if len(vector) == row else missing for vector in vectors])
        at = first + len(vectors)
    yield from _gap(missing, total - at)


def _gap(missing: bytes, count: int) -> Iterator[bytes]:
    """`count` rows without an answer, in pieces: most of an input may have none."""
    rows_per_piece = max(1, GAP_BYTES // max(1, len(missing)))
    for begin in range(0, count, rows_per_piece):
        yield missing * min(rows_per_piece, count - begin)


def _total(blobs: Blobs, blob: str) -> int:
    """The number of texts of a batch's input: its last line says it. 0 if there is no input, as of a refused one."""
    try:
        size = blobs.size(blob)
    except BlobNotFound:
        return 0
    tail = blobs.read(blob, max(0, size - TAIL), TAIL).rstrip(b"\n")
    match = _RANGE.search(tail, tail.rfind(b"\n") + 1)
    return int(match[2]) + 1 if match else 0
