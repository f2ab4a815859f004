"""The evidence of a run, the outputs in its streams, and the violations that rules find.

The history of a run, and the journals that it is read from: requests, answers and faults.

A journal is a file of JSON lines by one process. It survives its writer's death: a written line is in the kernel's page
cache. The process may have been killed while writing, so the last line may be torn. Each line has `t` (s, the machine's
monotonic clock) and `e`, its kind:

| `e` | and |
| --- | --- |
| `key` | an API key of the run, or all of a tenant's (`tenant:<name>`): `id`, `tenant`, `limits` (limit -> most) |
| `ask` | a task is about to be submitted: `k` its number, `v` its variant, `via`, `task` its fields; `quiet`, `key` |
| `accepted`, `maybe` | the task was accepted, or nobody knows whether it was: `k`, `id` |
| `refused` | the task was refused: `k`, `status` (HTTP's), `error`, `attempt` (as in the metadata) |
| `came`, `left` | a reader of `id` begins at position `from`; ends, `why` |
| `got` | a reader of `id` got `entries`: `[position, entry]` each, entries as in the stream |
| `final` | the answer to a poll of `id`: `body` |
| `text` | the answer to a waiting caller: `k`, `texts` (one a choice), `whole` |
| `cancel` | a cancel of `id` is about to be sent (`accepted` null), or was answered: `accepted`, `status` |
| `spied` | the key `by`, of another tenant, asked about `id`, and was answered `status` |
| `listed` | the key `by` was given a list of tasks: `ids` |
| `fault` | a fault began: `kind`, `target`, `process`, `role`; for a worker's kill also the next three |
| | `stood`: when the worker was stopped; `lease_left` (s) at that time |
| | `stopped`: the streams that stopped with it -> their lengths |
| `healed` | a fault is over |
| `resumed` | the stream of `id`, stopped at `length` entries, has more |
| `serves` | a process serves from now on: `target`, `process`, `role` |
| `exit` | a process ended: `target`, `process`, `role`, `code`, `asked`, `served` |
| `phase` | a phase begins: `name` |
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from workers.trials.chaos.checker.store import Ledger, Stores, Stream

#: Kinds of lines that are kept as they are -> where.
_LISTS: Final = {
    "fault": "faults",
    "healed": "faults",
    "exit": "exits",
    "serves": "serves",
    "spied": "spied",
    "listed": "listed",
}


@dataclass(frozen=True, slots=True)
class Key:
    """An API key of the run. `limits`: limit -> the most that it may have."""

    tenant: str
    limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class ObservedTask:
    """One task as its caller saw it."""

    number: int
    variant: int
    via: str
    task: dict[str, Any]
    quiet: bool = False
    key: str | None = None
    """The id of the API key that submitted it."""
    id: str | None = None
    accepted: bool = False
    """Whether a caller got the answer that the task was accepted."""
    refused: list[dict[str, Any]] = field(default_factory=list)
    entries: list[tuple[float, int, Any]] = field(default_factory=list)
    """(time, position, entry), in the order in which readers got them."""
    visits: list[tuple[int, int]] = field(default_factory=list)
    """For each reader: its start position, and the number of entries that earlier readers got."""
    finals: list[dict[str, Any]] = field(default_factory=list)
    cancels: list[bool | None] = field(default_factory=list)
    texts: tuple[list[str], bool] | None = None


@dataclass(slots=True)
class History:
    """A run's tasks and faults, in the order of time."""

    tasks: dict[tuple[bool, int], ObservedTask] = field(default_factory=dict)
    """(in the run without faults, number) -> task."""
    by_id: dict[str, ObservedTask] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    exits: list[dict[str, Any]] = field(default_factory=list)
    serves: list[dict[str, Any]] = field(default_factory=list)
    resumed: dict[tuple[str, int], float] = field(default_factory=dict)
    """(task id, length of the stopped stream) -> time at which it resumed."""
    phases: dict[str, float] = field(default_factory=dict)
    keys: dict[str, Key] = field(default_factory=dict)
    """The run's API keys, by their ids."""
    spied: list[dict[str, Any]] = field(default_factory=list)
    listed: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> History:
        """Read all journals of a folder. Raises ValueError for a bad line, except a torn last one."""
        history = cls()
        for path in sorted(folder.glob("*.jsonl")):
            history.extend(lines_of(path))
        history.faults.sort(key=lambda line: float(line["t"]))
        return history

    def extend(self, lines: Iterable[dict[str, Any]]) -> None:
        """Add one process's lines, in order. Add journals of earlier processes of the same name first."""
        for line in lines:
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        kind, quiet = line["e"], bool(line.get("quiet"))
        if kind in _LISTS:
            getattr(self, _LISTS[kind]).append(line)
        elif kind == "ask":
            self.tasks[quiet, line["k"]] = ObservedTask(
                line["k"], line["v"], line["via"], line["task"], quiet, line.get("key")
            )
        elif kind in ("accepted", "maybe", "refused", "text"):
            self._answered(self.tasks[quiet, line["k"]], line)
        elif kind in ("came", "got", "final", "cancel"):
            self._read(self.by_id[line["id"]], line)
        elif kind == "resumed":
            self.resumed[line["id"], line["length"]] = line["t"]
        elif kind == "key":
            self.keys[line["id"]] = Key(line["tenant"], line["limits"])
        elif kind == "phase":
            self.phases[line["name"]] = line["t"]

    def _answered(self, observed: ObservedTask, line: dict[str, Any]) -> None:
        if line["e"] == "refused":
            observed.refused.append(line)
        elif line["e"] == "text":
            observed.texts = line["texts"], line["whole"]
        else:
            observed.accepted |= line["e"] == "accepted"
            if line["id"] is not None:
                observed.id = line["id"]
                self.by_id[line["id"]] = observed

    @staticmethod
    def _read(observed: ObservedTask, line: dict[str, Any]) -> None:
        if line["e"] == "came":
            observed.visits.append((line["from"], len(observed.entries)))
        elif line["e"] == "got":
            observed.entries += [(line["t"], position, entry) for position, entry in line["entries"]]
        elif line["e"] == "final":
            observed.finals.append(line["body"])
        else:
            observed.cancels.append(line["accepted"])


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """A journal's lines, without a torn last one, whose writer was killed."""
    data = path.read_bytes()
    whole, _, _ = data.rpartition(b"\n")
    for line in whole.splitlines():
        yield json.loads(line)


