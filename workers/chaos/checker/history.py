"""What was asked, answered and done in a run, read from its journals.

A journal is a file of JSON lines, written by one process, which may have been killed at it: its last line may be torn.
Each line has `t` (s, the machine's monotonic clock) and `e`, what it is of:

| `e` | and |
| --- | --- |
| `ask` | a task is about to be submitted: `k` its number, `v` what it generates, `via`, `task` its fields; `quiet` |
| `accepted`, `maybe` | it was answered, or whether it was taken is not known: `k`, `id` |
| `refused` | it was not taken: `k`, `status` (HTTP's), `error` |
| `came`, `left` | a reader of `id` begins at position `from`; ends, `why` |
| `got` | `entries` that a reader of `id` was given: `[position, entry]` each, entries as they stand in a stream |
| `final` | what a poll of `id` answered: `body` |
| `text` | what a caller who waits was told: `k`, `texts` a choice, `whole` |
| `cancel` | the end of `id` is asked for (`accepted` null), or was, and answered: `accepted`, `status` |
| `fault` | a fault began: `kind`, `target`, `process`, `role`; of a worker's kill also the next three |
| | `stood`: since when it was held still; `lease_left` (s) then |
| | `stopped`: the streams that stood still with it, and how many entries each had |
| `healed` | it is over |
| `resumed` | the stream of `id`, which stood still with `length` entries, has more |
| `serves` | a process is of use from here on: `target`, `process`, `role` |
| `exit` | a process ended: `target`, `process`, `role`, `code`, `asked`, `served` |
| `phase` | from here on: `name` |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Seen:
    """One task, as whoever asked for it saw it."""

    number: int
    variant: int
    via: str
    task: dict[str, Any]
    quiet: bool = False
    id: str | None = None
    accepted: bool = False
    """Somebody was told so."""
    refused: list[dict[str, Any]] = field(default_factory=list)
    entries: list[tuple[float, int, Any]] = field(default_factory=list)
    """When, position, entry: in the order in which readers were given them."""
    visits: list[tuple[int, int]] = field(default_factory=list)
    """Of each reader that came: where it began, and how many entries had been given before."""
    finals: list[dict[str, Any]] = field(default_factory=list)
    cancels: list[bool | None] = field(default_factory=list)
    texts: tuple[list[str], bool] | None = None


@dataclass(slots=True)
class History:
    """A run's tasks, by number, and what was done to whom, in the order of time."""

    tasks: dict[tuple[bool, int], Seen] = field(default_factory=dict)
    """By whether it belongs to the run in quiet, and number."""
    by_id: dict[str, Seen] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    exits: list[dict[str, Any]] = field(default_factory=list)
    serves: list[dict[str, Any]] = field(default_factory=list)
    resumed: dict[tuple[str, int], float] = field(default_factory=dict)
    """When, by id and how long the stream was."""
    phases: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> History:
        """All journals of a folder. Raises ValueError for a line that is none, but for a torn last one."""
        found = cls()
        for path in sorted(folder.glob("*.jsonl")):
            found.extend(lines_of(path))
        found.faults.sort(key=lambda line: float(line["t"]))
        return found

    def extend(self, lines: Iterable[dict[str, Any]]) -> None:
        """Of one process, in its order. What a process knows of a task, an earlier one of the same name said first."""
        for line in lines:
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        kind = line["e"]
        if kind == "ask":
            quiet = bool(line.get("quiet"))
            seen = Seen(line["k"], line["v"], line["via"], line["task"], quiet)
            self.tasks[quiet, line["k"]] = seen
        elif kind in ("accepted", "maybe"):
            seen = self.tasks[bool(line.get("quiet")), line["k"]]
            seen.accepted |= kind == "accepted"
            if line["id"] is not None:
                seen.id = line["id"]
                self.by_id[line["id"]] = seen
        elif kind in ("refused", "text"):
            seen = self.tasks[bool(line.get("quiet")), line["k"]]
            if kind == "refused":
                seen.refused.append(line)
            else:
                seen.texts = line["texts"], line["whole"]
        elif kind in ("came", "got", "final", "cancel"):
            self._read(self.by_id[line["id"]], line)
        elif kind in ("fault", "healed"):
            self.faults.append(line)
        elif kind == "resumed":
            self.resumed[line["id"], line["length"]] = line["t"]
        elif kind == "exit":
            self.exits.append(line)
        elif kind == "serves":
            self.serves.append(line)
        elif kind == "phase":
            self.phases[line["name"]] = line["t"]

    @staticmethod
    def _read(seen: Seen, line: dict[str, Any]) -> None:
        if line["e"] == "came":
            seen.visits.append((line["from"], len(seen.entries)))
        elif line["e"] == "got":
            seen.entries += [(line["t"], position, entry) for position, entry in line["entries"]]
        elif line["e"] == "final":
            seen.finals.append(line["body"])
        else:
            seen.cancels.append(line["accepted"])


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """A journal's lines; a torn last one is left out, its writer was killed."""
    data = path.read_bytes()
    whole, _, _ = data.rpartition(b"\n")
    for line in whole.splitlines():
        yield json.loads(line)
