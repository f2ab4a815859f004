"""For how long streams stood still whose worker was killed.

A kill stops the streams that its worker held, or had fetched; the clock of each runs from then to its next token, in
the store, whoever reads it. A worker that is killed before it has made that token begins the clock anew: only what the
last one cost is told, and how many were struck again. Where no worker at all was of use at some moment between the
lease's end and the token, the stream waited for one to start: such gaps are told apart.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from workers.chaos.checker.history import History
from workers.chaos.checker.rules import Case

#: What did not go on while it was looked at has taken at least so long (s).
LONG_S = 120.0


@dataclass(slots=True)
class Gaps:
    """Times in seconds. `served`: while some worker was of use; `unserved`: while none was; `seen`: both, as their
    readers saw it, some of whom, or whose gateway, were killed as well."""

    served: list[float] = field(default_factory=list)
    unserved: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    struck_again: int = 0

    @classmethod
    def of(cls, case: Case) -> Gaps:
        found, history = cls(), case.history
        kills = [line for line in history.faults if line["e"] == "fault" and line.get("stopped")]
        without = _without_workers(history)
        for number, kill in enumerate(kills):
            for task_id, length in kill["stopped"].items():
                if any(other["stopped"].get(task_id) == length for other in kills[number + 1 :]):
                    found.struck_again += 1
                elif not _ended_by_others(case, task_id, length):
                    found._add(history, kill, task_id, length, without)
        return found

    def _add(
        self, history: History, kill: dict[str, Any], task_id: str, length: int, without: list[tuple[float, float]]
    ) -> None:
        began = float(kill["stood"])
        resumed = history.resumed.get((task_id, length), began + LONG_S)
        free = kill["t"] + kill.get("lease_left", 0.0)
        waited = any(start < resumed and end > free for start, end in without)
        (self.unserved if waited else self.served).append(resumed - began)
        seen = history.by_id.get(task_id)
        if came := next((at for at, position, _ in (seen.entries if seen else ()) if position >= length), None):
            self.seen.append(came - began)


def _ended_by_others(case: Case, task_id: str, length: int) -> bool:
    """A cancel or a deadline ended it where it stood: nobody made a token."""
    stream = case.streams.get(task_id) or case.stores.streams.get(task_id) or []
    last = stream[length][1] if length < len(stream) else None
    return isinstance(last, dict) and last.get("end") not in (None, "completed")


def _without_workers(history: History) -> list[tuple[float, float]]:
    """When no worker was of use, from and to; as far as it was written down who is."""
    changes = [(line["t"], line["process"], True) for line in history.serves if line["role"] == "worker"]
    changes += [(line["t"], line["process"], False) for line in history.exits if line["role"] == "worker"]
    changes += [
        (line["t"], line["process"], False)
        for line in history.faults
        if line["e"] == "fault" and line["kind"] in ("kill", "drain") and line.get("role") == "worker"
    ]
    if not history.serves:
        return []
    changes.sort()
    up, spans = set[str](), []
    for (at, process, serves), (until, _, _) in itertools.pairwise([*changes, (float("inf"), "", False)]):
        up = up | {process} if serves else up - {process}
        if not up:
            spans.append((at, until))
    return spans
