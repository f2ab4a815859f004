"""The record of a task: the hash `penstock:task:<id>`.

| field | what it holds |
| --- | --- |
| `v` | 1, the format |
| `status` | submitting, queued, in_progress, completed, failed, cancelled, incomplete |
| `task` | the task as accepted (JSON, see `producers.contract.task`) |
| `model`, `queue`, `tier`, `n` | name, version's queue, service tier, choices |
| `level` | the level of its worker's release that it needs, if above those of all (`producers.contract.levels`) |
| `release` | the release of Penstock that made the record (`producers.release`) |
| `adapter` | the version of the adapter that runs it, if its model is one |
| `encoding` | digest of the tokenizer's and template's files of that version, which make its token ids |
| `alias`, `generation` | what led to its version: an alias, and the generation of the model's routing |
| `drawn` | where the split decided between versions, or there is none: no name, rule, or other task of its request. 8 \
hexadecimal digits of the key that was drawn by (`routing.draw_of`); 1 without one |
| `form` | which form its outputs have, if any: `json_schema`, `regex`, `grammar`, `choice` |
| `named` | the alias or version that it named itself, if it did; a retry and a replay name it again |
| `version`, `fingerprint` | the version that runs it; the engine fingerprint of the pool that started it last |
| `tenant`, `order_key` | the task's tenant and order key, if it names them |
| `key` | the id of the API key that submitted it, where the gateway asked for one |
| `reserved` | what accounts were charged for it until its end (JSON, see `producers.store.usage.limits`) |
| `result_bytes` | of a task that generates nothing: the bytes that its result takes; of a parent: and its texts |
| `chunks`, `texts` | of a parent (`producers.store.chunks`): its chunks; its texts, which `task` lacks |
| `written`, `written_at` | of a parent: chunks whose records are made; server time (ms) of the last of them |
| `tidied` | of a parent that has ended: chunks that are cancelled, or had ended before |
| `parent`, `chunk` | of a chunk: its parent's id; its number from 0 |
| `offset`, `texts` | of a chunk: the number of its first text among its parent's, from 0; how many it has |
| `max_output` | most output tokens of a choice, where a budget had less left than the task may make |
| `prompt_tokens`, `tokens` | prompt length (for a text, once a worker has counted it); KV tokens that it may need |
| `began` | server time (ms) of its last start |
| `run:<start>` | what a worker's engine did with it (JSON, see `Run`), for the first 32 starts |
| `created`, `queued`, `started`, `first`, `finished`, `settled` | server times (ms); `first`: of the first token |
| `deadline`, `ttl` | server time (ms); seconds for which the settled record is kept |
| `waits` | while it waits: that it is counted, and as what (`producers.store.waiting`) |
| `nonce` | id of the submit that made the record |
| `origin` | `task` (client, /v1/tasks), `response` (background), `batch`, `chunk`, `shadow`; else its caller waits |
| `batch`, `line` | the batch's id, and the line's number from 0; whatever makes the record final counts it there |
| `idempotency` | key of the entry of the submit's Idempotency-Key (`producers.store.idempotency`) |
| `metadata` | the task's metadata (JSON), if it has some |
| `shortened` | overload shortened its outputs (JSON): `to` so many tokens, `from` the `max_tokens` that it asked for |
| `shadow` | the version that gets a copy of it, of a task that is a sample (`producers.store.shadows`) |
| `shadow_of`, `paired` | of such a copy: the task that it copies; 1: it was compared |
| `scored` | of a task that scores another one's output: tokens of that, the last ones of its prompt |
| `retried_from` | id of the task that this one repeats |
| `webhook` | the task's own webhook (JSON: url, events) |
| `webhook_secret` | its secret, as `producers.contract.sealing` stores it; absent: the tenant's own is used |
| `rows` | names of the outbox's rows for its events, with spaces between |
| `reply` | where the reply to the message that made it goes (JSON, see `producers.sources.messages.replies`) |
| `traceparent` | the trace of its caller that it belongs to (W3C Trace Context, w3.org/TR/trace-context) |
| `response` | of a response (`/v1/responses`): constant fields of its JSON, and its conversation |
| `calls` | what tells calls from text in its output (JSON, `producers.gateway.openai.call_formats.CallSyntax`) |
| `reasoning` | what tells its reasoning (JSON, `producers.gateway.openai.reasoning.ReasoningSyntax`) |
| `warning` | of a batch's line: what of its request is not followed, as the answer to a caller says in a header |
| `plain` | 1: made at the claim of a plain Celery message |
| `cancel` | server time (ms) at which a cancel was accepted |
| `claim`, `owner` | the delivery that holds it, and its worker's incarnation; both until SETTLE |
| `restored` | 1: it was restored from a backup before it had ended |
| `feedback` | the score that its caller gave it, from 0 to 1 (`producers.store.feedback`) |
| `letter` | why its message is kept as a dead letter, from SETTLE on: a task that was given up, or Celery's side was |
| `kept` | the bytes that count as its tenant's, and from SETTLE on until when (unix s): `<bytes> <end>` |
| `followers` | until SETTLE: processes that follow it, with spaces between (`keys.process_channel`) |
| `deaths`, `claims` | number of owners that died holding it; number of starts |
| `lost` | the first 32 of those owners (JSON): incarnation, time of notice, entries then, the start and its time |
| `given_back` | the first 32 times that a worker gave it back (JSON): as `lost`, and why |
| `stuck`, `mark` | number of owners that died since its last new entry; the stream's length at its last start |
| `next:<choice>` | index of the choice's next token |
| `prompt` | stream entries that hold the prompt's log probabilities, before token 0 |
| `again` | tokens of prompt and output that later workers took up from earlier ones, once for each such start |
| `discarded` | tokens made for candidates of `best_of`, and for beams, that are not among the choices |
| `end` | the final status; the stream has its terminal entry |
| `reasons`, `usage`, `error` | JSON: a finish reason per choice; token counts; `{code, message, param}` or null |
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, cast, get_args

from engine.errors import ErrorText, fields_of
from engine.params import MAX_CHOICES
from producers.connection.script import text
from producers.contract import keys
from producers.errors import BrokenRecord

#: How a task came: by `/v1/tasks` or the client; by OpenAI's endpoints, whose caller waits; as a response in the
#: background; as a line of a batch; as a plain Celery message.
Kind = Literal["task", "request", "response", "batch", "celery"]
RUN_PREFIX: Final = "run:"
#: Starts of a task that are written; later ones are not.
MAX_RUNS: Final = 32
FINAL: Final = frozenset({"completed", "failed", "cancelled", "incomplete"})
STATUSES: Final = FINAL | {"submitting", "queued", "in_progress"}
#: Larger numbers are no times, nor counts: views could not hold them.
MAX_NUMBER: Final = 2**53
#: Exceptions by which a field shows that it is none: no number, no JSON, of another shape, too deep.
BROKEN: Final = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)
#: Made once: `json.dumps` makes one for each call that is given separators.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
#: version "-" trace id "-" parent id "-" flags; a later version may add more after another "-".
_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]{0,200})?"
)


@dataclass(frozen=True, slots=True)
class Run:
    """Times are server milliseconds."""

    owner: str
    """The worker's incarnation."""
    began: int
    """Time of the claim."""
    step: int | None = None
    """Begin of the first step that computed some of it; None: the engine had no room for it until the end."""
    last: int | None = None
    """Time of the last step that made a token of it."""
    cached: int = 0
    """Prompt tokens that the prefix cache had at that first step."""
    preemptions: int = 0
    preempted: list[tuple[int, str]] = field(default_factory=list)
    """When and why, of the first ones (`engine.request.Course`)."""
    chunks: int = 0
    """Steps that computed some of its prompt."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """How many tokens this start had made, of all choices, and when: at its first, and then about whenever they were
    four times as many."""
    engine_us: int = 0
    """The engine's time (microseconds) for it: its part of that of each step, by tokens."""
    energy_uj: int = 0
    """The same part of what the device drew in these steps (microjoules); 0 where no meter tells."""

    def script_argument(self, start: int) -> str:
        """The scripts' arguments: the start's number from 1, and the field's JSON. Empty for a start past MOST.

        Releases without `energy_uj` read `engine_us`: scripts as the last number, programs as the tenth. So it stands
        on both sides of `energy_uj`."""
        if not 1 <= start <= MAX_RUNS:
            return ""
        values = [getattr(self, name) for name in _RUN]
        return f"{start} {_ENCODER.encode([*values, self.engine_us] if self.energy_uj else values[:-1])}"

    @classmethod
    def parse(cls, raw: str) -> Run:
        """Raises ValueError or TypeError for an unreadable field."""
        owner, began, step, last, cached, preemptions, preempted, *remainder = json.loads(raw)
        # Earlier releases: nothing, or `engine_us` alone.
        chunks, raw_marks, engine_us = (0, [], *remainder, 0)[:3] if len(remainder) < 2 else remainder[:3]
        energy_uj = remainder[3] if len(remainder) == 5 else 0
        step, last = (None if at is None else int(at) for at in (step, last))
        preemption_list = [(int(at), str(why)) for at, why in preempted]
        marks = [(int(tokens), int(at)) for tokens, at in raw_marks]
        numbers = [began, step or 0, last or 0, cached, preemptions, chunks, engine_us, energy_uj]
        numbers += [at for at, _ in preemption_list] + [number for mark in marks for number in mark]
        if any(abs(int(number)) > 2**53 for number in numbers):
            raise ValueError("a number is too large")
        counts = int(cached), int(preemptions), preemption_list, int(chunks), marks, int(engine_us), int(energy_uj)
        return cls(str(owner), int(began), step, last, *counts)


