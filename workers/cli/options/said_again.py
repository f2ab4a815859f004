"""Options of a command line that is said again to another process."""

from __future__ import annotations

from collections.abc import Sequence

import typer


def said_again(context: typer.Context, *, only: Sequence[str] = (), without: Sequence[str] = ()) -> list[str]:
    """The command line's options, as arguments for another command.

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