def journal_path(folder: Path, name: str, number: int) -> Path:
    """The journal's path for the `number`th process of that name, from 1. Paths sort by time."""
    return folder / f"{name}.{number:04d}.jsonl"


class Journal:
    """The journal of one process. A restarted process begins the next file of its name."""

    def __init__(self, folder: Path, name: str, number: int = 1) -> None:
        self.path = journal_path(folder, name, number)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        """Write one line with the event, the time and `fields`."""
        line = json.dumps({"t": round(time.monotonic(), 4), "e": event, **fields}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


#: HTTP statuses with which a gateway may refuse a task: a limit is reached, it is full, or a server is away.
DECLINES = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Output:
    """One choice: its token ids and its text."""

    tokens: tuple[int, ...]
    text: str


#: The output of a choice that ended before its first token.
NOTHING = Output((), "")
Outputs = Mapping[int, Output]


def outputs_of(entries: Sequence[Any]) -> dict[int, Output]:
    """Choice -> output. Other entries than tokens are skipped."""
    tokens: dict[int, list[int]] = {}
    texts: dict[int, list[str]] = {}
    for entry in entries:
        if isinstance(entry, list):
            tokens.setdefault(entry[0], []).append(entry[2])
            texts.setdefault(entry[0], []).append(entry[3])
    return {choice: Output(tuple(ids), "".join(texts[choice])) for choice, ids in tokens.items()}


def tokens_of(entries: Sequence[Any]) -> Counter[int]:
    """Choice -> number of tokens."""
    return Counter(entry[0] for entry in entries if isinstance(entry, list))


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise. `rule`: the name of a function here. `subject`: a task's id, a process or a key."""

    rule: str
    subject: str
    description: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.subject}: {self.description}"


@dataclass(slots=True)
class Case:
    """The evidence that the rules judge."""

    history: History
    stores: Stores
    streams: Mapping[str, Stream]
    """Each task's stream as it was when the task ended."""
    outputs: Mapping[int, Outputs] = field(default_factory=dict)
    """Variant -> choices of the run without faults, for tasks that completed there."""
    shared: bool = False
    """Whether others use the system: tasks that the journals do not know are then theirs."""
    meant: frozenset[str] = frozenset()
    """Tasks that may be given up and may have dead letters."""
    ledger: Ledger = field(default_factory=Ledger)
    """What the run added to the ledger."""

    @classmethod
    def of(
        cls,
        history: History,
        stores: Stores,
        ended: Mapping[str, Stream],
        *,
        shared: bool = False,
        ledger: Ledger | None = None,
    ) -> Case:
        """The case of a run. `ended`: streams as they were when their tasks ended, as far as they were read then.
        `ledger`: what the run added to it."""
        streams = {**stores.streams, **ended}
        outputs = {
            observed.variant: dict.fromkeys(range(observed.task["n"]), NOTHING)
            | outputs_of([entry for _, entry in stream])
            for observed in history.tasks.values()
            if observed.quiet and _is_completed(stream := streams.get(str(observed.id), []))
        }
        return cls(history, stores, streams, outputs, shared, ledger=ledger or Ledger())

    def ended(self) -> Iterator[tuple[str, Stream, dict[str, str]]]:
        """Tasks with their streams and records, where both exist."""
        for task_id, record in self.stores.records.items():
            if stream := self.streams.get(task_id) or self.stores.streams.get(task_id):
                yield task_id, stream, record


def _is_completed(stream: Stream) -> bool:
    last = stream[-1][1] if stream else None
    return isinstance(last, dict) and last.get("end") == "completed"


#: A function that yields the violations in a case.
Rule = Callable[[Case], Iterator[Violation]]
