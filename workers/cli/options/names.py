"""Options' names: former ones, and those of a command line that is said again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import typer

#: Options' former names -> today's. They work for one more release, and --help does not show them.
RENAMED: Final = {
    "alone": "exclusive",
    "cache": "cache-dir",
    "drain": "drain-timeout",
    "folder": "report-dir",
    "head": "head-bits",
    "i-know": "confirm",
    "kills": "min-kills",
    "letters-kept": "dead-letter-days",
    "longest": "max-output-tokens",
    "max-deaths": "max-worker-deaths",
    "open-tasks": "concurrency",
    "pause": "max-interval",
    "replay": "plan",
    "shared-prefix": "shared-prefix-tokens",
    "spot-endpoint": "spot-metadata-url",
    "spot-notice": "spot-provider",
    "spread": "length-spread",
    "step-limit": "max-step-seconds",
    "unhurried-tokens": "max-non-priority-step-tokens",
    "warm-up": "warm-up-requests",
}


def todays_name(name: str) -> str:
    """An option's name of today, for a name that may be a former one."""
    return RENAMED.get(name, name)


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
