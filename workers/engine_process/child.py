"""The engine's process: loads the model, runs the engine, and tells the worker what it made.

    main thread     the worker's calls: submit, abort, adapters, close
    engine          steps; after each, its events go into the ring
    beat            every BEAT_S: shows that the process runs, and sends what changed between steps
    adapters        loads one at a time, since that takes seconds

It ignores the signals that end a worker, which are the worker's, and dies with it: the kernel sees to that.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import logging
import os
import pickle
import queue
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from setproctitle import setproctitle

from engine.errors import EngineClosedError, EngineError, RequestError, brief
from engine.plan import StepWork
from engine.request import Course, Event, Request
from workers.engine_process.packed import pack
from workers.engine_process.ring import Ring
from workers.errors import Refused
from workers.processes.guard import PR_SET_PDEATHSIG

if TYPE_CHECKING:
    from workers.state.engine import ServedEngine

logger = logging.getLogger(__name__)

#: Time (s) between two signs of life, and at most between two reports of statistics while steps run.
BEAT_S: Final = 0.25
#: Time (s) after which it is told again what steps have spent on the requests that run.
COURSES_S: Final = 1.0
#: The most sequences that are reported by the blocks that they hold.
LARGEST: Final = 64
#: Before each call of the worker: its length.
LENGTH: Final = struct.Struct("=I")


class Kind(IntEnum):
    """The kind of a record of the ring: its first byte."""

    STEP = 1
    STATUS = 2
    READY = 3
    REFUSED = 4
    ANSWER = 5
    LOST = 6


def run(ring: Ring, calls: socket.socket, parent: int, name: str) -> None:
    """The life of the process, after the fork, on its only thread. `name`: the worker's."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it ended before the call
    setproctitle(f"penstock: engine of {name}")
    threading.excepthook = _thread_died
    Child(ring, calls).run()


def _thread_died(args: Any) -> None:
    """An engine that lacks a thread cannot go on."""
    name = args.thread.name if args.thread else "a thread"
    logger.critical("%s died", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))
    logging.shutdown()
    os._exit(os.EX_SOFTWARE)


class _NotedCourse(Course):
    """A request's course, which says when the worker is to hear of it."""

    __slots__ = ("changed", "number")

    def __init__(self, number: int, changed: deque[int]) -> None:
        super().__init__()
        self.number, self.changed = number, changed

    def admit(self, now: float, cached_tokens: int) -> None:
        super().admit(now, cached_tokens)
        self.changed.append(self.number)

    def preempt(self, now: float, why: str) -> None:
        super().preempt(now, why)
        self.changed.append(self.number)


