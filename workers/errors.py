"""Errors that keep a worker or a command from its work."""

from typing import Final

#: Exit status of a process that was refused, and would be refused again.
REFUSED: Final = 2
#: Exit status of a process to which a server gave no answer: another try may succeed.
UNREACHABLE: Final = 3


class Refused(Exception):
    """A server or a model cannot be used. The message has the reason and advice. `status`: a command's exit."""

    status: int = REFUSED


class Away(Refused):
    """A server does not answer."""

    status = UNREACHABLE
