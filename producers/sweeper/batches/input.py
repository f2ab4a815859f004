"""A batch's input, a file of requests: checked as a whole before anything runs, then read a block at a time.

    blob ─▶ lines ─▶ request_of (JSON, custom_id, method, url, body, model)
        check: ─▶ hashes of custom_ids ─▶ Checked; hashes that repeat ─▶ a second pass names their lines
        read_requests: ─▶ successive requests, as many as fit into a block

What is in a line's body, beside its model, is not judged here: a bad body is that line's error, not the batch's. Memory
is bounded. Everything blocks: call it on a thread.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from producers.contract.fields import likely
from producers.contract.json_parts import MAX_PARTS, SMALL, count_parts
from producers.errors import shown
from producers.store.batches import Batch
from producers.store.blobs import Ahead, Blobs, Line, lines
from producers.store.blobs.base import MAX_LINE

#: Most lines of a batch.
MAX_LINES: Final = 10_000_000
#: Longest custom_id, in characters.
MAX_CUSTOM_ID: Final = 512
#: Errors after which no more are looked for.
MAX_ERRORS: Final = 100
#: Bits of a custom_id's hash that say in which bucket the other bits are. Each bucket is small.
_BUCKET_BITS: Final = 14
#: Bits of a hash, of which 4 bytes are kept. In a file of ten million ids two have the same by chance every other time;
#: the second pass then finds that they differ.
_BITS: Final = _BUCKET_BITS + 32
_BOM: Final = b"\xef\xbb\xbf"


class BadLine(ValueError):
    """A line that fails its whole batch. `code`: for programs. `param`: the field at fault."""

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class Request:
    """A line that has the form of a request. `body`: not judged yet, but for its model."""

    custom_id: str
    body: dict[str, Any]

    @property
    def model(self) -> str:
        return str(self.body["model"])


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a batch fails as a whole. `line` is from 1; None where no line is at fault."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """A check's findings. Without `errors`, the batch has `lines` requests, to these `models`."""

    lines: int
    models: frozenset[str]
    errors: tuple[Reason, ...]


def is_blank(line: Line) -> bool:
    """Whether the line has nothing in it. Such lines are no requests, and do not count."""
    return line.data is not None and not line.data.strip()


def request_of(line: Line, url: str) -> Request:
    """The request in a line that is not blank. `url`: the batch's endpoint. Raises BadLine."""
    fields = _object(line)
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise _wrong(fields, "custom_id", f"a text of 1 to {MAX_CUSTOM_ID} characters")
    if fields.get("method") != "POST":
        raise _wrong(fields, "method", '"POST"')
    if fields.get("url") != url:
        raise _wrong(fields, "url", f"{shown(url)}, the batch's endpoint", code="url_mismatch")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise _wrong(fields, "body", f"an object: the request that {url} takes")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise _wrong(body, "model", "the name of a model", path="body.model")
    return Request(custom_id, body)


def check(
    read: Callable[[], Iterable[Line]],
    url: str,
    models: Collection[str],
    *,
    max_lines: int = MAX_LINES,
    stop: Callable[[], bool] = lambda: False,
) -> Checked:
    """Check an input. `read` gives its lines from the first on, each time it is called. `models`: the existing ones.

    `stop`: asked now and then whether to give up; the result is then of no use. Raises what `read` raises.
    """
    errors: list[Reason] = []
    named_models: set[str] = set()
    custom_ids = _Hashes()
    count = 0
    for line in _not_blank(read(), stop):
        count += 1
        if count > max_lines:
            message = f"the file has more than {max_lines} requests, which is the most for a batch; split it"
            errors.append(Reason(code="too_many_tasks", message=message, line=line.number))
            break
        try:
            request = request_of(line, url)
            custom_ids.add(request.custom_id)
            if request.model not in named_models:
                _check_model(request.model, models)
                named_models.add(request.model)
        except BadLine as error:
            errors.append(Reason(error.code, str(error), line.number, error.param))
            if len(errors) == MAX_ERRORS:
                break
    if not count:
        errors.append(Reason(code="empty_file", message="the file has no requests: it is empty"))
    room = MAX_ERRORS - len(errors)
    if room and (repeated := custom_ids.repeated(MAX_ERRORS)):
        errors += _repeats(_not_blank(read(), stop), url, repeated, room, max_lines)
    errors.sort(key=lambda error: error.line or 0)
    return Checked(count, frozenset(named_models), tuple(errors))


