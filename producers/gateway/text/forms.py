"""Whether the form that a task's output is to have can be followed at all, before the task is queued."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

from engine.grammar.source import check_form
from engine.params import FORMS, SamplingParams
from engine.text import RequestError
from producers.contract.task import Task
from producers.errors import InvalidTask


async def check_followed(task: Task) -> None:
    """Raise InvalidTask for a form that cannot be followed."""
    if any(getattr(task, name) is not None for name in FORMS):
        await asyncio.to_thread(check, task)


def check(task: Task) -> None:
    """The same, for a thread that may wait. Where llguidance is not installed, the worker alone checks."""
    if find_spec("llguidance") is None:
        return
    try:
        check_form(SamplingParams(**{name: getattr(task, name) for name in FORMS}))
    except RequestError as error:
        raise InvalidTask(str(error), param=error.param, code=error.code) from None
