"""Errors that callers see, by what they can do about them."""

from __future__ import annotations

import json
from typing import Any, Final

from engine.errors import TextError as TextError

#: Most entries of lists and objects that a message's value may have to be shown.
MANY: Final = 1000


class PenstockError(Exception):
    """Base of all errors of the client library."""


class InvalidTask(PenstockError, ValueError):
    """The task was refused and nothing was queued. `param` names the field, `code` is for programs. `message` is an
    `engine.errors.ErrorText` where it names fields that a caller may know by other names."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class UnknownModel(InvalidTask):
    """No card of that model is in the store, or nobody serves it and nothing starts a worker for it."""


class LimitReached(PenstockError):
    """The key's limit is reached, and nothing was queued. `code` says which. `wait_s`: time after which a try may
    succeed; None: none will, this month or ever."""

    def __init__(self, message: str, code: str, wait_s: float | None) -> None:
        super().__init__(message)
        self.code = code
        self.wait_s = wait_s


class QueueFull(PenstockError):
    """Too many tasks wait, and nothing was queued. `bound`: the one that is reached, `all`, `pool`, `tenant` or `key`;
    `waiting`: tasks that count against it; `limit`: tasks that may. Of the bound `kept` both are bytes of a tenant's
    tasks, waiting or not."""

    def __init__(self, bound: str, waiting: int, limit: int) -> None:
        unit = "bytes of tasks are kept" if bound == "kept" else "tasks wait"
        super().__init__(f"{waiting} {unit}, where {limit} may (bound: {bound})")
        self.bound = bound
        self.waiting = waiting
        self.limit = limit


class SecretUnreadable(PenstockError):
    """The file with the keys for stored secrets, or a stored secret, cannot be read here. The message shows neither."""


class TaskExists(PenstockError):
    """Another task has this id."""


class TaskErased(TaskExists):
    """A task with this id was deleted, and is not made again."""


class TaskInBatch(PenstockError):
    """The task is a line of a batch, so that it cannot be deleted by itself."""


class IdempotencyKeyReused(PenstockError):
    """The idempotency key was used for another task."""


class InvalidQuery(PenstockError, ValueError):
    """A request for a list of tasks has a bad parameter, `param`."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class TaskNotFinal(PenstockError):
    """The task has not ended, so that it cannot be retried."""


class TokenizerChanged(PenstockError):
    """The task to be run again has token ids, and its model's current version has another tokenizer or chat template,
    for which they would be another text. Nothing was queued."""


class TaskNotFound(PenstockError, KeyError):
    """No record: never submitted, or past its time to live."""

    def __str__(self) -> str:
        return str(self.args[0])


class BrokenRecord(PenstockError, ValueError):
    """The task's record cannot be read; `field` is the part at fault. Something else than Penstock wrote it."""

    def __init__(self, task_id: str, field: str) -> None:
        super().__init__(f"The record of task {task_id} cannot be read: its field {field} is broken")
        self.field = field


class ResultUnavailable(PenstockError):
    """The task is there, and its result is in a file that cannot be read from here; the message says where it is."""


class SubmitFailed(PenstockError):
    """The broker or the store did not answer in time, or takes nothing new. A record that was made is finished by the
    sweeper. `code` is for programs: `submit_failed`, `model_changed`, `storage_full`, `access_denied` or
    `unusable_server`."""

    def __init__(self, message: str, code: str = "submit_failed") -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class TaskFailed(PenstockError):
    """The task ended `failed` or `cancelled`. `code` and `param` are those of its error."""

    def __init__(self, message: str, status: str = "failed", code: str = "failed", param: str | None = None) -> None:
        super().__init__(message, status, code, param)
        self.status = status
        self.code = code
        self.param = param

    def __str__(self) -> str:
        return str(self.args[0])


def shown(value: Any) -> str:
    """A value, for messages: as JSON, and not longer than a line."""
    if isinstance(value, list | tuple | dict) and _entries(value) > MANY:  # to write it would take long
        return f"{'an object' if isinstance(value, dict) else 'a list'} of more than {MANY} values"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, RecursionError):  # a caller of the library may give anything
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = f"a huge {type(value).__name__}"
    text = text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
    return text if text.isprintable() else "".join(map(_visible, text))


def _entries(value: Any) -> int:
    """The number of entries in lists and objects, counted to somewhat above MANY."""
    entries, todo = 0, [value]
    while todo and entries <= MANY:
        inner = todo.pop()
        entries += len(inner)
        if entries <= MANY:
            items = inner.values() if isinstance(inner, dict) else inner
            todo += [item for item in items if isinstance(item, list | tuple | dict)]
    return entries


def _visible(sign: str) -> str:
    """The character itself if it is printable, else its JSON escape."""
    return sign if sign.isprintable() else json.dumps(sign)[1:-1]
