"""What must hold of every finished task: its record, and its stream as it stands in the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from producers.contract import keys
from producers.contract.record import Record


@dataclass(frozen=True, slots=True)
class Stored:
    """A task as the store holds it: its record, and its stream's entries with their ids."""

    record: Record
    entries: tuple[tuple[str, Any], ...]
    lives: tuple[int, int]
    """Seconds that record and stream have to live; -1: for ever, -2: there is none."""

    @classmethod
    def read(cls, store: Redis, task_id: str) -> Stored:
        """From a client that decodes replies."""
        pipe = store.pipeline(transaction=True)
        pipe.hgetall(keys.task(task_id))
        pipe.xrange(keys.stream(task_id))
        pipe.ttl(keys.task(task_id))
        pipe.ttl(keys.stream(task_id))
        raw, entries, *lives = pipe.execute()
        read = tuple((name, json.loads(fields["e"])) for name, fields in entries)
        return cls(Record.parse(task_id, raw), read, (lives[0], lives[1]))

    @property
    def tokens(self) -> list[list[int]]:
        """Token ids, per choice."""
        found: list[list[int]] = [[] for _ in range(self.record.n)]
        for _, entry in self.entries:
            if isinstance(entry, list):
                found[entry[0]].append(entry[2])
        return found

    @property
    def discarded(self) -> int:
        """Tokens of the candidates that best_of did not choose."""
        task = self.record.task
        if self.record.status != "completed" or not task.get("best_of"):
            return 0
        return (int(task["best_of"]) - self.record.n) * int(task["max_tokens"])

    @property
    def prompt(self) -> list[Any]:
        """The entries before the first token."""
        first = next((at for at, (_, entry) in enumerate(self.entries) if isinstance(entry, list)), len(self.entries))
        return [entry for _, entry in self.entries[:first] if "end" not in entry]

    def faults(self, statuses: Sequence[str] = ("completed",), deaths: int = 0) -> list[str]:
        """What is wrong with it: it should be settled, in one of these states, after at most so many deaths."""
        fields, found = self.record.fields, []
        if not self.record.final or self.record.status not in statuses or fields.get("end") != self.record.status:
            found.append(f"is {self.record.status} (end: {fields.get('end')}), not {' or '.join(statuses)}")
        if "settled" not in fields or "claim" in fields or "owner" in fields:
            found.append("is not settled")
        elif min(self.lives) < 0:
            found.append(f"is settled, and would live for ever: {self.lives}")
        if self.record.deaths > deaths:
            found.append(f"counts {self.record.deaths} deaths; there were {deaths}")
        return [f"task {self.record.id} {fault}" for fault in found + self._stream_faults()]

    def _stream_faults(self) -> list[str]:
        found = []
        names = [name for name, _ in self.entries]
        if names != [f"{at + 1}-0" for at in range(len(names))]:
            found.append(f"has a stream with holes: {names}")
        indexes: dict[int, list[int]] = {}
        for _, entry in self.entries:
            if isinstance(entry, list):
                indexes.setdefault(entry[0], []).append(entry[1])
        for choice, seen in indexes.items():
            if seen != list(range(len(seen))):
                found.append(f"has indexes {seen} in choice {choice}")
        if self.record.nexts != [len(tokens) for tokens in self.tokens]:
            found.append(f"counts {self.record.nexts} tokens, its stream has {[len(t) for t in self.tokens]}")
        ends = [at for at, (_, entry) in enumerate(self.entries) if isinstance(entry, dict) and "end" in entry]
        if ends != [len(self.entries) - 1]:
            found.append(f"has terminal entries at {ends} of {len(self.entries)}")
        elif self.entries[-1][1]["end"] != self.record.status:
            found.append(f"is {self.record.status}, its stream says {self.entries[-1][1]['end']}")
        elif self.entries[-1][1]["usage"]["output_tokens"] != sum(map(len, self.tokens)) + self.discarded:
            found.append(f"is billed {self.entries[-1][1]['usage']} for {sum(map(len, self.tokens))} tokens")
        return found