class Child:
    def __init__(self, ring: Ring, calls: socket.socket) -> None:
        self._ring = ring
        self._socket = calls
        self._calls = calls.makefile("rb")
        self._engine: ServedEngine = None  # type: ignore[assignment]  # until it is loaded
        #: Events since the last record, with the numbers of their requests.
        self._pending: deque[tuple[int, Event]] = deque()
        #: The numbers of unfinished requests by id, and their courses by number.
        self._numbers: dict[str, int] = {}
        self._courses: dict[int, Course] = {}
        #: Numbers of requests whose courses changed.
        self._changed: deque[int] = deque()
        self._flushing = threading.Lock()
        self._reported_at = self._told_at = 0.0
        self._status = b""
        #: Whether the worker places tasks by what is cached here.
        self._tells_marks = False
        #: The last step's, which was sent.
        self._work: StepWork | None = None
        self._named: Sequence[str] = ()
        self._adapters: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()

    def run(self) -> None:
        """Load the engine that the first call names, then do what the worker calls for, until it closes."""
        if (first := self._call()) is None:
            return  # the worker was refused before
        _, factory, model, options = first
        module, _, attribute = factory.partition(":")
        try:
            self._engine, files = getattr(import_module(module), attribute)(model, options)
        except (Refused, EngineError) as error:
            self._write(Kind.REFUSED, pickle.dumps(error))
            return
        engine: Any = self._engine
        engine.on_step, engine.on_lost, engine.on_under_way = self._on_step, self._on_lost, self._on_under_way
        gc.freeze()  # what is there now stays
        gc.enable()
        self._write(Kind.READY, pickle.dumps(facts(self._engine, files)))
        for target, name in ((self._beat, "penstock-beat"), (self._load_adapters, "penstock-adapters")):
            threading.Thread(target=target, name=name, daemon=True).start()
        while (call := self._call()) is not None:
            name, *arguments = call
            getattr(self, f"_{name}")(*arguments)
            if name == "close":
                return

    def _call(self) -> Any:
        """The worker's next call; None once the worker is gone."""
        head = self._calls.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        return pickle.loads(self._calls.read(length))  # noqa: S301 - of the process that forked this one

    def _write(self, kind: Kind, content: bytes) -> None:
        self._ring.write(bytes((kind,)) + content, self._wake)

    def _wake(self) -> None:
        with suppress(OSError):  # the worker has bytes enough to wake it, or is gone
            self._socket.send(b"\0", socket.MSG_DONTWAIT)

    # ---- calls, on the main thread

    def _submit(self, number: int, request: Request) -> None:
        request.course = course = _NotedCourse(number, self._changed)
        self._courses[number] = course
        self._numbers[request.id] = number
        try:
            self._engine.submit(request, partial(self._on_event, number))
        except EngineClosedError:
            return  # its end, of which the worker hears next, ends this request, too
        except RequestError as error:
            self._end(number, request, error.message, refused=True, param=error.param, code=error.code)
        except EngineError as error:
            self._end(number, request, str(error))
        except BaseException as error:
            logger.exception("request %r could not be taken in", request.id)
            self._end(number, request, f"the request could not be taken in: {brief(error)}")

    def _end(self, number: int, request: Request, message: str, **values: Any) -> None:
        counts = len(request.prompt_ids)
        event = Event(request.id, finish_reason="error", done=True, error=message, prompt_tokens=counts, **values)
        self._on_event(number, event)
        self._flush()

    def _abort(self, number: int, request_id: str) -> None:
        if self._numbers.get(request_id) == number:
            self._numbers.pop(request_id, None)  # it may end at this moment
            self._courses.pop(number, None)
            self._engine.abort(request_id)

    def _tell_marks(self) -> None:
        self._tells_marks = True

    def _draws(self, watts: float) -> None:
        self._engine.draws(watts)

    def _load_adapter(self, number: int, name: str, path: str) -> None:
        self._adapters.put((number, name, path))

    def _unload_adapter(self, name: str) -> None:
        self._engine.unload_adapter(name)

    def _close(self) -> None:
        self._engine.close()
        self._flush()
        self._report()

    # ---- the engine's thread

    def _on_event(self, number: int, event: Event) -> None:
        self._pending.append((number, event))

    def _on_under_way(self, request_ids: Sequence[str]) -> None:
        """Before each launch, with the requests of all steps under way; with none once all are entered."""
        if request_ids and request_ids == self._named:
            self._ring.since = time.monotonic()
        else:
            numbers = self._numbers
            self._ring.name([numbers.get(request_id, -1) for request_id in request_ids])
        self._named = request_ids

    def _on_step(self) -> None:
        work = self._engine.last_work
        self._flush(None if work is self._work else work)
        self._work = work

    def _on_lost(self, why: str, suspects: set[str]) -> None:
        self._flush()
        self._write(Kind.LOST, json.dumps([why, sorted(suspects)]).encode())

    # ---- any thread

    def _flush(self, work: StepWork | None = None) -> None:
        """Write what has come since the last record."""
        with self._flushing:
            pending = self._pending
            events = [pending.popleft() for _ in range(len(pending))]
            ended = [(number, event) for number, event in events if event.done]
            now = time.monotonic()
            due = now - self._reported_at >= BEAT_S
            courses = self._told_courses(ended, now)
            if events or courses or work is not None:
                self._write(Kind.STEP, pack(events, work, courses))
            if due:
                self._reported_at = now
            if ended or due:
                self._report(whole=due)

    def _told_courses(self, ended: list[tuple[int, Event]], now: float) -> list[tuple[int, Course]]:
        """The courses that changed, those of requests that ended, and each COURSES_S those of all that run."""
        changed = {self._changed.popleft() for _ in range(len(self._changed))}
        courses = self._courses
        if now - self._told_at >= COURSES_S:
            self._told_at = now
            changed.update(number for number, course in list(courses.items()) if course.running)
        changed.update(number for number, _ in ended)
        told = [(number, course) for number in changed if (course := courses.get(number)) is not None]
        for number, event in ended:
            courses.pop(number, None)
            if self._numbers.get(event.request_id) == number:
                self._numbers.pop(event.request_id, None)
        return told

    def _report(self, *, whole: bool = True) -> None:
        """Send statistics, and if `whole` all that takes longer to tell, if it has changed."""
        engine = self._engine
        status: dict[str, Any] = {"stats": values_of(engine.stats())}
        if whole:
            now, due = time.monotonic(), engine.turn_due_s
            status |= {
                # Times since when, so that they stay the same: nothing is sent while nothing changes.
                "preempted": [(name, round(now - seconds, 1)) for name, seconds in engine.preempted()],
                "largest": engine.largest(LARGEST),
                "turn_wait_s": engine.turn_wait_s,
                "turn_since": round(now - due, 1) if due else None,
            }
            if self._tells_marks:
                status["marks"] = engine.marks()
        data = json.dumps(status).encode()
        if data != self._status:
            self._status = data
            self._write(Kind.STATUS, data)

    def _beat(self) -> None:
        while True:
            self._ring.beat = time.monotonic()
            self._flush()
            time.sleep(BEAT_S)

    def _load_adapters(self) -> None:
        while True:
            number, name, path = self._adapters.get()
            answer: dict[str, Any] = {}
            try:
                adapter = self._engine.load_adapter(name, path)
                answer = {"nbytes": adapter.nbytes, "rank": adapter.rank}
            except EngineError as error:
                answer = {"error": type(error).__name__, "message": str(error), "nbytes": getattr(error, "nbytes", 0)}
            except Exception as error:
                logger.exception("adapter %r could not be loaded", name)
                answer = {"error": "", "message": brief(error)}
            self._write(Kind.ANSWER, json.dumps([number, answer]).encode())


