"""`penstock completion`: scripts that make a shell complete penstock's commands, options and models."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import typer

from workers.cli.exits import PROCESS_STATUS


class Shell(StrEnum):
    """Shells that have a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


#: The environment variable that a shell sets when it asks for completions.
COMPLETE: Final = "_PENSTOCK_COMPLETE"
#: Each script asks penstock itself. It answers for the shell that _PENSTOCK_COMPLETE names (typer's own protocol).
_SCRIPTS: Final = {
    Shell.BASH: """\
_penstock_completion() {
    local IFS=$'\\n'
    COMPREPLY=($(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD _PENSTOCK_COMPLETE=complete_bash "$1"))
}
complete -o default -F _penstock_completion penstock""",
    Shell.ZSH: """\
#compdef penstock
_penstock_completion() {
    eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _PENSTOCK_COMPLETE=complete_zsh penstock)
}
compdef _penstock_completion penstock""",
    Shell.FISH: """\
function __penstock_complete
    set -lx _PENSTOCK_COMPLETE complete_fish
    set -lx _TYPER_COMPLETE_FISH_ACTION $argv[1]
    set -lx _TYPER_COMPLETE_ARGS (commandline -cp)
    penstock
end
complete --command penstock --no-files --condition '__penstock_complete is-args' \
    --arguments '(__penstock_complete get-args)'""",
}


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    example = "Example: penstock completion bash > ~/.local/share/bash-completion/completions/penstock"
    app.command(epilog=f"{example}\n\n{PROCESS_STATUS}", rich_help_panel="Shell")(completion)


def completion(shell: Annotated[Shell, typer.Argument(help="The shell to print a script for.")]) -> None:
    """Print a shell's completion script. For this session: eval "$(penstock completion bash)"."""
    typer.echo(_SCRIPTS[shell])
