"""The commands of one module, which the root takes over, and how their --help pages end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer import Typer
from typer.core import TyperCommand
from typer.models import CommandFunctionType


class Plain(TyperCommand):
    """A command whose --help is plain text: Typer's table of options cuts long names on a terminal of 80 columns."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings | {"rich_markup_mode": None})


class Commands(Typer):
    """Commands that --help lists in a panel. `status`: their exit statuses. `group`: the command that they are below,
    and `about` its help; None: they stand by themselves."""

    def __init__(self, panel: str, status: str, group: str | None = None, about: str | None = None) -> None:
        super().__init__(name=group, help=about, no_args_is_help=True, rich_help_panel=panel)
        self.info.rich_help_panel = panel  # the root reads it there, and Typer does not put it there
        self._panel, self._status = None if group else panel, status

    def shown(
        self, example: str, name: str | None = None, *, status: str | None = None
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Add a command, with the example that its --help shows. `name`: unset, the function's."""
        epilog = f"Example: {example}\n\n{status or self._status}"
        return self.command(name, cls=Plain, epilog=epilog, rich_help_panel=self._panel)