def values_of(statistics: Any) -> dict[str, Any]:
    """The fields of an engine's statistics."""
    return dataclasses.asdict(statistics) if dataclasses.is_dataclass(statistics) else dict(vars(statistics))  # type: ignore[arg-type]


def facts(engine: Any, files: dict[str, bytes]) -> dict[str, Any]:
    """What the worker has to know of the loaded engine. What reads texts is made again there, of the model's folder;
    that of an engine without one travels itself."""
    folder = getattr(engine, "folder", None)
    names = "fingerprint", "max_num_seqs", "max_model_len", "kv_capacity", "kv_tokens_total", "step_tokens", "kind"
    phases: Any = import_module("workers.runtime.cold_start").COLD_START
    return {
        "values": {name: getattr(engine, name) for name in (*names, "adapter_bytes", "marked_block")},
        "card": None if engine.card is None else engine.card.to_json(),
        "folder": folder,
        "texts": None if folder is not None else (engine.tokenizer, engine.texts),
        "vocab_size": None if engine.texts is None else engine.texts.vocab_size,
        "watermarks": None if engine.watermarks is None else engine.watermarks.describe(),
        "stats": values_of(engine.stats()),
        "shares": engine.turn_wait_s is not None,
        "phases": phases.figures,
        "files": files,
    }
