"""Exit statuses that scripts can rely on and --help shows, the exception that carries one, a guard for imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from workers import errors

if TYPE_CHECKING:
    from typer import Typer


class Exit(IntEnum):
    """A command's exit statuses."""

    OK = 0
    TASK_FAILED = 1
    REFUSED = errors.REFUSED
    UNREACHABLE = 3
    TIMEOUT = 4
    INTERRUPTED = 130


#: Last lines of --help pages: callers' commands, operators' commands, processes.
CALLER_STATUS: Final = (
    "Exit status: 0 done, 1 the task failed or was cancelled, 2 refused, 3 no answer from the gateway, 4 timed out, "
    "130 interrupted."
)
OPERATOR_STATUS: Final = (
    "Exit status: 0 done, 1 failed, 2 refused, 3 no answer from broker, store or gateway, 130 interrupted."
)
PROCESS_STATUS: Final = "Exit status: 0 stopped as told, 1 failed, 2 refused to start, 130 stopped at once."


#: A command, the example that its --help shows, and its exit statuses where they are not those of its neighbours.
Command = tuple[Callable[..., None], str] | tuple[Callable[..., None], str, str]


def add_commands(app: Typer, status: str, commands: Mapping[str, Command], panel: str | None = None) -> None:
    """Register commands by their names. `status`: the last line of their --help. `panel`: where --help lists them."""
    for name, (command, example, *own) in commands.items():
        app.command(name, epilog=f"Example: {example}\n\n{own[0] if own else status}", rich_help_panel=panel)(command)


def add_group(
    app: Typer, name: str, about: str, status: str, commands: Mapping[str, Command], panel: str = "Operations"
) -> None:
    """Register a command with these commands below it."""
    from typer import Typer

    group = Typer(no_args_is_help=True, help=about)
    add_commands(group, status, commands)
    app.add_typer(group, name=name, rich_help_panel=panel)


class Failure(Exception):
    """Ends the command with a message on standard error. Messages say what to do."""

    def __init__(self, message: str, status: Exit = Exit.REFUSED) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def needs(*extras: str) -> Iterator[None]:
    """Imports within this block need these extras of the distribution. Raises Failure, which names all of them."""
    try:
        yield
    except ModuleNotFoundError as error:
        wanted = f"penstock[{','.join(extras)}]"
        raise Failure(f"{error.name} is not installed; it comes with: pip install '{wanted}'") from error