#: The fields of a Run, in the order of its JSON.
_RUN: Final = tuple(entry.name for entry in fields(Run))


@dataclass(frozen=True, slots=True)
class Record:
    """A parsed record. Times are server milliseconds."""

    id: str
    fields: Mapping[str, str]

    @classmethod
    def parse(cls, task_id: str, raw: Mapping[Any, Any]) -> Record:
        """Raises BrokenRecord for a field that is not text."""
        texts: dict[str, str] = {}
        field = ""
        try:
            for name, value in raw.items():
                field = name.decode(errors="backslashreplace") if isinstance(name, bytes) else name
                texts[field] = text(value)
        except BROKEN as error:
            raise BrokenRecord(task_id, field) from error
        return cls(task_id, texts)

    @property
    def key(self) -> str:
        return keys.task(self.id)

    @property
    def status(self) -> str:
        """The status that callers see: a `submitting` task counts as queued. Raises BrokenRecord for an unknown one."""
        status = self.fields.get("status", "")
        if status not in STATUSES:
            raise BrokenRecord(self.id, "status")
        return "queued" if status == "submitting" else status

    @property
    def final(self) -> bool:
        return self.status in FINAL

    @property
    def task(self) -> dict[str, Any]:
        """The task, which may be any JSON. Raises BrokenRecord if it is missing."""
        task: dict[str, Any] = self.json("task")
        if "task" not in self.fields:
            raise BrokenRecord(self.id, "task")
        return task

    @property
    def model(self) -> str:
        return self.fields.get("model", "")

    @property
    def versioned_model(self) -> str:
        """The name of the version that it goes to, `model@version`, of an adapter's the base's; else its model."""
        base = self.fields.get("queue", "").removeprefix(keys.model_queue("")).rpartition("@")[0]
        version = self.fields.get("version")
        return f"{base or self.model}@{version}" if version else self.model

    @property
    def tier(self) -> str:
        return self.fields.get("tier", "default")

    @property
    def n(self) -> int:
        """Number of choices. Raises BrokenRecord for more than a task may have: such lists would fill the memory."""
        n = self.count("n", 1)
        if n > MAX_CHOICES:
            raise BrokenRecord(self.id, "n")
        return n

    @property
    def width(self) -> int:
        """Number of choices that are generated, of which `n` are returned. Raises BrokenRecord."""
        task: Any = self.task
        with _named(self.id, "task"):
            return int(task.get("beam_width") or task.get("best_of") or self.n)

    @property
    def deaths(self) -> int:
        return self.count("deaths")

    @property
    def stuck(self) -> int:
        return self.count("stuck")

    @property
    def nexts(self) -> list[int]:
        """The next token index of each choice."""
        return [self.count(f"next:{c}") for c in range(self.n)]

    @property
    def scored(self) -> bool:
        """Whether the stream has the prompt's log probabilities."""
        return "prompt" in self.fields

    @property
    def kind(self) -> Kind:
        """The way by which it came."""
        if self.plain:
            return "celery"
        origin = self.fields.get("origin", "request")
        return cast(Kind, origin) if origin in get_args(Kind) else "request"

    @property
    def chunks(self) -> int:
        """Number of chunks of a parent (`producers.store.chunks`); 0 for any other task."""
        return self.count("chunks")

    @property
    def plain(self) -> bool:
        return "plain" in self.fields

    @property
    def cancel_accepted(self) -> bool:
        return "cancel" in self.fields

    @property
    def runs(self) -> dict[int, Run]:
        """Its starts by number, in order, as far as their workers wrote them. Unreadable fields are left out."""
        runs: dict[int, Run] = {}
        for name, value in self.fields.items():
            with suppress(*BROKEN):
                if name.startswith(RUN_PREFIX):
                    runs[int(name.removeprefix(RUN_PREFIX))] = Run.parse(value)
        return dict(sorted(runs.items()))

    @property
    def first_step(self) -> int | None:
        """Time at which the engine began its first step, ms; None if no worker wrote it."""
        return min((run.step for run in self.runs.values() if run.step is not None), default=None)

    @property
    def engine_seconds(self) -> float | None:
        """The engine's time for it, s, as far as its workers wrote it; None if none did."""
        runs = self.runs
        return sum(run.engine_us for run in runs.values()) / 1e6 if runs else None

    @property
    def joules(self) -> float | None:
        """The energy that devices drew for it, as far as its workers measured it; None if none did."""
        return sum(run.energy_uj for run in self.runs.values()) / 1e6 or None

    def lost_ms(self, start: int, began: int) -> dict[str, int]:
        """Time (ms) from the last that was noted of each earlier start to the next one's claim: under `failover` where
        its worker died, else under `handover`. `start`, `began`: the number and the claim of the present one."""
        lost: Any = None
        with suppress(BrokenRecord):
            lost = self.json("lost")
        died = (
            {entry.get("start") for entry in lost or () if isinstance(entry, dict)} if isinstance(lost, list) else set()
        )
        runs = {number: run for number, run in self.runs.items() if number < start}
        claims = [*(run.began for run in runs.values()), began][1:]
        times = {"failover": 0, "handover": 0}
        for (number, run), claim in zip(runs.items(), claims, strict=True):
            last = max(run.began, run.step or 0, run.last or 0, *(at for _, at in run.marks))
            times["failover" if number in died else "handover"] += max(0, claim - last)
        return times

    @property
    def last_token(self) -> int | None:
        """Time of its last token, ms, as far as its workers wrote it: a worker does at the end of its start."""
        return max((run.last for run in self.runs.values() if run.last is not None), default=None)

    @property
    def metadata(self) -> dict[str, str]:
        """The task's metadata. A refused plain Celery task's record may hold any JSON, so its shape is checked."""
        metadata: Any = self.json("metadata")
        if metadata is None and "task" in self.fields:  # of a plain Celery task, or submitted by an earlier release
            task: Any = self.task
            metadata = task.get("metadata") if isinstance(task, dict) else None
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            return {}
        return metadata

    def time(self, name: str) -> int | None:
        """`created`, `queued`, `started`, `first`, `finished`, `settled` or `deadline`, in ms."""
        return self.count(name) if self.fields.get(name) else None

    def count(self, name: str, default: int | None = 0) -> int:
        """A number; the default if it is absent. Raises BrokenRecord if it is unreadable or above 2^53."""
        try:
            number = int(self.fields.get(name, default))  # type: ignore[arg-type]
        except BROKEN as error:
            raise BrokenRecord(self.id, name) from error
        if abs(number) > MAX_NUMBER:
            raise BrokenRecord(self.id, name)
        return number

    def json(self, name: str) -> Any:
        """`reasons`, `usage`, `error`, `lost`, `metadata`, `shortened` or `webhook`; None where absent. Raises
        BrokenRecord for what is no JSON, or could not be written as JSON again."""
        value = self.fields.get(name)
        with _named(self.id, name):
            parsed = json.loads(value, parse_constant=_finite, parse_float=_finite) if value else None
            if value and "\\ud" in value.lower():
                json.dumps(parsed, ensure_ascii=False).encode()  # half of a character is nothing that could be sent
            return read_error(parsed) if name == "error" else parsed


