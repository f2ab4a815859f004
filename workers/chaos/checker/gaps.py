"""Measures how long streams stopped after their worker was killed.

A kill stops the streams that its worker had claimed or fetched. A stream's gap runs from the kill to its next token in
the store, with or without a reader. If the next worker is killed before it makes that token, the gap begins anew; the
report counts such streams and gives only the last gap. If no worker at all served at some moment between the lease's
end and the token, the stream waited for a worker to start; such gaps are reported apart.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from workers.chaos.checker.case import Case
from workers.chaos.checker.history import History

#: Gap (s) of a stream that did not resume while it was watched: the true one is at least as long.
LONG_S = 120.0


@dataclass(slots=True)
class Gaps:
    """Gaps in seconds. `served`: while some worker served. `unserved`: while none did.

    `seen`: all gaps as readers saw them; some readers or their gateways were killed as well.
    """

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
    """Whether a cancel or a deadline ended the stream at this length, without another token."""
    stream = case.streams.get(task_id) or case.stores.streams.get(task_id) or []
    last = stream[length][1] if length < len(stream) else None
    return isinstance(last, dict) and last.get("end") not in (None, "completed")


def _without_workers(history: History) -> list[tuple[float, float]]:
    """The spans (from, to) in which no worker served, as far as the journals tell."""
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
