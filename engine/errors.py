"""The engine's exceptions, by who has to act: the caller of a request, or the operator who serves the model."""

from __future__ import annotations

from typing import Final

#: The text of `Event.error` for a sequence that ended because its logits were not finite.
NOT_FINITE: Final = "the model's logits are not finite (NaN or infinity)"


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class RequestError(EngineError, ValueError):
    """A request that cannot be run as it was asked; the engine is unharmed.

    `param` names the field at fault (None when it is the request as a whole). `code` is for programs:
    "invalid_value", "invalid_type", "context_length_exceeded", "kv_capacity_exceeded" or "duplicate_request".
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelError(EngineError):
    """A model folder that cannot be served; the message names the file, tensor or setting at fault."""


class DeviceLostError(EngineError):
    """The device no longer works for this process. Only a new process can use it."""


def brief(error: BaseException) -> str:
    """The exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
