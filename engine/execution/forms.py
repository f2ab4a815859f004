"""Makes the matchers of requests whose outputs are to have a form, on threads of its own: no step waits for them.

ticket ─▶ its form was tried before, or is light ──────────▶ making: one matcher a turn ─▶ all are there ─▶ ready
       ─▶ else trial: in another process, which can be ended ─▶                           refused ─────────▶ ready

Tenants take turns in both, so a tenant's large forms hold up no more than one turn of another's. A matcher is made for
each output, since copies share states; the beams of one search have copies. llguidance makes it without the
interpreter's lock, so steps go on meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.errors import RequestError, brief
from engine.grammar.matcher import Grammars, Matcher
from engine.grammar.source import STACK_BYTES
from engine.request import Event, Request

logger = logging.getLogger("penstock.engine")

_starting = threading.Lock()


@dataclass(slots=True, eq=False)
class Ticket:
    """One submission. A request id may be used again, a ticket never is."""

    request: Request
    on_event: Callable[[Event], None]
    aborted: bool = False
    refusal: RequestError | None = None
    """Why it cannot run, found after it was submitted."""
    fault: str = ""
    """The same, where the request is not to blame."""


@dataclass(slots=True, eq=False)
class _Job:
    ticket: Ticket
    make: Callable[[], Matcher] | None = None


@dataclass(slots=True, eq=False)
class _Turns:
    """A thread's jobs, by tenant. The tenant at the front has the next turn."""

    jobs: OrderedDict[str, deque[_Job]] = field(default_factory=OrderedDict)

    def put(self, job: _Job) -> None:
        self.jobs.setdefault(job.ticket.request.tenant, deque()).append(job)

    def next(self) -> _Job:
        """The job whose turn it is. It stays the first of its tenant."""
        return next(iter(self.jobs.values()))[0]

    def end_turn(self, job: _Job, done: bool) -> None:
        tenant = job.ticket.request.tenant
        if done:
            self.jobs[tenant].popleft()
        if self.jobs[tenant]:
            self.jobs.move_to_end(tenant)
        else:
            del self.jobs[tenant]

    def __len__(self) -> int:
        return sum(map(len, self.jobs.values()))


class FormThreads:
    """Gives tickets their matchers. Thread-safe. The threads start with the first ticket."""

    def __init__(self, grammars: Grammars, ready: Callable[[Ticket], None]) -> None:
        """`ready`: called on one of the threads with each ticket whose request has its matchers, or `refusal` or
        `fault`. Not called for aborted ones."""
        self._grammars = grammars
        self._ready = ready
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._trials, self._making = _Turns(), _Turns()
        self._started = self._closed = False

    def put(self, ticket: Ticket) -> None:
        tried = self._grammars.tried(ticket.request.params)
        with self._changed:
            if not self._started:
                self._started = True
                _start("penstock-form-trial", self._run_trials)
                _start("penstock-forms", self._run, self._making, self._make)
            (self._making if tried else self._trials).put(_Job(ticket))
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """The number of tickets that were put in and are not ready."""
        with self._changed:
            return len(self._trials) + len(self._making)

    def close(self) -> None:
        """Drop all tickets, and end the threads after what they are at. Returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._grammars.give_up()

    # ---- the threads

    def _run_trials(self) -> None:
        self._run(self._trials, self._try_out)
        self._grammars.close()

    def _run(self, turns: _Turns, turn: Callable[[_Job], bool]) -> None:
        """Take turns until closed. `turn` returns whether that was the job's last one on this thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or turns.jobs)
                if self._closed:
                    return
                job = turns.next()
            done = True
            try:
                done = job.ticket.aborted or turn(job)
            except RequestError as error:
                job.ticket.refusal = error
            except BaseException as error:  # a panic in Rust is no Exception
                logger.exception("the form of request %r could not be prepared", job.ticket.request.id)
                job.ticket.fault = f"its form could not be prepared: {brief(error)}"
            with self._changed:
                turns.end_turn(job, done)
            if done:
                self._end(job, done=turns is self._making)
            del job  # else its matchers are kept until the next one comes

    def _try_out(self, job: _Job) -> bool:
        self._grammars.try_out(job.ticket.request.params)
        return True

    def _make(self, job: _Job) -> bool:
        request = job.ticket.request
        if job.make is None:
            job.make = self._grammars.maker(request.params)
        matcher = job.make()
        choice = len(request.matchers)
        matcher.foresee(request.resume[choice] if choice < len(request.resume) else ())
        request.matchers.append(matcher)
        # The first of a search's beams has one, and the others fork it.
        return len(request.matchers) == (1 if request.params.beam_width else request.params.width)

    def _end(self, job: _Job, *, done: bool) -> None:
        ticket = job.ticket
        failed = ticket.refusal is not None or bool(ticket.fault)
        if ticket.aborted or failed:
            while ticket.request.matchers:  # freeing one holds the interpreter: others get it in between
                ticket.request.matchers.pop()
        if ticket.aborted:
            return
        if done or failed:
            self._ready(ticket)
            return
        with self._changed:
            self._making.put(job)
            self._changed.notify_all()


def _start(name: str, target: Callable[..., None], *args: object) -> None:
    """Start a daemon thread with a large stack, which llguidance needs: a usual one would end the process."""
    with _starting:  # the size counts for every thread that starts meanwhile
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=target, args=args, name=name, daemon=True).start()
        finally:
            threading.stack_size(usual)
