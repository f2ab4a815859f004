"""The worker's side of an engine in a process of its own: behaves as `engine.Engine` and `PoolingEngine` do.

    submit, abort, ... ─▶ a call on the socket, at once; what the socket does not take waits here
    a thread: woken by the process ─▶ records of the ring ─▶ `on_event` of each event ─▶ `on_step`
                                   └▶ its end ─▶ the records that are left ─▶ `on_lost`, with the step's requests

No call waits for the engine's process, so one that hangs or is stopped holds up nobody. One that stays stopped is
killed, and counts as any that dies.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from engine import errors
from engine.errors import AdapterRoomError, EngineClosedError, EngineError, RequestError
from engine.plan import StepWork
from engine.request import Event, Request, Tokens
from engine.scheduling.scheduler import Held
from workers.engine_process import child
from workers.engine_process.child import LENGTH, Kind
from workers.engine_process.packed import Run, unpack, update_course
from workers.engine_process.ring import Ring
from workers.processes.proc import processor_time_of

logger = logging.getLogger(__name__)

#: Time (s) after which a process without a sign of life is said to hang, also while no step is under way.
SILENT_S: Final = 5.0
#: Time (s) that `close` gives the process.
END_S: Final = 5.0
#: Time (s) between two looks at whether the process is stopped.
LOOK_S: Final = 1.0


@dataclass(slots=True)
class _Card:
    text: str

    def to_json(self) -> str:
        return self.text


@dataclass(slots=True)
class _Watermarks:
    description: Any

    def describe(self) -> Any:
        return self.description


@dataclass(slots=True)
class _Ticket:
    request: Request
    on_event: Callable[[Event], None]
    shared_id: str | None
    """The request's id, if its tokens go to `on_tokens`."""


