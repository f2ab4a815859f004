"""A span as plain data, the ids of a task's trace, and the spans of a task that has ended.

    caller's span, or none
    └ a request of the gateway
      └ generate <model>              the task, from its submission to its settlement; beside it those of its chunks,
        │                             if it has some
        ├ submit                      ADMIT, and its message's sending
        ├ queue                       until a worker claims it; again after each worker that lost it or gave it back
        ├ attempt                     a worker has it; linked to the attempt before
        │ ├ schedule                  claimed, until the engine has room
        │ ├ prefill                   to its first token here
        │ ├ decode                    to its last token here; events: tokens, preemptions
        │ └ publish                   until its end is in the store
        ├ settle                      FINISH to SETTLE
        └ webhook

Ids are hashes of the task's id, so that spans that are sent twice, or by two processes, are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, Literal, TypeGuard

from producers.contract.record import BROKEN, MAX_NUMBER, MAX_RUNS, RUN_PREFIX, Record, Run, TraceParent
from producers.errors import PenstockError

Value = str | int | float | bool | list[str]
Kind = Literal["internal", "server", "client", "producer", "consumer"]
#: The fields of a record that tell its trace.
TRACE_FIELDS: Final = ("traceparent", "created", "started")
#: The fields that a task's spans are made of: neither its prompt nor its output.
FIELDS: Final = (
    *TRACE_FIELDS,
    *("status", "model", "version", "queue", "tier", "n", "tenant", "origin", "batch", "line", "plain", "result_bytes"),
    *("prompt_tokens", "queued", "first", "finished", "settled", "claims", "deaths", "lost", "given_back"),
    *("reasons", "usage", "error", "retried_from", "shortened", "chunks"),
    *(f"{RUN_PREFIX}{start}" for start in range(1, MAX_RUNS + 1)),
)


@dataclass(frozen=True, slots=True)
class Moment:
    """An event of a span. `at`: ms."""

    name: str
    at: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """Ids are in hexadecimal, times unix ms. `links`: (trace id, span id, why). `error`: its code, if it failed."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start: float
    end: float
    kind: Kind = "internal"
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[Moment, ...] = ()
    links: tuple[tuple[str, str, str], ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskTrace:
    """The trace that a task's spans are in. `parent`: the span of its caller that it is part of, if it has one."""

    trace_id: str
    span_id: str
    parent: TraceParent | None

    @classmethod
    def of(cls, task_id: str, fields: Mapping[str, str]) -> TaskTrace:
        """`fields`: TRACE_FIELDS of its record, as far as it has them."""
        name = f"{task_id} {fields.get('created') or fields.get('started', '')}"
        parent = TraceParent.parse(fields.get("traceparent"))
        return cls(_hashed(name, 16) if parent is None else parent.trace_id, _hashed(name, 8), parent)

    def child(self, name: str) -> str:
        """The id of one of its spans."""
        return _hashed(f"{self.span_id} {name}", 8)


def _hashed(text: str, size: int) -> str:
    """An id of so many bytes, which is never zero."""
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=size).hexdigest()
    return digest if digest.strip("0") else digest[:-1] + "1"


@dataclass(slots=True)
class _Attempt:
    """A worker's start of a task. `end`: ms; `outcome`: `ended`, `died`, or why it was given back."""

    number: int
    run: Run
    end: float
    outcome: str
    entries: int | None = None


def task_spans(record: Record, trace: TaskTrace) -> list[Span]:
    """The spans of a task that has ended. `record` has FIELDS. Broken fields leave spans out.

    Returns none for a record that has no time of its end.
    """
    times = {name: _time(record, name) for name in ("created", "queued", "started", "first", "finished", "settled")}
    end = times["finished"]
    begin = min((at for at in (times["created"], times["started"], end) if at is not None), default=None)
    if end is None or begin is None:
        return []
    last = max(end, times["settled"] or end)
    attempts = list(_attempts(record, end))
    spans = [_root(record, trace, begin, last)]
    common = trace.trace_id, trace.span_id

    def child(name: str, start: float, until: float, kind: Kind = "internal", **attributes: Value) -> None:
        spans.append(
            Span(name.partition(" ")[0], common[0], trace.child(name), common[1], start, until, kind, attributes)
        )

    queue: dict[str, Value] = {"messaging.destination.name": record.fields.get("queue", "")}
    waits_from: float = begin
    if not record.plain and times["created"] is not None and times["queued"] is not None:
        waits_from = max(times["created"], times["queued"])
        child("submit", times["created"], waits_from, "producer", **queue)
    for attempt in attempts:
        if not record.plain or attempt.number > 1:
            child(f"queue {attempt.number}", waits_from, max(waits_from, attempt.run.began), "consumer", **queue)
        spans += _attempt_spans(record, trace, attempt, attempts)
        waits_from = max(waits_from, attempt.end)
    if record.fields.get("chunks"):  # its chunks wait and run
        pass
    elif not attempts or attempts[-1].outcome != "ended":
        child("queue end", waits_from, max(waits_from, end), "consumer", **queue)
    if times["settled"] is not None:
        child("settle", end, last)
    return spans


