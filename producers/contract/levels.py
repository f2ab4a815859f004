"""Levels: what tasks ask of the release of their worker, so that two releases may serve one system together.

    a task's fields ─▶ `level_of`: the first level that can do all of it ─▶ ADMIT: the record's `level`, and its queue
    a worker's LEVEL ─▶ its lease; the queues that it takes from                       CLAIM compares the two

A release that lets tasks have something that workers of the release before cannot do raises LEVEL by one, and adds what
it is to FEATURES. Two releases may run together if one follows the other, so a worker of either can do what is up to
SHARED: the LEVEL of the release before. Tasks that need no more go to the queue of their version, as they always did.
A task that needs more goes to a queue beside it, `<version's queue>+<level>`, which no worker below that level reads.

A release that knows a new kind of message (`penstock.<kind>`, a plain Celery task's name) raises LEVEL as well, since a
worker moves a kind that it does not know into the queue of the level above its own. So a name that nobody knows rises
one level with each release that has workers, and never comes back to a worker that has moved it up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a task may need. `needed_by`: whether a task of these fields needs it. `release`: the first one
    whose workers can do it, as `--version` names it."""

    level: int
    release: str
    needed_by: Callable[[Mapping[str, Any]], bool]


#: Features added since SHARED. A release's LEVEL becomes SHARED, and these features go, with the release after it.
FEATURES: Final[list[Feature]] = []
#: The level of the release before this one.
SHARED: int = 0
#: The level of this release.
LEVEL: int = SHARED
#: The SHARED of the release before: above it, queues beside a version's may still have tasks.
EMPTIED: int = 0
#: Levels above LEVEL whose queues this release looks after, though its workers take nothing from them: messages that
#: they moved up wait there, and those of the next release's workers, if that release is taken back.
AHEAD: Final = 2
#: A queue beside another. Its version distinguishes it from a model's queue, whose name may end alike.
_BESIDE: Final = re.compile(r"(.*@[0-9A-Za-z]+(?:\.[^.@+]+)?)\+([1-9][0-9]{0,5})")


def level_of(fields: Mapping[str, Any]) -> int:
    """The level that a task of these fields needs; 0 if it needs none above SHARED."""
    return max((feature.level for feature in FEATURES if feature.needed_by(fields)), default=0)


def queue_of(queue: str, level: int) -> str:
    """The queue beside a version's or a pool's own, for tasks that need this level; with 0 the queue itself."""
    return f"{queue}+{level}" if level else queue


def split(queue: str) -> tuple[str, int]:
    """A version's or pool's queue, and the level that its tasks need: what `queue_of` was given."""
    match = _BESIDE.fullmatch(queue)
    return (match[1], int(match[2])) if match else (queue, 0)


def levels() -> range:
    """The levels of the queues beside a version's, or a pool's own, that this release knows."""
    return range(EMPTIED + 1, LEVEL + 1)


def above() -> range:
    """The levels of those queues that are looked after and may need workers of a later release (`AHEAD`)."""
    return range(LEVEL + 1, LEVEL + AHEAD + 1)


def emptied() -> range:
    """The levels whose queues no process reads any more: messages in them belong into the version's own queue."""
    return range(1, EMPTIED + 1)


def beside(queue: str) -> list[str]:
    """A version's or pool's queue, and the queues beside it."""
    return [queue, *(queue_of(queue, level) for level in levels())]


def looked_after(queue: str) -> list[str]:
    """The queues of `beside`, and those that workers of this release take nothing from."""
    return [*beside(queue), *(queue_of(queue, level) for level in above())]


def release_of(level: int) -> str:
    """The first release that can do what needs this level; empty if this release does not know."""
    return next((feature.release for feature in FEATURES if feature.level == level), "")
