"""The evidence of a run, the outputs in its streams, and the violations that rules find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.trials.chaos.checker.history import History
from workers.trials.chaos.checker.store import Ledger, Stores, Stream

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
