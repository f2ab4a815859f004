"""Whether the form that a task's output is to have can be followed at all, before the task is queued.

form ─▶ too many parts: refused ─▶ tried before, or light: judged at once ─▶ else, in its tenant's turn: tried out

A trial is in a process that ends at its limits (`engine.grammar.trial`), and a tenant has one at a time. So a form that
would be read for hours holds up its own tenant, for seconds.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Final, TypeVar

from engine.errors import RequestError
from engine.grammar.schema import rules_of
from engine.grammar.trial import Trials, stopped
from engine.params import FORMS, SamplingParams
from producers.contract.task import Task
from producers.errors import InvalidTask
from producers.gateway.executor import Executor, ExecutorBusy
from producers.gateway.fair_share import in_thread
from producers.gateway.http.errors import RETRY_AFTER, Problem
from producers.gateway.http.request_state import Work

T = TypeVar("T")
#: Takes a form's name and text. Raises RequestError if it cannot be followed.
Judge = Callable[[str, str], None]

#: The trials at one time, of different tenants. Each has a process, which starts when it is first needed.
AT_ONCE: Final = 2
#: The most requests of a tenant that wait for its turn, and how long (s) one waits.
WAITING: Final = 8
PATIENCE_S: Final = 20.0
#: The end of a warning about a schema.
TO_THE_LETTER: Final = "is followed to the letter, without bounds of ours: an output may go on to its max_tokens"
#: The longest turn (s). One request's tools may have many schemas.
TURN_S: Final = 10.0


@dataclass(slots=True)
class _Turn:
    """A tenant's turn. `requests`: the number of its requests that have it or wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    requests: int = 0


class Forms:
    """Judges the forms of tasks. Use it from one event loop, but for `needs_no_trial`, `is_judged`, and what ends with
    `_now`. Call `close` after use."""

    def __init__(self, trials: Trials | None = None) -> None:
        #: Where llguidance is not installed, the worker alone judges.
        self._installed = find_spec("llguidance") is not None
        self._trials = trials or Trials(at_once=AT_ONCE)
        self._executor = Executor("penstock-forms", AT_ONCE)
        self._turns: dict[str, _Turn] = {}

    async def check(self, task: Task, work: Work) -> None:
        """Raise InvalidTask for a form that cannot be followed, and Problem if too many forms of its tenant wait. The
        work's warnings tell of one whose outputs may not end."""
        work.warnings += warnings_of(task)
        form = _form(task)
        if form is None or not self._installed:
            return
        try:
            await self.run(work, [form], lambda judge: judge(*form))
        except RequestError as error:
            raise _invalid(error) from None

    def needs_no_trial(self, task: Task) -> bool:
        """Whether `check_now` needs no trial. Raises InvalidTask for a form of too many parts."""
        form = _form(task)
        return form is None or self.is_judged(*form)

    def check_now(self, task: Task) -> None:
        """The same for the lines of batches, on a thread that may wait."""
        form = _form(task)
        if form is None or not self._installed:
            return
        try:
            self._trials.check(*form)
        except RequestError as error:
            raise _invalid(error) from None

    def is_judged(self, name: str, text: str) -> bool:
        """Whether `judge_now` needs no trial."""
        return not self._installed or self._trials.is_judged(name, text)

    def judge_now(self, name: str, text: str) -> None:
        """Judge a form, on a thread that may wait. Raises RequestError if it cannot be followed."""
        if self._installed:
            self._trials.check(name, text)

    async def run(self, work: Work, forms: Sequence[tuple[str, str]], judging: Callable[[Judge], T]) -> T:
        """Run `judging`, which judges these forms, on a thread: in its tenant's turn if one of them needs a trial.

        Returns or raises what it does. Raises Problem if too many of the tenant's requests wait, or for too long.
        """
        if all(self._trials.is_judged(*form) for form in forms):
            return await in_thread(judging, self._trials.check)
        tenant = work.tenant
        turn = self._turns.setdefault(tenant, _Turn())
        if turn.requests > WAITING:
            raise _busy(f"{WAITING} requests of this tenant with large or unusual forms wait already")
        turn.requests += 1
        work.done = True
        judged = asyncio.create_task(self._in_turn(tenant, turn, forms[0][0], judging))
        # A caller who leaves does not end the turn: the work goes on until its limits.
        judged.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(judged)

    async def _in_turn(self, tenant: str, turn: _Turn, name: str, judging: Callable[[Judge], T]) -> T:
        given_up = threading.Event()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await turn.lock.acquire()
            try:
                work = partial(judging, partial(self._judge, given_up))
                return await self._executor.run(work, patience=PATIENCE_S, limit=TURN_S)
            except TimeoutError:
                raise stopped(name, f"it was not read within {TURN_S:g} s") from None
            finally:
                given_up.set()
                turn.lock.release()
        except (TimeoutError, ExecutorBusy):
            raise _busy(f"others' forms took longer than {PATIENCE_S:g} s") from None
        finally:
            turn.requests -= 1
            if not turn.requests:
                del self._turns[tenant]

    def _judge(self, given_up: threading.Event, name: str, text: str) -> None:
        if given_up.is_set():
            raise stopped(name, "its caller has gone")
        self._trials.check(name, text)

    def close(self) -> None:
        """End all trials."""
        self._executor.close()
        self._trials.kill()


def warnings_of(task: Task) -> list[str]:
    """What callers are told of the form of a task's outputs."""
    schema = task.formed().json_schema
    return [] if schema is None or rules_of(schema) not in (None, 0) else [f"the outputs' schema {TO_THE_LETTER}"]


def _form(task: Task) -> tuple[str, str] | None:
    """The form that a task's outputs will follow, by its parameter's name, as text. Raises InvalidTask if it has too
    many parts."""
    task = task.formed()
    name = next((name for name in FORMS if getattr(task, name) not in (None, ())), None)
    if name is None:
        return None
    try:  # a grammar of tools comes after the task's own checks
        return SamplingParams(**{name: getattr(task, name)}, n=task.width).form
    except RequestError as error:
        raise _invalid(error) from None


def _invalid(error: RequestError) -> InvalidTask:
    return InvalidTask(error.message, param=error.param, code=error.code)


def _busy(why: str) -> Problem:
    return Problem(429, f"{why}; try again in a moment.", code="form_busy", headers=RETRY_AFTER)
