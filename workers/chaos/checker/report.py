"""A run's report, as data and as a table for docs/how/reliability.md."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from workers.chaos.checker.case import Case, Violation
from workers.chaos.checker.gaps import Gaps
from workers.chaos.checker.streams import tokens_of

#: Longest time (s) after the lease's end in which a killed worker's stream must resume.
MARGIN_S = 2.0
#: Rules whose violations mean that a task or part of its output was lost.
_LOST = ("accepted_tasks_end", "accepted_cancels_win", "links_ran")


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
        found = cls(command, seed, lease, seconds, violations)
        for task_id, stream, record in case.ended():
            seen = history.by_id.get(task_id)
            if seen is not None and seen.quiet:
                continue
            found.tasks += 1
            found.tokens += sum(tokens_of([entry for _, entry in stream]).values())
            found.statuses[record.get("status", "?")] += 1
            found.vias[seen.via if seen else "other"] += 1
            if seen is not None and seen.variant in case.outputs:
                found.compared += len(case.outputs[seen.variant])
        for line in history.faults:
            if line["e"] == "fault":
                found.faults[line["kind"]] += 1
                if line["kind"] == "kill":
                    found.kills[line["role"]] += 1
        found.gaps = Gaps.of(case)
        found.keys = sum(not name.startswith("tenant:") for name in history.keys)
        found.spied = len(history.spied)
        for seen in history.tasks.values():
            found.refusals.update(_code(line) for line in seen.refused)
        return found

    @property
    def fine(self) -> bool:
        return not self.violations

    def count(self, *rules: str) -> int:
        """Number of tasks, processes and keys that broke these rules."""
        return len({violation.about for violation in self.violations if violation.rule in rules})

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
            "gap_seen_s": quantiles(gaps.seen),
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
        said = self.json()
        kills = ", ".join(f"{count} {role}" for role, count in sorted(self.kills.items())) or "none"
        others = ", ".join(f"{n} {kind}" for kind, n in sorted(self.faults.items()) if kind != "kill") or "none"
        states = ", ".join(f"{n} {status}" for status, n in self.statuses.most_common())
        return [
            ("kill -9", f"{sum(self.kills.values())} ({kills}), over {self.seconds:.0f} s"),
            ("other faults", others),
            ("tasks, tokens", f"{self.tasks:,} and {self.tokens:,}"),
            ("final states", states),
            ("tasks lost", str(said["lost"])),
            ("streams with a hole or a token twice", str(said["holes_or_doubles"])),
            ("readers given anything else than the stream", str(said["readers_misled"])),
            ("outputs that differ from the run in quiet", f"{said['outputs_different']} of {self.compared:,} choices"),
        ]

    def _about_gaps(self) -> list[tuple[str, str]]:
        said = self.json()
        return [
            (
                "open streams whose worker was killed",
                f"{said['streams_stopped']:,}; of {said['struck_again']:,} the next one, too, before it made a token",
            ),
            (
                "from the (last) kill to the next token (p50, p95, max)",
                f"{_told(said['gap_s'])}, of a lease of {self.lease:g} s; "
                f"{said['gaps_over_lease_and_margin']} took longer than that and {MARGIN_S:g} s",
            ),
            (
                "the same, where every worker was down at a time after the lease's end",
                f"{said['without_any_worker']['streams']} streams: {_told(said['without_any_worker'])}",
            ),
            (
                "the same of all, as readers saw it, who and whose gateway were killed as well",
                _told(said["gap_seen_s"]),
            ),
        ]


def _code(refused: dict[str, Any]) -> str:
    """The code of a refusal, whose answer may have been cut."""
    found = re.search(r'"code": ?"(\w+)"', str(refused["error"]))
    return found[1] if found else str(refused["status"])


def _told(gap: dict[str, Any]) -> str:
    return f"{gap['p50']}, {gap['p95']}, {gap['max']} s" if gap["max"] is not None else "none"


def quantiles(values: list[float]) -> dict[str, float | None]:
    """p50, p95 and max."""
    ordered, last = sorted(values), len(values) - 1
    parts = (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
    return {name: round(ordered[int(part * last)], 2) if ordered else None for name, part in parts}