def _root(record: Record, trace: TaskTrace, begin: float, end: float) -> Span:
    fields = record.fields
    operation = "embeddings" if "result_bytes" in fields else "text_completion"
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.id,
        "penstock.task.id": record.id,
        "penstock.task.status": fields.get("status", ""),
        "penstock.tier": record.tier,
    }
    for name in ("tenant", "version", "origin", "batch", "line", "retried_from"):
        if fields.get(name):
            attributes[f"penstock.{name}"] = fields[name]
    for name in ("claims", "deaths", *(("chunks",) if fields.get("chunks") else ())):
        attributes[f"penstock.{name}"] = _number(record, name)
    if (n := _number(record, "n")) > 1:
        attributes["gen_ai.request.choice.count"] = n
    usage = _json(record, "usage", dict)
    for name, key in (
        ("input_tokens", "prompt_tokens"),
        ("output_tokens", "output_tokens"),
        ("cache_read.input_tokens", "cached_tokens"),
    ):
        if _is_whole(usage.get(key)):
            attributes[f"gen_ai.usage.{name}"] = usage[key]
    if reasons := [reason for reason in _json(record, "reasons", list) if isinstance(reason, str)]:
        attributes["gen_ai.response.finish_reasons"] = reasons
    events = []
    if (first := _time(record, "first")) is not None:
        events.append(Moment("first token", first))
    error = None
    if fields.get("status") == "failed":
        code = _json(record, "error", dict).get("code")
        attributes["error.type"] = error = code if isinstance(code, str) else "unknown"
    return Span(
        f"generate {record.model}",
        trace.trace_id,
        trace.span_id,
        None if trace.parent is None else trace.parent.span_id,
        begin,
        end,
        "consumer" if record.plain else "internal",
        attributes,
        tuple(events),
        error=error,
    )


def _attempts(record: Record, finished: float) -> Iterator[_Attempt]:
    """Its starts in order; those of which workers wrote nothing, as far as their ends were noted."""
    ends: dict[int, tuple[Mapping[str, Any], str]] = {}
    for name in ("lost", "given_back"):
        for entry in _json(record, name, list):
            if isinstance(entry, dict) and _is_whole(start := entry.get("start")):
                ends[start] = entry, str(entry.get("why", "died"))
    runs = record.runs
    numbers = [start for start in range(1, MAX_RUNS + 1) if start in runs or start in ends]
    for start in numbers:
        entry, why = ends.get(start, ({}, "ended"))
        run = runs.get(start)
        if run is None:
            began = entry.get("began")
            if not _is_whole(began):
                continue
            run = Run(str(entry.get("owner", "")), began)
        at, entries = entry.get("at"), entry.get("entries")
        end = at if _is_whole(at) else finished
        yield _Attempt(start, run, max(end, run.began), why, entries if _is_whole(entries) else None)


def _attempt_spans(record: Record, trace: TaskTrace, attempt: _Attempt, attempts: list[_Attempt]) -> Iterator[Span]:
    run, number, end = attempt.run, attempt.number, attempt.end
    attributes: dict[str, Value] = {
        "penstock.worker": run.owner,
        "penstock.attempt": number,
        "penstock.outcome": attempt.outcome,
        "penstock.engine_seconds": run.engine_us / 1e6,
    }
    if attempt.entries is not None:
        attributes["penstock.published_tokens"] = attempt.entries
    before = [other for other in attempts if other.number < number]
    links = tuple(
        (
            trace.trace_id,
            trace.child(f"attempt {other.number}"),
            "failover" if other.outcome == "died" else "given_back",
        )
        for other in before[-1:]
    )
    span_id = trace.child(f"attempt {number}")
    common = trace.trace_id, span_id
    yield Span("attempt", trace.trace_id, span_id, trace.span_id, run.began, end, "internal", attributes, links=links)

    def part(name: str, start: float, until: float, events: list[Moment], **values: Value) -> Span:
        start = min(max(start, run.began), end)
        until = min(max(start, until), end)
        ids = trace.child(f"{name} {number}")
        return Span(name, common[0], ids, common[1], start, until, attributes=values, events=tuple(events))

    if run.step is None:
        yield part("schedule", run.began, end, [])
        return
    yield part("schedule", run.began, run.step, [])
    first = run.marks[0][1] if run.marks else None
    preempted = [Moment("preempted", at, {"penstock.reason": why}) for at, why in run.preempted]
    prefill_end = end if first is None else first
    prompt: dict[str, Value] = {
        "gen_ai.usage.input_tokens": _number(record, "prompt_tokens"),
        "gen_ai.usage.cache_read.input_tokens": run.cached,
    }
    if run.chunks:
        prompt["penstock.chunks"] = run.chunks
    yield part("prefill", run.step, prefill_end, [event for event in preempted if event.at <= prefill_end], **prompt)
    if first is None:
        return
    tokens = [Moment("tokens", at, {"gen_ai.usage.output_tokens": count}) for count, at in run.marks]
    last = max(run.last or first, run.marks[-1][1])
    events = tokens + [event for event in preempted if event.at > prefill_end]
    until = last if attempt.outcome == "ended" else end
    yield part(
        "decode", first, until, sorted(events, key=lambda event: event.at), **{"penstock.preemptions": run.preemptions}
    )
    if attempt.outcome == "ended":
        yield part("publish", last, end, [])


def _time(record: Record, name: str) -> int | None:
    try:
        return record.time(name)
    except PenstockError:
        return None


def _number(record: Record, name: str) -> int:
    try:
        return record.count(name)
    except PenstockError:
        return 0


def _is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value of a record's JSON is a count or a time that a span can hold."""
    return isinstance(value, int) and 0 <= value <= MAX_NUMBER


def _json(record: Record, name: str, kind: type) -> Any:
    """A field's JSON; an empty value of the kind where it has none."""
    try:
        value = record.json(name)
    except (PenstockError, *BROKEN):
        value = None
    return value if isinstance(value, kind) else kind()
