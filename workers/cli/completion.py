"""`penstock completion`: scripts that make a shell complete penstock's commands, options and models."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from workers.cli.commands import COMPLETE, Commands
from workers.cli.exits import PROCESS_STATUS


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
