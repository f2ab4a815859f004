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
from itertools import chain
from typing import Any, Final

from producers.contract import model_fit
from producers.contract.task import Task
from producers.errors import InvalidTask, shown
from producers.sources.files import parquet
from producers.store.blobs import BlobNotFound, Blobs, Line, lines
from producers.sweeper.batches.input import is_blank

URL: Final = "/v1/embeddings"
#: The format of results -> what their names end with.
SUFFIXES: Final = {"jsonl": ".jsonl", "parquet": ".parquet", "npy": ".npy"}
#: Most bytes of texts in a line of a batch, unless it has one alone: as JSON they take up to six times as much.
LINE_BYTES: Final = 512 << 10
#: Most bytes of rows without an answer that are made at once.
GAP_BYTES: Final = 1 << 20
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
    if not isinstance(value, Mapping) or value.get("format", "jsonl") not in SUFFIXES:
        return False
    try:
        task_of(value, ["x"])
    except InvalidTask:
        return False
    return value.keys() <= {"model", "format", *_OPTIONS}


def task_of(settings: Mapping[str, Any], texts: list[str]) -> Task:
    """The task of some texts. Raises InvalidTask."""
    fields = {name: value for name, value in settings.items() if name != "format"}
    return Task(**{**fields, "kind": "embed", "input": texts})


def requests(texts: Iterable[Line], settings: Mapping[str, Any], card: Mapping[str, Any]) -> Iterator[bytes]:
    """The lines of a batch for these texts. Raises BadText and InvalidTask."""
    model_fit.check(task_of(settings, ["x"]), card)
    most = len(model_fit.chunks(task_of(settings, ["x"] * 256), card)[0])
    first, size, some = 0, 0, list[str]()
    for line in texts:
        if is_blank(line):
            continue
        text = _text(line, settings)
        if some and (len(some) == most or size + len(text.encode()) > LINE_BYTES):
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

    Blocks. Raises BlobNotFound and OSError.
    """
    answers = iter(()) if answers_blob is None else _answers(blobs, answers_blob)
    if form == "npy":
        return _matrix(answers, _total(blobs, requests_blob))
    return parquet.table(answers) if form == "parquet" else _objects(answers)


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
    most = max(1, GAP_BYTES // max(1, len(missing)))
    for begin in range(0, count, most):
        yield missing * min(most, count - begin)


def _total(blobs: Blobs, blob: str) -> int:
    """The number of texts of a batch's input: its last line says it. 0 if there is no input, as of a refused one."""
    try:
        size = blobs.size(blob)
    except BlobNotFound:
        return 0
    tail = blobs.read(blob, max(0, size - TAIL), TAIL).rstrip(b"\n")
    match = _RANGE.search(tail, tail.rfind(b"\n") + 1)
    return int(match[2]) + 1 if match else 0
