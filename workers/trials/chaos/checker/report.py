"""A run's report, as data and as a table for docs/how/reliability.md, and how long streams stopped after a kill.

A kill stops the streams that its worker had claimed or fetched. A stream's gap runs from the kill to its next token in
the store, with or without a reader. If the next worker is killed before it makes that token, the gap begins again; the
report counts such streams and gives only the last gap. If no worker at all served at some moment between the lease's
end and the token, the stream waited for a worker to start; such gaps are reported apart.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from workers.trials.chaos.checker.case import Case, History, Violation, tokens_of

#: Gap (s) of a stream that did not resume while it was watched: the true one is at least as long.
LONG_S = 120.0
#: Longest time (s) after the lease's end in which a killed worker's stream must resume.
MARGIN_S = 2.0
#: Rules whose violations mean that a task or part of its output was lost.
_LOST = ("accepted_tasks_end", "accepted_cancels_win", "links_ran")


@dataclass(slots=True)
class Gaps:
    """Gaps in seconds. `served`: while some worker served. `unserved`: while none did.

    `observed`: all gaps as readers saw them; some readers or their gateways were killed as well.
    """

    served: list[float] = field(default_factory=list)
    unserved: list[float] = field(default_factory=list)
    observed: list[float] = field(default_factory=list)
    struck_again: int = 0

    @classmethod
    def of(cls, case: Case) -> Gaps:
        gaps, history = cls(), case.history
        kills = [line for line in history.faults if line["e"] == "fault" and line.get("stopped")]
        without = _without_workers(history)
        for number, kill in enumerate(kills):
            for task_id, length in kill["stopped"].items():
                if any(other["stopped"].get(task_id) == length for other in kills[number + 1 :]):
                    gaps.struck_again += 1
                elif not _ended_by_others(case, task_id, length):
                    gaps._add(history, kill, task_id, length, without)
        return gaps

    def _add(
        self, history: History, kill: dict[str, Any], task_id: str, length: int, without: list[tuple[float, float]]
    ) -> None:
        began = float(kill["stood"])
        resumed = history.resumed.get((task_id, length), began + LONG_S)
        free = kill["t"] + kill.get("lease_left", 0.0)
        waited = any(start < resumed and end > free for start, end in without)
        (self.unserved if waited else self.served).append(resumed - began)
        observed = history.by_id.get(task_id)
        if read_at := next(
            (at for at, position, _ in (observed.entries if observed else ()) if position >= length), None
        ):
            self.observed.append(read_at - began)


def _ended_by_others(case: Case, task_id: str, length: int) -> bool:
    """Whether a cancel or a deadline ended the stream at this length, without another token."""
    stream = case.streams.get(task_id) or case.stores.streams.get(task_id) or []
    last = stream[length][1] if length < len(stream) else None
    return isinstance(last, dict) and last.get("end") not in (None, "completed")


def _without_workers(history: History) -> list[tuple[float, float]]:
    """The spans (from, to) in which no worker served, as far as the journals show."""
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


@dataclass(slots=True)
class Report:
    """The figures of one run."""

    command: str
    seed: int
    lease: float
    seconds: float
    violations: list[Violation]
    tasks: int = 0
    tokens: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    vias: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    gaps: Gaps = field(default_factory=Gaps)
    compared: int = 0
    """Choices that were compared with the run without faults."""
    keys: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    """Refused requests, by the code of the answer."""
    spied: int = 0
    """Requests about another tenant's task."""

    @classmethod
    def of(cls, case: Case, violations: list[Violation], *, command: str, seed: int, lease: float) -> Report:
        history = case.history
        phases = history.phases
        seconds = phases.get("calm", 0.0) - phases.get("load", 0.0)
        report = cls(command, seed, lease, seconds, violations)
        for task_id, stream, record in case.ended():
            observed = history.by_id.get(task_id)
            if observed is not None and observed.quiet:
                continue
            report.tasks += 1
            report.tokens += sum(tokens_of([entry for _, entry in stream]).values())
            report.statuses[record.get("status", "?")] += 1
            report.vias[observed.via if observed else "other"] += 1
            if observed is not None and observed.variant in case.outputs:
                report.compared += len(case.outputs[observed.variant])
        for line in history.faults:
            if line["e"] == "fault":
                report.faults[line["kind"]] += 1
                if line["kind"] == "kill":
                    report.kills[line["role"]] += 1
        report.gaps = Gaps.of(case)
        report.keys = sum(not name.startswith("tenant:") for name in history.keys)
        report.spied = len(history.spied)
        for observed in history.tasks.values():
            report.refusals.update(_code(line) for line in observed.refused)
        return report

    @property
    def fine(self) -> bool:
        return not self.violations

    def count(self, *rules: str) -> int:
        """Number of tasks, processes and keys that broke these rules."""
        return len({violation.subject for violation in self.violations if violation.rule in rules})

    def json(self) -> dict[str, Any]:
        """The report as data."""
        gaps = self.gaps
        return {
            "command": self.command,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "lease_s": self.lease,
            "kills": dict(self.kills),
            "faults": dict(self.faults),
            "tasks": self.tasks,
            "tokens": self.tokens,
            "statuses": dict(self.statuses),
            "asked_through": dict(self.vias),
            "lost": self.count(*_LOST),
            "holes_or_doubles": self.count("streams_are_whole"),
            "readers_misled": self.count("readers_are_given_the_stream"),
            "choices_compared": self.compared,
            "outputs_different": self.count("outputs_equal_the_quiet_run"),
            "streams_stopped": len(gaps.served) + len(gaps.unserved),
            "struck_again": gaps.struck_again,
            "gap_s": quantiles(gaps.served),
            "gaps_over_lease_and_margin": sum(gap > self.lease + MARGIN_S for gap in gaps.served),
            "without_any_worker": {"streams": len(gaps.unserved), **quantiles(gaps.unserved)},
            "gap_seen_s": quantiles(gaps.observed),
            "keys": self.keys,
            "refusals": dict(self.refusals),
            "asked_by_strangers": self.spied,
            "violations": [str(violation) for violation in self.violations],
        }

    def _about_keys(self) -> list[tuple[str, str]]:
        refusals = ", ".join(f"{n} {code}" for code, n in self.refusals.most_common()) or "none"
        return [
            ("API keys; requests that they refused", f"{self.keys}; {refusals}"),
            ("keys and tenants whose account differs from their streams", str(self.count("accounts_are_the_streams"))),
            (
                "keys that had more than a limit; refused tasks that were made",
                f"{self.count('limits_hold')}; {self.count('refusals_make_nothing')}",
            ),
            ("tasks that another tenant saw", f"{self.count('tenants_are_apart')}, in {self.spied:,} requests"),
        ]

    def markdown(self) -> str:
        """The report as a table, below its command."""
        head = [(f"seed {self.seed}, lease {self.lease:g} s", ""), ("---", "---")]
        rows = [*head, *self._about_run(), *self._about_gaps(), *(self._about_keys() if self.keys else ())]
        rows.append(("anything else wrong", str(len(self.violations))))
        table = "\n".join(f"| {name} | {value} |" for name, value in rows)
        return f"    {self.command}\n\n{table}\n"

    def _about_run(self) -> list[tuple[str, str]]:
        figures = self.json()
        kills = ", ".join(f"{count} {role}" for role, count in sorted(self.kills.items())) or "none"
        others = ", ".join(f"{n} {kind}" for kind, n in sorted(self.faults.items()) if kind != "kill") or "none"
        states = ", ".join(f"{n} {status}" for status, n in self.statuses.most_common())
        return [
            ("kill -9", f"{sum(self.kills.values())} ({kills}), over {self.seconds:.0f} s"),
            ("other faults", others),
            ("tasks, tokens", f"{self.tasks:,} and {self.tokens:,}"),
            ("final states", states),
            ("tasks lost", str(figures["lost"])),
            ("streams with a hole or a token twice", str(figures["holes_or_doubles"])),
            ("readers given anything else than the stream", str(figures["readers_misled"])),
            (
                "outputs that differ from the run in quiet",
                f"{figures['outputs_different']} of {self.compared:,} choices",
            ),
        ]

    def _about_gaps(self) -> list[tuple[str, str]]:
        figures = self.json()
        return [
            (
                "open streams whose worker was killed",
                f"{figures['streams_stopped']:,}; of {figures['struck_again']:,} the next one, too, before it made "
                "a token",
            ),
            (
                "from the (last) kill to the next token (p50, p95, max)",
                f"{_spread(figures['gap_s'])}, of a lease of {self.lease:g} s; "
                f"{figures['gaps_over_lease_and_margin']} took longer than that and {MARGIN_S:g} s",
            ),
            (
                "the same, where every worker was down at a time after the lease's end",
                f"{figures['without_any_worker']['streams']} streams: {_spread(figures['without_any_worker'])}",
            ),
            (
                "the same of all, as readers saw it, who and whose gateway were killed as well",
                _spread(figures["gap_seen_s"]),
            ),
        ]


def _code(refused: dict[str, Any]) -> str:
    """The code of a refusal, whose answer may have been cut."""
    match = re.search(r'"code": ?"(\w+)"', str(refused["error"]))
    return match[1] if match else str(refused["status"])


def _spread(gap: dict[str, Any]) -> str:
    return f"{gap['p50']}, {gap['p95']}, {gap['max']} s" if gap["max"] is not None else "none"


def quantiles(values: list[float]) -> dict[str, float | None]:
    """p50, p95 and max."""
    ordered, last = sorted(values), len(values) - 1
    parts = (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
    return {name: round(ordered[int(part * last)], 2) if ordered else None for name, part in parts}
