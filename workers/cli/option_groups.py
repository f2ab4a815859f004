"""Groups of options that a command takes as one parameter, and a command line repeated for another process.

takes(engine=...) -> an option for each field of EngineConfig or SamplingParams -> the command gets one dict
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from typing import Annotated, Any, Final

import typer

from engine.config import EngineConfig
from engine.declared import Declared, declared
from engine.declared.bounds import Biases, Bound, Flag, Integer, Number, Strings, TokenIds, shown
from engine.errors import RequestError
from engine.params import SamplingParams
from workers.cli.exits import Failure
from workers.errors import Refused

#: An engine's settings that have an option, by name.
ENGINE: Final = {name: one for name, one in declared(EngineConfig).items() if one.option is not None}

#: Those of an engine that serves one request.
ENGINE_OF_ONE: Final = {name: one for name, one in ENGINE.items() if one.option and not one.option.serving}

#: A request's sampling parameters, by name.
SAMPLING: Final = declared(SamplingParams)

#: The types of options by the bounds of their fields; other fields are text.
_KINDS: Final[dict[type[Bound], Any]] = {
    Integer: int,
    Number: float,
    Flag: bool,
    Strings: list[str],
    TokenIds: list[int],
    Biases: list[str],
}


#: A declared field, or an option as typer understands it.
Option = Declared | inspect.Parameter


def takes(**groups: Collection[Option]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a group's options, in the place of its parameter of the group's name.

    The command gets that parameter as a dict of the options that were given. Its Failures name options, not fields.
    """

    def taking(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        every: list[inspect.Parameter] = []
        for one in own.parameters.values():
            options = map(_parameter, groups[one.name]) if one.name in groups else [one]
            every += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]

        @wraps(command)
        def called(**given: Any) -> None:
            for name, fields in groups.items():
                asked = {field.name: _read(field, given.pop(field.name)) for field in fields}
                given[name] = {
                    field: value for field, value in asked.items() if value is not None and value is not False
                }
            try:
                command(**given)
            except Refused as refused:
                raise Failure(_as_written(str(refused), groups.values()), refused.status) from refused

        called.__signature__ = own.replace(parameters=every)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in every}
        return called

    return taking


def options_of(command: Callable[..., None], names: Iterable[str]) -> list[inspect.Parameter]:
    """These options of another command, for one that passes them on."""
    parameters = inspect.signature(command, eval_str=True).parameters
    return [parameters[name] for name in names]


def _as_written(message: str, groups: Iterable[Collection[Option]]) -> str:
    """A message with the options in place of fields' names: words with `_`, or before `=`. Paths stay as they are."""
    fields = [one for group in groups for one in group if isinstance(one, Declared)]
    options = {field.name: _option_of(field) for field in fields}
    if not options:
        return message
    names = "|".join(name if "_" in name else f"{name}(?==)" for name in options)
    return re.sub(rf"(?<![\w/.-])({names})(?![\w/-])(?:=True)?", lambda found: options[found[1]], message)


def _option_of(field: Declared) -> str:
    assert field.option is not None
    return field.option.name or f"--{field.name.replace('_', '-')}"


def _parameter(field: Option) -> inspect.Parameter:
    """A declared field as a parameter that typer understands. A value out of bounds raises Failure."""
    if isinstance(field, inspect.Parameter):
        return field
    assert field.option is not None
    bound, name = field.bound, _option_of(field)

    def within(value: Any) -> Any:
        if value is None:
            return value
        try:
            bound.check(field.name, _read(field, value))
        except RequestError:
            raise Failure(f"{name} is {shown(value)}; it must be {bound.words}") from None
        return value

    kind = _KINDS.get(type(bound), str)
    option = typer.Option(name, help=field.option.help, metavar=field.option.metavar, callback=within)
    default = False if kind is bool else None
    annotation: Any = Annotated[kind if kind is bool else kind | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _read(field: Option, value: Any) -> Any:
    """A field's value, from its option's."""
    biases = value is not None and isinstance(field, Declared) and isinstance(field.bound, Biases)
    return dict(map(_bias, value)) if biases else value


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise Failure(f"--logit-bias is {text!r}; it must be ID=NUMBER, such as 318=-100") from None


def as_arguments(context: typer.Context, *, only: Sequence[str] = (), without: Sequence[str] = ()) -> list[str]:
    """The options of this command line, as arguments for another process.

    Left out are options with their default, and those that an environment variable carries. `only` and `without` are
    names of parameters.
    """
    argv: list[str] = []
    for option in context.command.params:
        value = context.params.get(str(option.name))
        if value is None or value == option.default or isinstance(option.envvar, str):
            continue
        if (not only or option.name in only) and option.name not in without:
            for one in value if isinstance(value, list) else [value]:
                argv += [option.opts[0]] if one is True else [option.opts[0], str(one)]
    return argv