class ProcessEngine:
    """Begins with the process, which then waits for `load`. Make it on the main thread, before there are others: the
    process is forked, and the kernel ends it with the thread that forked it."""

    fingerprint: str
    max_num_seqs: int
    max_model_len: int
    kv_capacity: int
    kv_tokens_total: int
    step_tokens: int
    marked_block: int
    adapter_bytes: int
    kind: Any = "generate"
    card: Any = None
    tokenizer: Any = None
    texts: Any = None
    watermarks: Any = None

    def __init__(self, name: str, patience: float) -> None:
        """`name`: the worker's. `patience`: time (s) after which a process that is stopped is killed."""
        self.on_step: Callable[[], None] | None = None
        self.on_lost: Callable[[str, set[str]], None] | None = None
        self.last_work: StepWork | None = None
        self._patience = patience
        self._watts = self._processor_s = 0.0
        self._tells_marks = False
        self._ring = Ring()
        self._lock = threading.Lock()
        self._tickets: dict[int, _Ticket] = {}
        self._numbers: dict[str, int] = {}
        self._next = itertools.count()
        self._adapters: dict[str, Any] = {}
        self._answers: dict[int, Any] = {}
        self._answered = threading.Condition()
        self._start: Any = None
        self._status: dict[str, Any] = {
            "stats": {},
            "preempted": [],
            "largest": [],
            "turn_wait_s": None,
            "turn_since": None,
        }
        self._stopped_since: float | None = None
        self._closing = False
        self._listener: Callable[[Event], None] | None = None
        self._on_tokens: Callable[[Tokens], None] = lambda tokens: None
        #: Why there is no process any more.
        self._end = ""
        self._socket, theirs = socket.socketpair()
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sending = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self.pid = self._fork(theirs, name)
        theirs.close()
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    def _fork(self, theirs: socket.socket, name: str) -> int:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            status = os.EX_SOFTWARE
            try:
                self._socket.close()
                os.close(self._nudge)
                child.run(self._ring, theirs, parent, name)
                status = os.EX_OK
            except BaseException:  # noqa: BLE001 - nothing above this is the child's
                traceback.print_exc()
            finally:
                logging.shutdown()
                os._exit(status)
        return pid

    def load(self, factory: str, model: str, options: dict[str, Any]) -> dict[str, Any]:
        """Load the model, as `WorkerSettings.engine_factory` does, and wait for it. Returns the tokenizer's files by
        name as `files`, and the phases of the start (s) as `phases`. Raises what the factory raised, RuntimeError if
        the process ended."""
        self._call("load", factory, model, options)
        with self._answered:
            self._answered.wait_for(lambda: self._start is not None or self._end)
        if isinstance(self._start, BaseException):
            self._thread.join()
            raise self._start
        if self._start is None:
            raise RuntimeError(f"the model is not loaded: {self._end}")
        facts: dict[str, Any] = self._start
        for name, value in facts["values"].items():
            setattr(self, name, value)
        self.card = None if facts["card"] is None else _Card(facts["card"])
        self.watermarks = None if facts["watermarks"] is None else _Watermarks(facts["watermarks"])
        self._status |= {"stats": facts["stats"], "turn_wait_s": 0.0 if facts["shares"] else None}
        if facts["texts"] is not None:
            self.tokenizer, self.texts = facts["texts"]
        else:
            self._read_texts(facts["folder"], facts["vocab_size"])
        return facts

    def _read_texts(self, folder: Path, vocab_size: int | None) -> None:
        from engine.text import Tokenizer
        from engine.text.files import has_tokenizer
        from engine.text.pooled import PooledTexts
        from engine.text.pooling import read_pooling

        self.tokenizer = Tokenizer.from_folder(folder) if has_tokenizer(folder) else None
        if vocab_size is not None:
            limits = self.max_model_len, vocab_size
            spans = self.kind == "token_classify"
            self.texts = PooledTexts(folder, self.tokenizer, read_pooling(folder), *limits, spans=spans)

    # ---- any thread

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """See Engine. What the engine refuses comes as an event."""
        with self._lock:
            if self._closing or self._end:
                raise EngineClosedError("the engine is closed")
            if request.id in self._numbers:
                raise RequestError(f"request id {request.id!r} is in use", param="id", code="duplicate_request")
            number = self._numbers[request.id] = next(self._next)
            shared_id = request.id if on_event == self._listener else None
            self._tickets[number] = _Ticket(request, on_event, shared_id)
            self._call("submit", number, request)  # here, so that no abort goes before it

    def share(self, on_event: Callable[[Event], None], on_tokens: Callable[[Tokens], None]) -> None:
        """Let `on_tokens` have the plain tokens of all requests that are submitted with this `on_event` from now on,
        many at a time; their other events still go to `on_event`, in order.

        Raises RuntimeError if the engine was lost before: nobody is told of that who has set `on_lost` since."""
        with self._lock:
            if self._end:
                raise RuntimeError(f"the engine is lost: {self._end}")
        self._listener, self._on_tokens = on_event, on_tokens

    def abort(self, request_id: str) -> bool:
        """See Engine. No event follows, except one that is being delivered."""
        with self._lock:
            number = self._numbers.pop(request_id, None)
            if number is None:
                return False
            del self._tickets[number]
            self._call("abort", number, request_id)
        return True

    def stats(self) -> SimpleNamespace:
        """See Engine; as of the last step that ended a request, or some tenths of a second ago."""
        return SimpleNamespace(**self._status["stats"])

    def preempted(self) -> list[tuple[str, float]]:
        """See Engine."""
        now = time.monotonic()
        return [(name, now - since) for name, since in self._status["preempted"]]

    def largest(self, count: int) -> list[Held]:
        """See Engine; some tenths of a second ago, and at most child.LARGEST."""
        return [Held(*held) for held in self._status["largest"][:count]]

    def marks(self) -> list[str]:
        """See Engine; of some tenths of a second ago, and none at first."""
        if not self._tells_marks:
            self._tells_marks = True
            self._call("tell_marks")
        marks: list[str] = self._status.get("marks", [])
        return marks

    def draws(self, watts: float) -> None:
        """See Engine."""
        if watts != self._watts:
            self._watts = watts
            self._call("draws", watts)

    def processor_time(self) -> float:
        """The processor time (s) of this process and of the engine's, in which the model's load was."""
        with suppress(OSError):  # it has ended
            self._processor_s = processor_time_of(self.pid)
        return time.process_time() + self._processor_s

    def stepping(self) -> tuple[float, set[str]]:
        """See Engine. A process that shows no sign of life counts as a step without requests."""
        now, since, beat = time.monotonic(), self._ring.since, self._ring.beat
        if since:
            return now - since, self._suspects()
        return (now - beat, set()) if beat and now - beat > SILENT_S and not self._end else (0.0, set())

    @property
    def turn_wait_s(self) -> float | None:
        """See Engine."""
        seconds: float | None = self._status["turn_wait_s"]
        return seconds

    @property
    def turn_due_s(self) -> float:
        """See Engine."""
        since = self._status["turn_since"]
        return 0.0 if since is None else time.monotonic() - since

    @property
    def adapters(self) -> dict[str, Any]:
        """See Engine."""
        with self._lock:
            return dict(self._adapters)

    def load_adapter(self, name: str, path: str | Path) -> Any:
        """See Engine."""
        with self._lock:
            number = next(self._next)
        self._call("load_adapter", number, name, str(path))
        with self._answered:
            self._answered.wait_for(lambda: number in self._answers or self._end)
            answer = self._answers.pop(number, None)
        if answer is None:
            raise EngineClosedError(f"the adapter is not loaded: {self._end}")
        if "error" in answer:
            raise _adapter_error(answer)
        adapter = SimpleNamespace(**answer)
        with self._lock:
            self._adapters[name] = adapter
        return adapter

    def unload_adapter(self, name: str) -> bool:
        """See Engine."""
        with self._lock:
            if self._adapters.pop(name, None) is None:
                return False
        self._call("unload_adapter", name)
        return True

    def close(self) -> None:
        """Let the running step end, and the process after it; by force after some seconds. Unfinished requests get a
        last event with finish_reason "abort"."""
        with self._lock:
            self._closing = True
        self._call("close")
        if threading.current_thread() is self._thread:
            return
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._kill()
            self._thread.join()
        if self.texts is not None and hasattr(self.texts, "close"):
            self.texts.close()

    def _call(self, *call: Any) -> None:
        data = pickle.dumps(call, 5)
        frame = memoryview(LENGTH.pack(len(data)) + data)
        with self._sending:
            if not self._backlog:
                frame = frame[self._sent(frame) :]
            if frame:
                self._backlog.append(frame)
                os.eventfd_write(self._nudge, 1)

    def _sent(self, frame: memoryview) -> int:
        """Send what the socket takes at once. Returns the number of bytes."""
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(frame)  # the process has ended, which the thread sees

    def _kill(self) -> None:
        if not self._end:
            os.kill(self.pid, signal.SIGKILL)

    def _suspects(self) -> set[str]:
        """The unfinished requests of the steps under way."""
        numbers = self._ring.names()
        with self._lock:
            tickets = self._tickets
            named = list(tickets) if numbers is None else numbers
            return {tickets[number].request.id for number in named if number in tickets}

    # ---- its thread

    def _run(self) -> None:
        process: int | None
        poll = select.poll()
        poll.register(self._nudge, select.POLLIN)
        # The socket closes with the process, too, unless a child of it has the other end.
        try:
            process = os.pidfd_open(self.pid)
            poll.register(process, select.POLLIN)
        except OSError:  # kernels before 5.3, sandboxes
            process = None
        ended, looked = False, time.monotonic()
        while not ended:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._backlog else 0))
            ready = dict(poll.poll(1000 * LOOK_S))
            ended = process in ready or bool(ready.get(self._socket.fileno(), 0) & select.POLLHUP)
            if self._nudge in ready:
                os.eventfd_read(self._nudge)
            self._send_backlog()
            if time.monotonic() - looked >= LOOK_S:
                looked = time.monotonic()
                self._look()
            if self._awake():
                for record in self._ring.read():
                    self._take(record)
        for record in self._ring.read():
            self._take(record)
        if process is not None:
            os.close(process)
        self._ended()

    def _awake(self) -> bool:
        """Take the bytes that woke this thread."""
        try:
            return bool(self._socket.recv(4096, socket.MSG_DONTWAIT))
        except OSError:
            return False

    def _send_backlog(self) -> None:
        with self._sending:
            while self._backlog:
                frame = self._backlog[0]
                count = self._sent(frame)
                if count < len(frame):
                    self._backlog[0] = frame[count:]
                    return
                self._backlog.popleft()

    def _look(self) -> None:
        """Kill a process that has been stopped for too long."""
        now = time.monotonic()
        if not _is_stopped(self.pid):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > self._patience:
            logger.critical("The engine's process has been stopped for %.0f s: it is killed", now - self._stopped_since)
            self._kill()

    def _take(self, record: bytes) -> None:
        kind, content = record[0], memoryview(record)[1:]
        if kind == Kind.STEP:
            self._step(content)
        elif kind == Kind.STATUS:
            self._status |= json.loads(bytes(content))
        elif kind == Kind.LOST:
            why, suspects = json.loads(bytes(content))
            self._lost(why, set(suspects))
        else:
            with self._answered:
                if kind == Kind.ANSWER:
                    number, answer = json.loads(bytes(content))
                    self._answers[number] = answer
                else:
                    self._start = pickle.loads(content)  # noqa: S301 - of the process that this one forked
                self._answered.notify_all()

    def _step(self, content: memoryview) -> None:
        work, courses, segments = unpack(content)
        tickets = self._tickets
        for number, values in courses:
            if (ticket := tickets.get(number)) is not None:
                update_course(ticket.request.course, values)
        if work is not None:
            self.last_work = work
        for segment in segments:
            if isinstance(segment, Run):
                self._deliver_run(segment)
            else:
                number, event = segment
                if (ticket := tickets.get(number)) is not None:
                    event.request_id = ticket.request.id
                    if event.done:
                        self._forget(number, event.request_id)
                    self._deliver(ticket, event)
        if self.on_step is not None:
            try:
                self.on_step()
            except Exception:
                logger.exception("on_step raised")

    def _deliver_run(self, run: Run) -> None:
        tickets = [self._tickets.get(number) for number in run.numbers]
        ids = [None if ticket is None else ticket.shared_id for ticket in tickets]
        columns = run.choices, run.indices, run.tokens, run.texts
        self._on_tokens(Tokens(ids, *columns))
        if None not in ids:
            return
        for ticket, choice, index, token, text in zip(tickets, *columns, strict=True):
            if ticket is not None and ticket.shared_id is None:
                request = ticket.request
                event = Event(request.id, choice, index, [token], [text])
                event.prompt_tokens, event.cached_tokens = len(request.prompt_ids), request.course.cached_tokens
                self._deliver(ticket, event)

    def _forget(self, number: int, request_id: str) -> None:
        with self._lock:
            self._tickets.pop(number, None)
            if self._numbers.get(request_id) == number:
                del self._numbers[request_id]

    def _deliver(self, ticket: _Ticket, event: Event) -> None:
        try:
            ticket.on_event(event)
        except Exception:
            logger.exception("on_event of request %r raised", event.request_id)

    def _unread(self) -> set[str]:
        """Requests that have not begun, and are to have outputs of a form: it is read in no step."""
        with self._lock:
            requests = [ticket.request for ticket in self._tickets.values()]
        return {request.id for request in requests if request.params.forms and request.course.began_at is None}

    def _ended(self) -> None:
        suspects = self._suspects() | self._unread()
        _, status = os.waitpid(self.pid, 0)
        why = f"the engine's process ({self.pid}) {_end_of(os.waitstatus_to_exitcode(status))}"
        with self._lock:
            self._end = why
        with self._answered:
            self._answered.notify_all()
        if not self._closing and not isinstance(self._start, BaseException):
            self._lost(why, suspects)

    def _lost(self, why: str, suspects: set[str]) -> None:
        with self._lock:
            already, self._end = self._closing, self._end or why
            self._closing = True
            tickets = list(self._tickets.items())
        if already:
            return
        logger.critical("The engine is lost: %s", why)
        if self.on_lost is not None:
            self.on_lost(why, suspects)
            return
        for number, ticket in tickets:
            self._forget(number, ticket.request.id)
            prompt, message = len(ticket.request.prompt_ids), f"the engine failed: {why}"
            event = Event(ticket.request.id, finish_reason="error", done=True, error=message, prompt_tokens=prompt)
            self._deliver(ticket, event)


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _end_of(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    hint = ", as for want of memory" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _adapter_error(answer: dict[str, Any]) -> Exception:
    name, message = answer["error"], answer["message"]
    if name == "AdapterRoomError":
        return AdapterRoomError(message, answer["nbytes"])
    kind = getattr(errors, name, None) if name else RuntimeError
    if kind is RequestError or not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = EngineError
    return kind(message)
