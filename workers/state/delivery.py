"""A delivery: one message in this worker's hands, from FETCH until ACK or BACK; and the life that it belongs to.

A worker whose lease lapsed is dead to everyone else: its deliveries go to others, its claims may be taken. It must not
act on them any more, so it begins a new life (`Incarnation`) under a new name, with nothing in its hands.

The books alone move a delivery's stage, only forward, and under their lock (`workers.flow.deliveries`). So of all
threads that want to end it one does, and the others find that they come too late:

    stage       reached when                                                        moved by
    FETCHED     it was fetched; also while it is claimed and waits                  intake
    RUNNING     the engine is about to have it                                      claimer
    STOPPED     the engine has failed it: Celery tries it again, or it still ends   publisher
    ENDED       its end is written, or it is on its way back or to the dead letters any thread
    PUT_DOWN    ACK or BACK is on its way, or its incarnation is over               any thread

Other fields have one writer: `keeper` the main thread (of a native message intake, of a condemned one intake, then
claimer), `job` and `revoked` the main thread, `cancelled` control, `deadline` claimer, then housekeeper; all others
claimer until RUNNING, then publisher.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, Final

from celery.worker.state import task_ready

from engine.request import Course, Event
from producers.connection.logs import subject
from producers.contract.record import Record, Run, TraceParent, trace_id

#: The number of tokens is noted with its time at the first, and whenever they are so many times as many.
MARK_RATIO: Final = 4
#: Time (s) after which a record is sent again what the engine did with its task, while tokens come.
NOTE_S: Final = 1.0


@dataclass(slots=True, eq=False)
class Incarnation:
    """One life of a worker. Its name, the worker's and a random suffix, is never used again."""

    worker: str
    id: str = field(init=False)
    begun: bool = False
    """The lease was taken."""
    over: bool = False
    """It is gone."""
    lost: dict[str, int] = field(default_factory=dict)
    """UUID -> KV tokens, of deliveries that the store reported as another's before this life was known to be over."""

    def __post_init__(self) -> None:
        self.id = f"{self.worker}.{secrets.token_hex(6)}"


class Stage(IntEnum):
    """The progress of a delivery."""

    FETCHED = auto()
    RUNNING = auto()
    STOPPED = auto()
    ENDED = auto()
    PUT_DOWN = auto()


class Keeper(Enum):
    """Who acknowledges a delivery, and may give it back."""

    CONSUMER = auto()
    """Celery's consumer: when its channel closes, the message goes back."""
    THREAD = auto()
    """Celery, for an ordinary task that a thread of the pool runs beside the engine."""
    FLOW = auto()
    """This flow, once the task is settled. Celery's acknowledgement or rejection has no effect."""


@dataclass(slots=True)
class Job:
    """Celery's side of a delivery: the stock tracer with its arguments, and its callback."""

    tracer: Callable[..., Any]
    args: tuple[Any, ...]
    on_done: Callable[..., Any]
    request: Any
    """celery.worker.request.Request; it holds us by a weak reference only, we hold it by a strong one."""

    @property
    def headers(self) -> dict[str, Any]:
        """The message's headers, args and kwargs, as Celery keeps them for the tracer."""
        headers: dict[str, Any] = self.args[2]
        return headers


@dataclass(slots=True)
class Native:
    """The message of a task in which Celery has no part (`producers.contract.message.is_native`). Celery's side of it
    is made where somebody looks at it (`workers.flow.monitors`)."""

    payload: dict[str, Any]
    priority: int
    """Celery's, of the list that it came in."""
    at: float = field(default_factory=time.monotonic)
    """When it was taken (monotonic)."""


