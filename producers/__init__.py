"""The contract between callers and workers, and the library that callers use.

    Task -> Client.submit:  look up the model's card -> check -> ADMIT the record -> send the message -> QUEUED
    (a worker claims the record, appends tokens to its stream, finishes it: `producers.store.protocol`)
    Handle.stream / .result <- reader: the stream, then the channel <- hub: one pub/sub connection for all readers

What a client does is written once, without I/O (`steps`, `submission`, `operations`); `client` and `aio` do it.
Exports are loaded when first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from producers.client.aio import AsyncClient, AsyncHandle
    from producers.client.blocking import Client, Handle
    from producers.contract.record import Record
    from producers.contract.stream import Choice, End, Entity, Event, Prompt, Result, TaskInfo, TaskPage, Token
    from producers.contract.task import Task
    from producers.errors import (
        IdempotencyKeyReused,
        InvalidQuery,
        InvalidTask,
        PenstockError,
        SubmitFailed,
        TaskErased,
        TaskExists,
        TaskFailed,
        TaskInBatch,
        TaskNotFinal,
        TaskNotFound,
        TextError,
        TokenizerChanged,
        UnknownModel,
    )

__all__ = [
    "AsyncClient",
    "AsyncHandle",
    "Choice",
    "Client",
    "End",
    "Entity",
    "Event",
    "Handle",
    "IdempotencyKeyReused",
    "InvalidQuery",
    "InvalidTask",
    "PenstockError",
    "Prompt",
    "Record",
    "Result",
    "SubmitFailed",
    "Task",
    "TaskErased",
    "TaskExists",
    "TaskFailed",
    "TaskInBatch",
    "TaskInfo",
    "TaskNotFinal",
    "TaskNotFound",
    "TaskPage",
    "TextError",
    "Token",
    "TokenizerChanged",
    "UnknownModel",
]

#: Module -> the names that it has. `errors` has all others.
_HOME = {
    "client.aio": ("AsyncClient", "AsyncHandle"),
    "client.blocking": ("Client", "Handle"),
    "contract.record": ("Record",),
    "contract.stream": ("Choice", "End", "Entity", "Event", "Prompt", "Result", "TaskInfo", "TaskPage", "Token"),
    "contract.task": ("Task",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'producers' has no attribute {name!r}")
    module = next((module for module, names in _HOME.items() if name in names), "errors")
    return getattr(import_module(f"producers.{module}"), name)


def __dir__() -> list[str]:
    return __all__
