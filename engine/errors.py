"""The engine's exceptions, by who has to act: the caller of a request, or the operator who serves the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Final, Self

#: The text of `Event.error` for a sequence that ended because its logits were not finite.
NOT_FINITE: Final = "the model's logits are not finite (NaN or infinity)"
#: The same where a request's parameters leave nothing to choose.
NONE_LEFT: Final = (
    "no token is left to choose: allowed_token_ids, banned_token_ids, bad_words, min_tokens and the output's form "
    "together forbid them all"
)


@dataclass(frozen=True, slots=True)
class TextError:
    """The error of one text of a request, in place of its result, where a bad text fails nothing but itself."""

    code: str
    message: str


class FieldName(str):
    """The name of a field of a request, in an ErrorText."""

    __slots__ = ()


class ErrorText(str):
    """An error's message that knows where it names fields of a request. `fields`: (index in the text, field), in order.

    A caller may know a field by another name: `renamed` writes that one in its place. No text is searched, so that a
    value that contains a field's name stays as it is.
    """

    __slots__ = ("fields",)
    fields: tuple[tuple[int, str], ...]

    def __new__(cls, text: str = "", fields: Iterable[tuple[int, str]] = ()) -> Self:
        new = super().__new__(cls, text)
        new.fields = tuple(fields)
        return new

    @classmethod
    def of(cls, template: str, *values: object) -> Self:
        """The message of a template. Its `{}` are the values, in order; `{name}` is the field of this name.

        A value that is a FieldName counts as one; the fields of one that is an ErrorText are kept.
        """
        parts: list[object] = []
        remaining = iter(values)
        for literal, name, _, _ in Formatter().parse(template):
            parts.append(literal)
            if name is not None:
                parts.append(FieldName(name) if name else next(remaining))
        return cls._joined(parts)

    @classmethod
    def _joined(cls, parts: Iterable[object]) -> Self:
        text, fields = "", []
        for part in parts:
            if isinstance(part, FieldName):
                fields.append((len(text), str(part)))
            elif isinstance(part, ErrorText):
                fields += [(len(text) + at, name) for at, name in part.fields]
            text += str(part)
        return cls(text, fields)

    @classmethod
    def read(cls, text: str, fields: object) -> Self:
        """The message of a text and `fields_of` it, as JSON has them. Leaves out the fields that do not stand there."""
        kept: list[tuple[int, str]] = []
        end = 0
        for item in fields if isinstance(fields, list) else ():
            match item:
                case [int(at), str(name)] if at >= end and text.startswith(name, at):
                    kept.append((at, name))
                    end = at + len(name)
        return cls(text, kept)

    def renamed(self, names: Mapping[str, str]) -> ErrorText:
        """The message with a caller's names. `names`: field -> the caller's name for it, which may be an ErrorText."""
        parts: list[object] = []
        end = 0
        for at, field in self.fields:
            name = names.get(field, field)
            parts += [self[end:at], name if isinstance(name, ErrorText) else FieldName(name)]
            end = at + len(field)
        return self._joined([*parts, self[end:]])

    def __reduce__(self) -> tuple[type[ErrorText], tuple[str, tuple[tuple[int, str], ...]]]:
        return ErrorText, (str(self), self.fields)


def message_of(error: BaseException) -> str:
    """An error's message; an ErrorText where it was raised with one."""
    first = error.args[0] if len(error.args) == 1 else None
    return first if isinstance(first, ErrorText) else str(error)


def fields_of(message: str) -> list[list[int | str]]:
    """The fields that a message names, for JSON: [index in the text, field] of each."""
    return [[at, name] for at, name in message.fields] if isinstance(message, ErrorText) else []


def renamed(message: str, names: Mapping[str, str]) -> str:
    """A message with a caller's names where it has fields; see ErrorText."""
    return message.renamed(names) if isinstance(message, ErrorText) else message


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class EngineClosedError(EngineError):
    """The engine takes no requests any more: it was closed, or is lost. Another one may take them."""


class RequestError(EngineError, ValueError):
    """A request that cannot be run as it was asked; the engine is unharmed.

    `param` names the field at fault (None when it is the request as a whole). `code` is for programs:
    "invalid_value", "invalid_type", "context_length_exceeded", "kv_capacity_exceeded" or "duplicate_request".
    `message` is an ErrorText where it names fields that a caller may know by other names.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ModelError(EngineError):
    """A model folder that cannot be served; the message names the file, tensor or setting at fault."""


class AdapterRoomError(ModelError):
    """An adapter for which the loaded ones leave no room. `nbytes`: what it takes."""

    def __init__(self, message: str, nbytes: int) -> None:
        super().__init__(message)
        self.nbytes = nbytes


class DeviceLostError(EngineError):
    """The device no longer works for this process. Only a new process can use it."""


def brief(error: BaseException) -> str:
    """The exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
