"""A start of a task on a worker: what its engine did, as the worker writes it into the record's field `run:<start>`.

The field is a JSON array, in the order of `Run`'s fields: there is one in each record.

It goes along with APPEND (at the first token, and after a preemption), FINISH and RELEASE. Who dies has written what it
did until its last token.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field
from typing import Final

PREFIX: Final = "run:"
#: Starts of a task that are written; later ones are not.
MOST: Final = 32


@dataclass(frozen=True, slots=True)
class Run:
    """Times are server milliseconds."""

    owner: str
    """The worker's incarnation."""
    began: int
    """Time of the claim."""
    step: int | None = None
    """Begin of the first step that computed some of it; None: the engine had no room for it until the end."""
    last: int | None = None
    """Time of the last step that made a token of it."""
    cached: int = 0
    """Prompt tokens that the prefix cache had at that first step."""
    preemptions: int = 0
    preempted: list[tuple[int, str]] = field(default_factory=list)
    """When and why, of the first ones (`engine.request.Course`)."""
    engine_us: int = 0
    """The engine's time (microseconds) for it: its part of that of each step, by tokens. Scripts read this last one."""

    def said(self, start: int) -> str:
        """The scripts' arguments: the start's number from 1, and the field's JSON. Empty for a start past MOST."""
        return f"{start} {json.dumps(astuple(self), separators=(',', ':'))}" if 1 <= start <= MOST else ""

    @classmethod
    def parse(cls, raw: str) -> Run:
        """Raises ValueError or TypeError for what is none."""
        owner, began, step, last, cached, preemptions, preempted, *rest = json.loads(raw)
        engine_us = rest[0] if rest else 0  # a release without it
        step, last = (None if at is None else int(at) for at in (step, last))
        found = [(int(at), str(why)) for at, why in preempted]
        numbers = (began, step or 0, last or 0, cached, preemptions, engine_us, *(at for at, _ in found))
        if any(abs(int(number)) > 2**53 for number in numbers):
            raise ValueError("a number is too large")
        return cls(str(owner), int(began), step, last, int(cached), int(preemptions), found, int(engine_us))
