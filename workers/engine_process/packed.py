"""A step's events as bytes, for the ring: arrays of numbers and one text, no object a token.

    record = head, the step's work, courses (JSON, where they changed), segments
    segment = a run of plain events: five numbers each and the text of all; or one other event: numbers, flags, arrays

A plain event has one token, and neither its log probability nor an end: nearly all are plain. Segments keep the order
in which the events came.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final, get_args

from engine.errors import ErrorText, TextError, fields_of
from engine.labels import Entity
from engine.params import FinishReason
from engine.plan import StepWork
from engine.request import Course, Event, TextRow, TokenLogprobs

#: Numbers: segments, bytes of the courses, whether there is work.
_HEAD: Final = struct.Struct("=3q")
_WORK: Final = struct.Struct("=2d6q")
#: Kind, events (of a run) or bytes of the rest, bytes of the text.
_SEGMENT: Final = struct.Struct("=3q")
_RUN, _OTHER = range(2)
#: Request, choice, index, tokens, prompt tokens, cached tokens, discarded tokens, flags, finish reason, bytes of JSON.
_EVENT: Final = struct.Struct("=10q")
_DONE, _REFUSED, _LOGPROBS, _PROMPT, _ROWS = (1 << bit for bit in range(5))
_FINISH: Final = (None, *get_args(FinishReason))
_CODES: Final = {reason: code for code, reason in enumerate(_FINISH)}

#: What a step brought: its work if it had any, (request, course) of those that changed, and (request, event).
Step = tuple[StepWork | None, list[tuple[int, list[Any]]], "list[Run | tuple[int, Event]]"]


class Run:
    """Plain events, as columns."""

    __slots__ = ("choices", "indices", "numbers", "texts", "tokens")

    def __init__(self, columns: list[int], text: str) -> None:
        """`columns`: of each event its request, choice, index, token and the length of its text."""
        self.numbers, self.choices = columns[::5], columns[1::5]
        self.indices, self.tokens = columns[2::5], columns[3::5]
        self.texts: list[str] = []
        at = 0
        for length in columns[4::5]:
            self.texts.append(text[at : at + length])
            at += length


def pack(
    events: Iterable[tuple[int, Event]], work: StepWork | None, courses: Sequence[tuple[int, Course]] = ()
) -> bytes:
    """`events`: with the numbers of their requests, in order."""
    courses_json = json.dumps([(number, _course(course)) for number, course in courses]).encode() if courses else b""
    parts = [b""]
    if work is not None:
        counts = work.prompt_tokens, work.generated, work.tokens, work.context, work.prompts
        parts.append(_WORK.pack(work.ended, work.seconds, work.decodes, *counts))
    parts.append(courses_json)
    segments = 0
    columns: list[int] = []
    texts: list[str] = []
    for number, event in events:
        ids = event.token_ids
        if (
            len(ids) == 1
            and event.finish_reason is None
            and event.logprobs is None
            and event.prompt_logprobs is None
            and not event.done
        ):
            text = event.texts[0]
            columns += (number, event.choice, event.index, ids[0], len(text))
            texts.append(text)
            continue
        if columns:
            parts += _run(columns, texts)
            segments, columns, texts = segments + 1, [], []
        parts += _other(number, event)
        segments += 1
    if columns:
        parts += _run(columns, texts)
        segments += 1
    parts[0] = _HEAD.pack(segments, len(courses_json), work is not None)
    return b"".join(parts)


def unpack(record: bytes | memoryview) -> Step:
    """The reverse of `pack`. Events lack their `request_id`."""
    segments, courses_length, worked = _HEAD.unpack_from(record)
    at, work = _HEAD.size, None
    if worked:
        work = StepWork(*_WORK.unpack_from(record, at))
        at += _WORK.size
    view = memoryview(record)
    courses = json.loads(bytes(view[at : at + courses_length])) if courses_length else []
    at += courses_length
    events: list[Run | tuple[int, Event]] = []
    for _ in range(segments):
        kind, count, text_bytes = _SEGMENT.unpack_from(record, at)
        at += _SEGMENT.size
        if kind == _RUN:
            columns = struct.unpack_from(f"={5 * count}q", record, at)
            at += 40 * count
            events.append(Run(list(columns), _text(view[at : at + text_bytes])))
            at += text_bytes
        else:
            events.append(_read_other(view[at : at + count], _text(view[at + count : at + count + text_bytes])))
            at += count + text_bytes
    return work, courses, events


def _text(data: memoryview) -> str:
    return str(data, "utf-8", "surrogatepass")


def _run(columns: list[int], texts: list[str]) -> tuple[bytes, bytes, bytes]:
    text = "".join(texts).encode("utf-8", "surrogatepass")
    return _SEGMENT.pack(_RUN, len(texts), len(text)), array("q", columns).tobytes(), text


def _other(number: int, event: Event) -> tuple[bytes, bytes, bytes]:
    text = "".join(event.texts).encode("utf-8", "surrogatepass")
    flags = _DONE * event.done | _REFUSED * event.refused
    lists = [array("q", event.token_ids).tobytes(), array("q", map(len, event.texts)).tobytes()]
    extras: dict[str, Any] = {}
    if event.logprobs is not None:
        flags |= _LOGPROBS
        lists.append(_logprobs(event.logprobs))
    if event.prompt_logprobs is not None:
        flags |= _PROMPT
        lists.append(_logprobs(event.prompt_logprobs))
    if event.rows is not None:
        flags |= _ROWS
        lists.append(_rows(event.rows))
        others = {at: _row(row) for at, row in enumerate(event.rows) if not isinstance(row, list)}
        if others:
            extras["rows"] = others
    if event.stop_match is not None:
        extras["stop_match"] = event.stop_match
    if event.error is not None:
        extras |= {"error": event.error, "fields": fields_of(event.error), "param": event.param, "code": event.code}
    extras_json = json.dumps(extras).encode() if extras else b""
    counts = (
        event.prompt_tokens,
        event.cached_tokens,
        event.discarded,
        flags,
        _CODES[event.finish_reason],
        len(extras_json),
    )
    head = _EVENT.pack(number, event.choice, event.index, len(event.token_ids), *counts)
    body = b"".join((head, *lists, extras_json))
    return _SEGMENT.pack(_OTHER, len(body), len(text)), body, text


def _read_other(body: memoryview, text: str) -> tuple[int, Event]:
    number, choice, index, count, prompt, cached, discarded, flags, finish, extras_length = _EVENT.unpack_from(body)
    reader = _Reader(body[_EVENT.size :])
    event = Event("", choice, index, reader.integers(count))
    start = 0
    for length in reader.integers(count):
        event.texts.append(text[start : start + length])
        start += length
    event.finish_reason = _FINISH[finish]
    event.prompt_tokens, event.cached_tokens, event.discarded = prompt, cached, discarded
    event.done, event.refused = bool(flags & _DONE), bool(flags & _REFUSED)
    if flags & _LOGPROBS:
        event.logprobs = [entry for entry in reader.logprobs() if entry is not None]
    if flags & _PROMPT:
        event.prompt_logprobs = reader.logprobs()
    if flags & _ROWS:
        event.rows = [*reader.rows()]
    if extras_length:
        extras = json.loads(reader.remainder())
        event.stop_match = extras.get("stop_match")
        for at, (kind, values) in extras.get("rows", {}).items():
            assert event.rows is not None
            event.rows[int(at)] = TextError(*values) if kind == "error" else tuple(Entity(*part) for part in values)
        if "error" in extras:
            fields = extras["fields"]
            event.error = ErrorText.read(extras["error"], fields) if fields else extras["error"]
            event.param, event.code = extras["param"], extras["code"]
    return number, event


def _logprobs(entries: Sequence[TokenLogprobs | None]) -> bytes:
    """Their number; token ids, -1 for none; log probabilities; numbers of likely tokens; their ids; their values."""
    present = [entry for entry in entries if entry is not None]
    ids = array("q", [len(entries), *(-1 if entry is None else entry.token_id for entry in entries)])
    values = array("d", [math.nan if entry is None else entry.logprob for entry in entries])
    counts = array("q", [0 if entry is None else len(entry.top) for entry in entries])
    top_ids = array("q", [token for entry in present for token, _ in entry.top])
    top_values = array("d", [value for entry in present for _, value in entry.top])
    return b"".join(column.tobytes() for column in (ids, values, counts, top_ids, top_values))


def _row(row: tuple[Entity, ...] | TextError) -> tuple[str, list[Any]]:
    """A row that is no list of numbers, for JSON."""
    if isinstance(row, TextError):
        return "error", [row.code, row.message]
    return "entities", [dataclasses.astuple(entity) for entity in row]


def _rows(rows: Sequence[TextRow | TextError]) -> bytes:
    """Their number; the length of each, 0 for one that is no list of numbers; the numbers of all."""
    kept = [row if isinstance(row, list) else [] for row in rows]
    lengths = array("q", [len(kept), *map(len, kept)])
    return lengths.tobytes() + array("d", [value for row in kept for value in row]).tobytes()


class _Reader:
    """Reads arrays one after another."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def integers(self, count: int) -> list[int]:
        return self._read("q", count)

    def _read(self, code: str, count: int) -> list[Any]:
        values = struct.unpack_from(f"={count}{code}", self._data, self._at)
        self._at += 8 * count
        return list(values)

    def logprobs(self) -> list[TokenLogprobs | None]:
        (count,) = self.integers(1)
        ids, values, counts = self.integers(count), self._read("d", count), self.integers(count)
        total = sum(counts)
        pairs = list(zip(self.integers(total), self._read("d", total), strict=True))
        entries: list[TokenLogprobs | None] = []
        start = 0
        for token_id, value, top in zip(ids, values, counts, strict=True):
            likely = tuple(pairs[start : start + top])
            entries.append(None if token_id < 0 else TokenLogprobs(token_id, value, likely))
            start += top
        return entries

    def rows(self) -> Iterable[list[float]]:
        (count,) = self.integers(1)
        lengths = self.integers(count)
        values = self._read("d", sum(lengths))
        start = 0
        for length in lengths:
            yield values[start : start + length]
            start += length

    def remainder(self) -> bytes:
        return bytes(self._data[self._at :])


def _course(course: Course) -> list[Any]:
    counts = course.cached_tokens, course.running, course.preemptions, course.preempted
    times = course.engine_s, course.joules, course.put_off_s
    return [course.began_at, *counts, course.chunks, *times, course.computed, course.searched]


def update_course(course: Course, values: list[Any]) -> None:
    """Let a course be what `pack` was told of it."""
    course.began_at, course.cached_tokens, course.running, course.preemptions, preempted, *work = values
    course.preempted = [(at, why) for at, why in preempted]
    course.chunks, course.engine_s, course.joules, course.put_off_s, course.computed, course.searched = work
