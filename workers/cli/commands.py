"""The `penstock` command: its root and entry point, how modules add their commands, and `penstock completion`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from typer import Typer
from typer.core import TyperCommand
from typer.models import CommandFunctionType

from engine.confined.seal import make_undumpable
from workers.cli.exits import PROCESS_STATUS, Exit
from workers.cli.terminal import guarded_stdout
from workers.errors import Refused

#: The environment variable that a shell sets when it asks for completions.
COMPLETE: Final = "_PENSTOCK_COMPLETE"


class Plain(TyperCommand):
    """A command whose --help is plain text: Typer's table of options cuts long names on a terminal of 80 columns."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings | {"rich_markup_mode": None})


class Commands(Typer):
    """Commands that --help lists in a panel. `status`: their exit statuses. `group`: the command that they are below,
    and `group_help` its help; None: they stand by themselves."""

    def __init__(self, panel: str, status: str, group: str | None = None, group_help: str | None = None) -> None:
        super().__init__(name=group, help=group_help, no_args_is_help=True, rich_help_panel=panel)
        self.info.rich_help_panel = panel  # the root reads it there, and Typer does not put it there
        self._panel, self._status = None if group else panel, status

    def shown(
        self, example: str, name: str | None = None, *, status: str | None = None
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Add a command, with the example that its --help shows. `name`: unset, the function's."""
        epilog = f"Example: {example}\n\n{status or self._status}"
        return self.command(name, cls=Plain, epilog=epilog, rich_help_panel=self._panel)


def root() -> typer.Typer:
    """The command; modules with subcommands add them to it."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,  # `penstock completion` prints the scripts
        pretty_exceptions_show_locals=False,
        help="Event-driven, serverless LLM inference on a queue.",
        epilog="Begin with: penstock up -- then, in another terminal: penstock chat tiny",
    )
    app.callback()(_root)
    return app


def _version(requested: bool) -> None:
    if requested:
        from producers.release import release

        typer.echo(release())
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(app: typer.Typer) -> None:
    """Run the command that the process was given."""
    make_undumpable()  # its environment and memory hold passwords, and it has children that run what others wrote
    if COMPLETE in os.environ:
        from typer._completion_classes import completion_init

        completion_init()  # registers typer's answers to shells; its own completion options would do it otherwise
    try:
        with guarded_stdout():
            app(prog_name="penstock")  # also under python -m workers.cli: shells complete by this name
    except Refused as refused:
        typer.echo(f"penstock: {refused}", err=True)
        sys.exit(refused.status)
    except KeyboardInterrupt:  # outside any command
        sys.exit(Exit.INTERRUPTED)


class Shell(StrEnum):
    """Shells that have a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


app = Commands("Shell", PROCESS_STATUS)


@app.shown("penstock completion bash > ~/.local/share/bash-completion/completions/penstock")
def completion(shell: Annotated[Shell, typer.Argument(help="The shell to print a script for.")]) -> None:
    """Print a shell's completion script. For this session: eval "$(penstock completion bash)"."""
    from typer._completion_shared import get_completion_script

    typer.echo(get_completion_script(prog_name="penstock", complete_var=COMPLETE, shell=shell))