def _not_blank(lines: Iterable[Line], stop: Callable[[], bool]) -> Iterator[Line]:
    """The lines that are not blank."""
    for line in lines:
        if line.number % 1024 == 0 and stop():
            return
        if not is_blank(line):
            yield line


def _object(line: Line) -> dict[str, Any]:
    if line.data is None:
        raise BadLine(f"the line has {line.end - line.offset} bytes; at most {MAX_LINE} are taken")
    data = line.data.removeprefix(_BOM) if line.offset == 0 else line.data
    if len(data) > SMALL and (parts := count_parts(data, MAX_PARTS)) > MAX_PARTS:
        raise BadLine(f"the line has {parts} lists, objects and strings; at most {MAX_PARTS} are taken")
    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise BadLine(f"the line is not UTF-8: bad byte at {error.start}", code="invalid_json_line") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"the line is not JSON: {error}", code="invalid_json_line") from None
    if not isinstance(value, dict):
        raise BadLine(f"the line is {shown(value)}; it must be a JSON object", code="invalid_json_line")
    return value


def _wrong(
    fields: dict[str, Any], name: str, expected: str, *, path: str | None = None, code: str = "invalid_request"
) -> BadLine:
    path = path or name
    if fields.get(name) is None:
        return BadLine(f"{path} is missing; it must be {expected}", code=code, param=path)
    return BadLine(f"{path} is {shown(fields[name])}; it must be {expected}", code=code, param=path)


def _check_model(named: str, models: Collection[str]) -> None:
    model = named.partition("@")[0]
    if model not in models:
        near = likely(model, models)
        hint = f"; did you mean {shown(near)}?" if near else f"; there are {', '.join(sorted(models)[:10]) or 'none'}"
        raise BadLine(f"there is no model {shown(model)}{hint}", code="model_not_found", param="body.model")


def _hash(text: str) -> int:
    """Keyed by the process, so nobody can make texts that collide."""
    return hash(text) & ((1 << _BITS) - 1)


class _Hashes:
    """Hashes of texts, 4 bytes each, to find those that come twice."""

    def __init__(self) -> None:
        self._buckets = [array("I") for _ in range(1 << _BUCKET_BITS)]

    def add(self, text: str) -> None:
        value = _hash(text)
        self._buckets[value >> 32].append(value & 0xFFFFFFFF)

    def repeated(self, limit: int) -> frozenset[int]:
        """Up to `limit` hashes that came more than once."""
        hashes: set[int] = set()
        for index, bucket in enumerate(self._buckets):
            if len(set(bucket)) == len(bucket):
                continue
            distinct: set[int] = set()
            for value in bucket:
                if value in distinct:
                    hashes.add(index << 32 | value)
                distinct.add(value)
                if len(hashes) >= limit:
                    return frozenset(hashes)
        return frozenset(hashes)


def _repeats(lines: Iterable[Line], url: str, hashes: frozenset[int], limit: int, max_lines: int) -> Iterator[Reason]:
    """The lines whose custom_id, with one of these hashes, an earlier line has; up to `limit`."""
    first: dict[str, int] = {}
    for count, line in enumerate(lines):
        if not limit or count == max_lines:
            return
        try:
            custom_id = request_of(line, url).custom_id
        except BadLine:
            continue
        if _hash(custom_id) not in hashes:
            continue
        if custom_id in first:
            message = f"custom_id {shown(custom_id)} is that of line {first[custom_id]} already; each must be unique"
            limit -= 1
            yield Reason(code="duplicate_custom_id", message=message, line=line.number, param="custom_id")
        else:
            first[custom_id] = line.number


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests from number `first` on (from 0; blank lines do not count). `ends`: for each, the offset behind it."""

    first: int
    requests: Sequence[Request]
    ends: Sequence[int]


def read_requests(
    blobs: Blobs, batch: Batch, first: int, offset: int, limit: int, size: int, ahead: Ahead | None = None
) -> Requests:
    """Up to `limit` requests that have up to `size` bytes, or one. `offset`: where the request `first` begins.
    `ahead`: as of `lines`.

    Blocks. Raises BlobNotFound and OSError; BadLine if the input is not what was checked.
    """
    requests: list[Request] = []
    ends: list[int] = []
    for line in lines(blobs, batch.input_file, offset, ahead=ahead):
        if is_blank(line):
            continue
        if requests and line.end - offset > size:
            break
        requests.append(request_of(line, batch.endpoint))
        ends.append(line.end)
        if len(requests) == limit:
            break
    if not requests:
        raise BadLine(f"it has {first} requests, and had more when it was checked")
    return Requests(first, requests, ends)
