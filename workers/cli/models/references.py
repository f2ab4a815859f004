"""Finds the models that are named on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from workers.cli.exits import Failure, needs
from workers.cli.terminal.show import note

if TYPE_CHECKING:
    from workers.library import Found

#: The help text of MODEL, and the two ways to give one.
MODEL: Final = "A folder, a bundled or pulled model, or hf://OWNER/NAME[@REVISION]; NAME=MODEL gives it another name."


def complete_model(incomplete: str) -> list[str]:
    """Names of models on this machine that begin with `incomplete`, for shell completion."""
    from workers.library.reference import known

    return [name for name in known() if name.startswith(incomplete)]


Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL, autocompletion=complete_model)]
ModelOption = Annotated[str, typer.Option(help=MODEL, autocompletion=complete_model)]


def find_models(references: Sequence[str], say: Callable[[str], None] = note) -> tuple[Found, ...]:
    """The named models; those on a hub are pulled first. Raises Refused, also for two models of one name.

    The command does this, not each process that serves a model: a model is downloaded once, with visible progress, and
    Ctrl-C stops the download.
    """
    from workers.library import find_model, name_of

    names = [name_of(reference) for reference in references]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Failure(f"two models are named {twice!r}: write NAME=MODEL to give one another name")
    with needs("worker"):
        return tuple(find_model(reference, say) for reference in references)