@contextmanager
def _named(task_id: str, name: str) -> Iterator[None]:
    """Tell which field was being read. Raises BrokenRecord."""
    try:
        yield
    except BROKEN as error:
        raise error if isinstance(error, BrokenRecord) else BrokenRecord(task_id, name) from error


def _finite(literal: str) -> float:
    if not math.isfinite(number := float(literal)):
        raise ValueError(literal)
    return number


def error_json(code: str, message: str, param: str | None = None) -> str:
    """A record's `error` field. Its `fields` are those that the message names, if it is an ErrorText."""
    fields = fields_of(message)
    return json.dumps({"code": code, "message": message, "param": param} | ({"fields": fields} if fields else {}))


def read_error(stored: Any) -> Any:
    """The error in a record or a terminal entry: with an ErrorText as its message, in place of `fields`."""
    if not isinstance(stored, dict) or not isinstance(stored.get("message"), str):
        return stored
    error = {name: value for name, value in stored.items() if name != "fields"}
    return error | {"message": ErrorText.read(stored["message"], stored.get("fields"))}


# ---- the trace of a task's caller ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A caller's span: trace id and span id in hexadecimal, and whether the caller has it recorded."""

    trace_id: str
    span_id: str
    sampled: bool

    @classmethod
    def parse(cls, traceparent: Any) -> TraceParent | None:
        """None for a `traceparent` that must be ignored by the specification."""
        match = _TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
        if match is None or (match[1] == "00" and match[5] is not None):
            return None
        return cls(match[2], match[3], bool(int(match[4], 16) & 1))

    def header(self) -> str:
        """The inverse of `parse`."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"


def trace_id(traceparent: Any) -> str | None:
    """The trace of a `traceparent`; None for one that must be ignored."""
    parent = TraceParent.parse(traceparent)
    return None if parent is None else parent.trace_id


def trace_fields(traceparent: Any) -> dict[str, str]:
    """The record's fields for a caller's `traceparent`: none for a bad one, since tracing fails no task."""
    return {} if trace_id(traceparent) is None else {"traceparent": traceparent}
