"""The `penstock` command without its subcommands, and its entry point."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from engine.confined.seal import make_undumpable
from workers.cli.completion import COMPLETE
from workers.cli.exits import Exit
from workers.cli.terminal.stdout import guarded
from workers.errors import Refused


def root() -> typer.Typer:
    """The command; modules with subcommands add them to it."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,  # `penstock completion` prints the scripts
        pretty_exceptions_show_locals=False,
        help="Event-driven, serverless LLM inference on a queue.",
        epilog="Begin with: penstock up -- then, in another terminal: penstock submit tiny 'def fibonacci(n):' "
        "--stream",
    )
    app.callback()(_root)
    return app


def _version(asked: bool) -> None:
    if asked:
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
        with guarded():
            app(prog_name="penstock")  # also under python -m workers.cli: shells complete by this name
    except Refused as refused:
        typer.echo(f"penstock: {refused}", err=True)
        sys.exit(refused.status)
    except KeyboardInterrupt:  # outside any command
        sys.exit(Exit.INTERRUPTED)