@dataclass(slots=True)
class Plain:
    """A plain Celery message's request: the fields of its record to be made, and the error (JSON) if it is no task."""

    fields: dict[str, str | int]
    error: str | None = None
    level: int = 0
    """The level that its worker's release must have (`producers.contract.levels`); the next one, if this worker cannot
    read it."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Delivery:
    """The delivery's UUID is also the name of its claim, and of the engine's request."""

    uuid: str
    task_id: str
    incarnation: Incarnation
    returned: bool = False
    """Workers that had its message died, and the broker counts that against it."""
    condemned: bool = False
    """Its workers died before they could claim it, too often."""
    stage: Stage = Stage.FETCHED
    keeper: Keeper = Keeper.CONSUMER
    plain: Plain | None = None
    native: Native | None = None
    job: Job | None = None
    """Celery's side, where it has one by now."""
    record: Record | None = None
    base: list[int] = field(default_factory=list)
    """Per choice, the index at which this worker took over."""
    entries: list[list[str]] = field(default_factory=list)
    """Per choice, the stream entries made here, from `base` on: a failover may ask for the last ones again."""
    prompt_ids: list[int] = field(default_factory=list)
    prompt: list[str] = field(default_factory=list)
    """The stream entries of the prompt's log probabilities, if this worker made them."""
    scored: bool = False
    """They are in the stream, or on their way: tokens come after them."""
    selects: bool = False
    """The engine makes more choices than are published, all at the end."""
    pending: list[Event] = field(default_factory=list)
    """The engine's events of those choices, until all have come."""
    discarded: int = 0
    """Tokens of those that are not published."""
    reasons: list[str | None] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    max_output: int = 0
    """Output tokens of a choice that it may make, or is assumed to; 0: it generates nothing."""
    width: int = 1
    """Choices that the engine makes."""
    claimed_at: float | None = None
    """When it was claimed (monotonic), until its first token is published. None if another worker began it."""
    began_at: float = 0.0
    """When it was claimed (monotonic)."""
    began: int = 0
    """When it was claimed by the store's clock (ms), as in its record; 0 if not known."""
    start: int = 0
    """Number of this start, from 1."""
    course: Course = field(default_factory=Course)
    """What the engine did with it."""
    last_at: float | None = None
    """When its last token came (monotonic)."""
    token_at: list[float] = field(default_factory=list)
    """The same, per choice; 0: none has come to this worker."""
    made: int = 0
    """Tokens of all choices that came to this worker."""
    marks: list[tuple[int, float]] = field(default_factory=list)
    """How many had come, and when (monotonic), each MARK_RATIO times as many as before."""
    reported_preemptions: int | None = None
    """Preemptions that its record has; None: it has nothing of this start."""
    reported_at: float = 0.0
    """When its record was last sent what was done (monotonic)."""
    deadline: float | None = None
    """When it has to end, by this machine's monotonic clock."""
    cancelled: bool = False
    """A cancel came by the control channel; maybe before it ran."""
    revoked: str = ""
    """The final status of a task that Celery revoked; Celery has told the result backend. Empty: not revoked."""

    @property
    def ended(self) -> bool:
        """Whatever else would end it comes too late."""
        return self.stage >= Stage.ENDED

    @property
    def put_down(self) -> bool:
        """Whatever comes for it now is too late."""
        return self.stage is Stage.PUT_DOWN

    def begin(self, record: Record, nexts: list[int]) -> None:
        """Notes the granted claim: this worker appends from `nexts` on."""
        self.record = record
        self.base = nexts
        self.entries = [[] for _ in nexts]
        self.scored = record.scored
        self.reasons = [None] * len(nexts)
        self.token_at = [0.0] * len(nexts)
        self.began_at = time.monotonic()
        self.claimed_at = None if any(nexts) else self.began_at
        self.began, self.start = _whole(record.fields.get("began")), _whole(record.fields.get("claims"))
        self.reported_preemptions = None

    def note_tokens(self, count: int, at: float) -> None:
        """Notes that so many tokens came (monotonic)."""
        self.made += count
        self.last_at = at
        if not self.marks or self.made >= MARK_RATIO * self.marks[-1][0]:
            self.marks.append((self.made, at))

    def run_update(self, now: float) -> str:
        """Returns `run` if the record lacks the first step's begin or some preemptions, or has what was done until
        NOTE_S ago (now: monotonic); else "". What a killed worker did since is in no record."""
        preemptions = self.course.preemptions
        if self.course.began_at is None:
            return ""
        if self.reported_preemptions == preemptions and now - self.reported_at < NOTE_S:
            return ""
        self.reported_preemptions, self.reported_at = preemptions, now
        return self.run()

    def run(self) -> str:
        """Returns what the engine did with it, as the scripts take it; empty if it was not claimed."""
        if self.record is None or not self.began:
            return ""

        def ms(at: float) -> int:
            return self.began + round(1000 * (at - self.began_at))

        course = self.course
        step, last = (None if at is None else ms(at) for at in (course.began_at, self.last_at))
        preempted = [(ms(at), why) for at, why in course.preempted]
        marks = [(tokens, ms(at)) for tokens, at in self.marks]
        counts = course.cached_tokens, course.preemptions, preempted, course.chunks, marks
        shares = round(1e6 * course.engine_s), round(1e6 * course.joules)
        return Run(self.incarnation.id, self.began, step, last, *counts, *shares).script_argument(self.start)

    @property
    def waits(self) -> str | None:
        """Why it waits in the engine: `not_begun`, or its preemption (`engine.request.Course`); None if it runs."""
        course = self.course
        if course.running:
            return None
        return course.preempted[-1][1] if course.preempted else "not_begun"

    @property
    def subject(self) -> dict[str, str]:
        """The `extra` of a log line about it (`producers.connection.logs`)."""
        fields = self._fields
        return subject(self.task_id, trace_id(fields.get("traceparent")), str(fields.get("tenant") or ""))

    @property
    def traced(self) -> bool:
        """Whether its caller named a trace that is recorded."""
        parent = TraceParent.parse(self._fields.get("traceparent"))
        return parent is not None and parent.sampled

    @property
    def _fields(self) -> Mapping[str, str | int]:
        return self.record.fields if self.record else self.plain.fields if self.plain else {}

    @property
    def complete(self) -> bool:
        """All of its choices have ended by themselves."""
        return all(self.reasons)

    def next_index(self, choice: int) -> int:
        """The next token's index, as far as this worker knows."""
        return self.base[choice] + len(self.entries[choice])

    @property
    def generated(self) -> int:
        """Tokens that were generated for it, by all of its workers, also those that are not published."""
        total = sum(base + len(entries) for base, entries in zip(self.base, self.entries, strict=True))
        return total + self.discarded

    @property
    def unpublished(self) -> int:
        """Tokens that its engine made of choices that are published at the end alone, and that no end has told."""
        return self.course.searched + sum(len(event.token_ids) for event in self.pending)

    @property
    def used(self) -> int:
        """KV tokens of all that was computed for it: the prompt once, the output of each choice."""
        return self.prompt_tokens + self.generated

    def terminate(self, signal: Any = None) -> None:
        """celery.worker.request calls this on what `apply_async` returned; `terminate_job` has done the work."""


def _whole(value: str | None) -> int:
    """Parses a count or time of a record; 0 if it has none."""
    return int(value) if value is not None and value.isdecimal() else 0


def forget(request: Any) -> None:
    """Removes a request from Celery's books: it is not active any more, and nobody needs its message."""
    if not request.acknowledged:
        task_ready(request)
        request.acknowledge()
